"""The findings of a part, and their JSON file, rewritten after every finding.

So a part that fails, or that is stopped when its time is up, leaves what it had measured. Written by the part's process,
read by the one that runs the parts. Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class PartError(Exception):
    """A part cannot go on; one sentence."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `limit` is what the card's measured rates leave possible, in the same unit: NaN where they are
    not known, None for what has none."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    less_is_better: bool = False

    @property
    def share(self) -> float | None:
        """How much of the limit is reached, 1 at the most."""
        if not self.limit or not self.value or math.isnan(self.limit):
            return None
        return self.limit / self.value if self.less_is_better else self.value / self.limit


class Target(NamedTuple):
    """What a figure should come to on the card of TARGET_CARD; `of_limit`: as a share of its limit."""

    bound: float
    of_limit: bool = False

    def is_met(self, figure: Figure) -> bool:
        if self.of_limit:
            return (figure.share or 0.0) >= self.bound
        return figure.value <= self.bound if figure.less_is_better else figure.value >= self.bound

    def describe(self, figure: Figure) -> str:
        """As it stands in a table."""
        if self.of_limit:
            return f">= {self.bound:.0%} of the limit"
        return f"{'<=' if figure.less_is_better else '>='} {self.bound:,.10g} {figure.unit}"


@dataclass(slots=True)
class Findings:
    """Figures, sentences and raw data of one part."""

    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    has_failed: bool = False


class Notebook:
    """Findings on their way to the disk. What is added is also said on stdout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._findings = Findings()

    @property
    def has_failed(self) -> bool:
        return self._findings.has_failed

    def figure(self, figure: Figure) -> None:
        share = "" if figure.share is None else f"   {figure.share:.1%} of the limit {figure.limit:,.5g}"
        print(f"  {figure.name}: {figure.value:,.5g} {figure.unit}{share}", flush=True)
        self._findings.figures.append(figure)
        self._write()

    def note(self, sentence: str) -> None:
        """Something to know about the figures."""
        print(f"  {sentence}", flush=True)
        self._findings.notes.append(sentence)
        self._write()

    def fail(self, sentence: str) -> None:
        """Something that should have worked; the part goes on, and the run's exit status will tell."""
        self._findings.has_failed = True
        self.note(f"FAILED: {sentence}")

    def detail(self, name: str, data: Any) -> None:
        """Raw data for whoever wants more than the table."""
        self._findings.details[name] = data
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self._findings)), encoding="utf-8")
        unfinished.replace(self._path)


def read_findings(path: Path) -> Findings:
    """Of a part that has ended, however; empty where it wrote nothing."""
    if not path.exists():
        return Findings()
    found = json.loads(path.read_text(encoding="utf-8"))
    return Findings(**found | {"figures": [Figure(**figure) for figure in found["figures"]]})


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of a line (begin, end) lie on, where they overlap once."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
