"""The inputs of a part: its folder, the GPU's abilities, and whether it rehearses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.gpu.figures import Notebook, read_findings
from loadtest.gpu.shapes import SHAPES, TINY_SHAPES, Limits, Rates, Shape

COPY_BANDWIDTH = "copy bandwidth"
BF16_RATE = "bf16 matrix rate"


@dataclass(slots=True)
class Task:
    """One part's. `scratch` is a folder that all parts of a run share."""

    name: str
    scratch: Path
    is_rehearsal: bool
    notebook: Notebook = field(init=False)

    def __post_init__(self) -> None:
        self.notebook = Notebook(self.scratch / f"{self.name}.json")

    def rates(self) -> Rates:
        """What the part called machine measured; NaN where it failed."""
        found = {figure.name: figure.value for figure in read_findings(self.scratch / "machine.json").figures}
        return Rates(found.get(COPY_BANDWIDTH, math.nan) * 1e9, found.get(BF16_RATE, math.nan) * 1e12)

    def shape(self, name: str) -> Shape:
        return (TINY_SHAPES if self.is_rehearsal else SHAPES)[name]

    def limits(self, shape: Shape, **itemsizes: float) -> Limits:
        return Limits(shape, self.rates(), **itemsizes)

    def log_tail(self, path: Path, num_lines: int = 30) -> str:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-num_lines:])
