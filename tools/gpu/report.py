"""Writes the results of a run: results.json and table.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.output import markdown, save_json
from tools.gpu.figures import Figure, Findings
from tools.gpu.parts import TARGET_GPU, TARGETS

NO_GPU = "no GPU"
_REHEARSAL = "A REHEARSAL on a CPU with tiny shapes: the figures have no meaning."


@dataclass(slots=True)
class Results:
    """The results of a run; a part is "done", "failed", "out of time" or "not begun"."""

    host: dict[str, Any]
    is_rehearsal: bool
    findings: dict[str, Findings] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def gpu(self) -> str:
        machine = self.findings.get("machine", Findings())
        return str(machine.details.get("gpu", {}).get("name", NO_GPU))

    def figures(self) -> Iterator[Figure]:
        for findings in self.findings.values():
            yield from findings.figures

    def write(self, folder: Path) -> None:
        """Write all results so far."""
        parts = {
            name: {"status": self.statuses[name], "seconds": self.seconds.get(name)} | self._part(name)
            for name in self.statuses
        }
        document = {"rehearsal": self.is_rehearsal, "gpu": self.gpu, "host": self.host, "parts": parts}
        save_json(folder / "results.json", document)
        (folder / "table.md").write_text("\n".join(self.table()) + "\n", encoding="utf-8")

    def _part(self, name: str) -> dict[str, Any]:
        found = self.findings.get(name, Findings())
        figures = [asdict(figure) | {"share": figure.share, "rehearsal": self.is_rehearsal} for figure in found.figures]
        return {"figures": figures, "notes": found.notes, "details": found.details}

    def table(self) -> Iterator[str]:
        """Yield the figures with their limits and targets, and the outcome of each part."""
        yield f"# {'Rehearsal' if self.is_rehearsal else self.gpu}, {self.host['date']}, commit {self.host['commit']}\n"
        if self.is_rehearsal:
            yield _REHEARSAL + "\n"
        has_targets = TARGET_GPU in self.gpu
        rows = []
        for figure in self.figures():
            target = TARGETS.get(figure.name) if has_targets else None
            bound, met = (target.describe(figure), "yes" if target.is_met(figure) else "**no**") if target else ("", "")
            limit = "" if figure.share is None or figure.limit is None else number(figure.limit)
            share = "" if figure.share is None else f"{figure.share:.0%}"
            rows.append((figure.name, f"{number(figure.value)} {figure.unit}", limit, share, bound, met))
        measured = {figure.name for figure in self.figures()}
        rows += [(name, "not measured", "", "", "", "") for name in TARGETS if has_targets and name not in measured]
        measured_or_rehearsed = "rehearsed" if self.is_rehearsal else "measured"
        yield from markdown(("figure", measured_or_rehearsed, "limit", "of it", "target", "met"), rows)
        yield ""
        for name, status in self.statuses.items():
            yield f"- {name}: {status}, {self.seconds.get(name, 0.0):.0f} s"
            yield from (f"  - {_first_line(note)}" for note in self.findings.get(name, Findings()).notes[:12])


def number(value: float) -> str:
    """Return about four digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _first_line(text: str) -> str:
    lines = text.splitlines()
    return lines[0][:200] + (" ..." if len(lines) > 1 else "")
