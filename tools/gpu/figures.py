"""The findings of a part, and their JSON file.

The process of the part rewrites the file after every finding, so that a part that fails or is stopped leaves its
figures. The process that runs the parts reads it.
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
    """One measured number.

    `limit` is the best value that the measured rates of the GPU allow: NaN if they are unknown, None if there is none.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    less_is_better: bool = False

    @property
    def share(self) -> float | None:
        """Return the share of the limit that is reached, at most 1."""
        if not self.limit or not self.value or math.isnan(self.limit):
            return None
        return self.limit / self.value if self.less_is_better else self.value / self.limit


class Target(NamedTuple):
    """The target of a figure on TARGET_GPU; `of_limit`: as a share of its limit."""

    bound: float
    of_limit: bool = False

    def is_met(self, figure: Figure) -> bool:
        if self.of_limit:
            return (figure.share or 0.0) >= self.bound
        return figure.value <= self.bound if figure.less_is_better else figure.value >= self.bound

    def describe(self, figure: Figure) -> str:
        """Return the target for a table."""
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
    """Collects findings, writes them to the file and prints them."""

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
        """Add a remark about the figures."""
        print(f"  {sentence}", flush=True)
        self._findings.notes.append(sentence)
        self._write()

    def fail(self, sentence: str) -> None:
        """Add an error; the part continues, and the exit status of the run is 1."""
        self._findings.has_failed = True
        self.note(f"FAILED: {sentence}")

    def detail(self, name: str, data: Any) -> None:
        """Add raw data, which only the JSON file has."""
        self._findings.details[name] = data
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self._findings)), encoding="utf-8")
        unfinished.replace(self._path)


def read_findings(path: Path) -> Findings:
    """Return the findings of a part that has ended; empty if it wrote nothing."""
    if not path.exists():
        return Findings()
    found = json.loads(path.read_text(encoding="utf-8"))
    return Findings(**found | {"figures": [Figure(**figure) for figure in found["figures"]]})


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
