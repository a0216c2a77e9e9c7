"""The inputs of a part: its folder, the rates of the GPU, the mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest.shapes import Shape
from tools.gpu.figures import Notebook, read_findings
from tools.gpu.limits import Limits, Rates
from tools.gpu.models import ON_GPU

COPY_BANDWIDTH = "copy bandwidth"
BF16_RATE = "bf16 matrix rate"
_TINY: dict[str, Any] = {
    "hidden": 64,
    "ffn": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 1024,
}


@dataclass(slots=True)
class Task:
    """The inputs of one part; all parts of a run share the folder `scratch`."""

    name: str
    scratch: Path
    is_rehearsal: bool
    notebook: Notebook = field(init=False)

    def __post_init__(self) -> None:
        self.notebook = Notebook(self.scratch / f"{self.name}.json")

    def rates(self) -> Rates:
        """Return the rates that the part `machine` measured; NaN if it failed."""
        found = {figure.name: figure.value for figure in read_findings(self.scratch / "machine.json").figures}
        return Rates(found.get(COPY_BANDWIDTH, math.nan) * 1e9, found.get(BF16_RATE, math.nan) * 1e12)

    def shape(self, name: str) -> Shape:
        """Return a shape of ON_GPU, which a rehearsal makes tiny."""
        return replace(ON_GPU[name], **_TINY) if self.is_rehearsal else ON_GPU[name]

    def limits(self, shape: Shape, **itemsizes: float) -> Limits:
        return Limits(shape, self.rates(), **itemsizes)

    def log_tail(self, path: Path, num_lines: int = 30) -> str:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-num_lines:])
