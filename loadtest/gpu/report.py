"""Writes a run's results: results.json, table.md and a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.gpu.figures import Figure, Findings
from loadtest.gpu.parts import TARGET_CARD, TARGETS
from loadtest.output import markdown, save_json
from loadtest.plots import PlotError, require_matplotlib

NO_CARD = "no card"
_REHEARSAL = "A REHEARSAL on a CPU with tiny shapes: no number here says anything about any card."


@dataclass(slots=True)
class Results:
    """Of one run. `statuses`: "done", "failed", "out of time" or "not begun" by part."""

    host: dict[str, Any]
    is_rehearsal: bool
    findings: dict[str, Findings] = field(default_factory=dict)
    statuses: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def card(self) -> str:
        machine = self.findings.get("machine", Findings())
        return str(machine.details.get("card", {}).get("name", NO_CARD))

    def figures(self) -> Iterator[Figure]:
        for findings in self.findings.values():
            yield from findings.figures

    def write(self, folder: Path) -> None:
        """Everything so far."""
        parts = {
            name: {"status": self.statuses[name], "seconds": self.seconds.get(name)} | self._part(name)
            for name in self.statuses
        }
        document = {"rehearsal": self.is_rehearsal, "card": self.card, "host": self.host, "parts": parts}
        save_json(folder / "results.json", document)
        (folder / "table.md").write_text("\n".join(self.table()) + "\n", encoding="utf-8")

    def _part(self, name: str) -> dict[str, Any]:
        found = self.findings.get(name, Findings())
        figures = [asdict(figure) | {"share": figure.share, "rehearsal": self.is_rehearsal} for figure in found.figures]
        return {"figures": figures, "notes": found.notes, "details": found.details}

    def table(self) -> Iterator[str]:
        """The figures beside their limits and targets, what was not measured, and how the parts ended."""
        yield f"# {'Rehearsal' if self.is_rehearsal else self.card}, {self.host['date']}, commit {self.host['commit']}\n"
        if self.is_rehearsal:
            yield _REHEARSAL + "\n"
        has_targets = TARGET_CARD in self.card
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

    def draw(self, folder: Path) -> None:
        """How much of its limit each figure reaches, and throughput over HTTP. Raises PlotError without matplotlib."""
        plt = require_matplotlib()
        bars = [(figure.name, figure.share) for figure in self.figures() if figure.share is not None]
        if not bars:
            raise PlotError("there is no figure to draw")
        names, shares = zip(*reversed(bars), strict=True)
        figure, axis = plt.subplots(figsize=(10, 1 + 0.24 * len(bars)), constrained_layout=True)
        axis.barh(names, [100 * share for share in shares])
        axis.axvline(100, color="tab:red", linestyle="--")
        axis.set(xlabel="% of what the card's measured rates allow", xlim=(0, 110), ylim=(-0.6, len(bars) - 0.4))
        axis.tick_params(axis="y", labelsize=8)
        title = "REHEARSAL, of no meaning" if self.is_rehearsal else self.card
        figure.suptitle(f"{title}, {self.host['date'][:10]}, commit {self.host['commit']}", fontsize="medium")
        figure.savefig(folder / "shares.png", dpi=100)
        plt.close(figure)


def number(value: float) -> str:
    """Four digits or so, as people write them."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _first_line(text: str) -> str:
    lines = text.splitlines()
    return lines[0][:200] + (" ..." if len(lines) > 1 else "")
