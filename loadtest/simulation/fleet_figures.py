"""The figures of a fleet in a closed loop, simulated or real, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import nan
from statistics import fmean, median
from typing import Any

from loadtest.output import in_ms, print_table
from loadtest.report import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, simulated or real; times are seconds."""

    num_requests: int
    num_failed: int
    prompt_tokens: int
    ideal_tokens: int  # that an endless cache would have served
    cached_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    duration_s: float
    shares: tuple[int, ...]  # answers of each daemon, or nothing

    @property
    def of_ideal(self) -> float:
        """Return the cached share of the ideal."""
        return self.cached_tokens / self.ideal_tokens if self.ideal_tokens else 0.0

    @classmethod
    def of_times(cls, ttft_s: Sequence[float], e2e_s: Sequence[float], **counts: Any) -> Figures:
        """Return figures with the percentiles of these times."""
        ttft_s, e2e_s = sorted(ttft_s), sorted(e2e_s)
        return cls(
            ttft_mean_s=fmean(ttft_s) if ttft_s else nan,
            ttft_p50_s=percentile(ttft_s, 0.5),
            ttft_p95_s=percentile(ttft_s, 0.95),
            e2e_mean_s=fmean(e2e_s) if e2e_s else nan,
            e2e_p50_s=percentile(e2e_s, 0.5),
            e2e_p95_s=percentile(e2e_s, 0.95),
            **counts,
        )

    @classmethod
    def read(cls, document: dict[str, Any]) -> Figures:
        """Return figures from a file."""
        return cls(**{**document, "shares": tuple(document["shares"])})

    def plain(self) -> dict[str, Any]:
        """Return them as a JSON object."""
        return asdict(self)


def middle(each: Sequence[Figures]) -> Figures:
    """Return the median of each figure over runs."""
    values = {field.name: median(getattr(one, field.name) for one in each) for field in fields(Figures)[:-1]}
    shares = tuple(int(median(counts)) for counts in zip(*(one.shares for one in each), strict=True))
    return Figures(**values, shares=shares)


_HEAD = "cached", "of ideal", "x first", "TTFT p50", "x first", "p95", "e2e p50", "p95", "s", "answers", "failed"


def show_fleet(found: Mapping[str, tuple[int, Figures]]) -> None:
    """Print a row for each policy: its number of runs, its figures, and how they compare with the first policy's."""
    _, basis = next(iter(found.values()))
    print_table(("policy", "runs", *_HEAD), [(name, num, *_cells(seen, basis)) for name, (num, seen) in found.items()])


def _cells(seen: Figures, basis: Figures) -> list[str]:
    return [
        f"{seen.cached_tokens:,.0f}",
        f"{seen.of_ideal:.1%}",
        f"{seen.cached_tokens / basis.cached_tokens:.2f}" if basis.cached_tokens else "-",
        in_ms(seen.ttft_p50_s, 0),
        f"{seen.ttft_p50_s / basis.ttft_p50_s:.2f}",
        *(in_ms(each, 0) for each in (seen.ttft_p95_s, seen.e2e_p50_s, seen.e2e_p95_s)),
        f"{seen.duration_s:.1f}",
        " + ".join(map(str, seen.shares)),
        f"{seen.num_failed:.0f}",
    ]
