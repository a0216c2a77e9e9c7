"""The results of a comparison: the raw document, its medians, its tables in Markdown, and ratios to Quire.

Standard library, plus drawing. Knows figures and names; nothing of how a server is started or spoken to.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from loadtest.peers.shapes import SHAPES
from loadtest.plots import draw_comparison
from loadtest.report import without_nan

QUIRE = "quire"
ROOT = Path(__file__).parents[1]


class Figure(NamedTuple):
    """A number of a point: one of its keys, or a quantile of seconds, shown in milliseconds."""

    title: str
    key: str
    quantile: str = ""

    @property
    def more_is_better(self) -> bool:
        return not self.quantile

    def of(self, point: Mapping[str, Any]) -> float:
        value = point[self.key][self.quantile] if self.quantile else point[self.key]
        return math.nan if value is None else float(value) * (1e3 if self.quantile else 1)


OUTPUT = Figure("out tok/s", "output_tokens_per_s")
TTFT = Figure("TTFT p50 ms", "ttft_s", "p50")
ITL = Figure("ITL p50 ms", "itl_s", "p50")
FIGURES = (
    OUTPUT,
    Figure("all tok/s", "total_tokens_per_s"),
    TTFT,
    Figure("TTFT p99 ms", "ttft_s", "p99"),
    ITL,
    Figure("ITL p99 ms", "itl_s", "p99"),
)
PROMPT = Figure("prompt tokens of a request", "prompt_tokens_each")  # measured, and no column
IDLE_LOAD = 0.5
_LONG_PROMPT = 1000  # tokens: shorter ones are bound by more than products


@dataclass(slots=True)
class Drive:
    """One server, started once: its start, its memory, its points and its failures."""

    peer: str
    model: str
    round: int
    command: str = ""
    ready_s: float = math.nan
    peak_rss_bytes: int = 0
    points: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


Row = dict[str, dict[Figure, float]]  # of one workload at one concurrency: each server's medians


@dataclass(slots=True)
class Results:
    """Everything measured so far. `peers` says of every server known whether it is here, its version and its size."""

    host: dict[str, Any]
    settings: dict[str, Any]
    roofline: dict[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    drives: list[Drive] = field(default_factory=list)
    is_interrupted: bool = False

    def rows(self, model: str) -> Iterator[tuple[str, int, Row]]:
        """(workload, concurrency, medians over the rounds), in the order of the settings. Failed points are no rows."""
        for load in self.settings["workloads"]:
            for level in self.settings["concurrency"]:
                row: Row = {}
                for peer in self._driven(model):
                    points = [
                        point
                        for drive in self._of(model, peer)
                        for point in drive.points
                        if (point["workload"], point["concurrency"]) == (load["name"], level) and point["output_tokens"]
                    ]
                    if points:
                        row[peer] = {figure: statistics.median(map(figure.of, points)) for figure in (*FIGURES, PROMPT)}
                if row:
                    yield load["name"], level, row

    def markdown(self) -> str:
        """The tables, with the machine and what stood in the way."""
        return "\n".join(
            [*self._head(), *(line for model in self.settings["models"] for line in self._of_model(model))]
        )

    def write(self, folder: Path) -> None:
        """results.json and table.md."""
        (folder / "results.json").write_text(json.dumps(without_nan(asdict(self)), indent=1) + "\n", encoding="utf-8")
        (folder / "table.md").write_text(self.markdown() + "\n", encoding="utf-8")

    def draw(self, folder: Path) -> None:
        for model in self.settings["models"]:
            if rows := list(self.rows(model)):
                draw_comparison(folder / f"{model}.png", f"{model}, {self._machine()}", QUIRE, rows)

    def show(self, console: Console) -> None:
        console.print("\n" + self.markdown(), markup=False, highlight=False, soft_wrap=True)

    def _driven(self, model: str) -> list[str]:
        return list(dict.fromkeys(drive.peer for drive in self.drives if drive.model == model))

    def _of(self, model: str, peer: str) -> list[Drive]:
        return [drive for drive in self.drives if (drive.model, drive.peer) == (model, peer)]

    def _machine(self) -> str:
        host = self.host
        return f"{host['cpu']}, {host['cores']} cores, {host['date'][:10]}, commit {host['commit']}"

    def _head(self) -> Iterable[str]:
        roof, settings = self.roofline, self.settings
        yield f"{self._machine()}. {settings['precision']} weights, {settings['num_threads']} threads, {settings['kv_gib']} GiB"
        yield f"of K/V, medians of {settings['rounds']} rounds. Roofline ({roof['source']}): {_roof(roof)}."
        if self.host["load_average"] > IDLE_LOAD:
            yield f"The machine was busy before (load average {self.host['load_average']:.1f}): neighbours are in the figures."
        absent = [name for name, peer in self.peers.items() if not peer["here"]]
        if absent:
            yield f"Not here: {', '.join(absent)}."

    def _of_model(self, model: str) -> Iterable[str]:
        peers = self._driven(model)
        if not peers:
            return
        yield f"\n### {model}\n"
        yield "| server | version | first token after | peak RSS | installed |"
        yield "|---|---|---|---|---|"
        for peer in peers:
            drives, known = self._of(model, peer), self.peers[peer]
            ready = " / ".join(f"{drive.ready_s:.1f} s" for drive in drives)
            rss = max(drive.peak_rss_bytes for drive in drives)
            yield f"| {peer} | {known['version']} | {ready} | {_size(rss)} | {_size(known['installed_bytes'])} |"
        yield from self._against_roofline(model)
        yield from self._against_best(model)
        for workload in dict.fromkeys(name for name, _, _ in self.rows(model)):
            yield f"\n{self._told(workload)}\n"
            yield f"| at once | server | {' | '.join(figure.title for figure in FIGURES)} | of Quire's output |"
            yield "|---" * (len(FIGURES) + 3) + "|"
            for name, level, row in self.rows(model):
                for peer, figures in row.items() if name == workload else ():
                    share = ratio(figures[OUTPUT], row.get(QUIRE, {}).get(OUTPUT))
                    cells = " | ".join(f"{figures[figure]:.4g}" for figure in FIGURES)
                    yield f"| {level} | {peer} | {cells} | {share} |"
        for drive in self.drives:
            for failure in drive.failures if drive.model == model else ():
                yield f"\n{drive.peer}, round {drive.round + 1}: {failure.splitlines()[0]}"

    def _against_best(self, model: str) -> Iterable[str]:
        rows = [(name, level, row) for name, level, row in self.rows(model) if QUIRE in row and len(row) > 1]
        if not rows:
            return
        yield "\nQuire against the best of the others, each figure's own best; above 1 Quire is ahead\n"
        yield f"| workload | at once | {' | '.join(figure.title for figure in FIGURES)} |"
        yield "|---" * (len(FIGURES) + 2) + "|"
        for name, level, row in rows:
            cells = []
            for figure in FIGURES:
                peer, lead = lead_over_best(row, figure)
                cells.append(f"{lead:.2f} {peer}")
            yield f"| {name} | {level} | {' | '.join(cells)} |"

    def _against_roofline(self, model: str) -> Iterable[str]:
        """One request alone: generating reads every weight for every token, prompts are bound by multiplications."""
        shape, eight = SHAPES[model], self.settings["precision"] != "bf16"
        reads, products = self.roofline["read_bytes_per_s"], self.roofline["int8_ops" if eight else "bf16_flops"]
        lines = []
        for name, level, row in self.rows(model):
            for peer, figures in row.items() if level == 1 else ():
                if reads and figures[ITL] > 0:
                    generating = 1e3 / figures[ITL] * (shape.layer_weights + shape.head_weights) * (1 if eight else 2)
                    lines.append(f"| {name} | {peer} | reading weights while generating | {generating / reads:.0%} |")
                if products and figures[PROMPT] >= _LONG_PROMPT:
                    computing = 1e3 * figures[PROMPT] / figures[TTFT] * 2 * shape.layer_weights
                    lines.append(f"| {name} | {peer} | multiplying in prompts | {computing / products:.0%} |")
        if lines:
            yield "\nOne request alone, against the roofline\n"
            yield "| workload | server | bound by | reached |"
            yield "|---|---|---|---|"
            yield from lines

    def _told(self, workload: str) -> str:
        load = next(load for load in self.settings["workloads"] if load["name"] == workload)
        shared = f"{load['prefix']} shared words, then " if load["prefix"] else ""
        return f"**{workload}**: {shared}{load['prompt']} words of prompt, {load['output']} tokens out"


def lead_over_best(row: Row, figure: Figure) -> tuple[str, float]:
    """The best of Quire's peers by one figure, and by what factor Quire is better (below 1: worse)."""
    others = {
        peer: figures[figure] for peer, figures in row.items() if peer != QUIRE and not math.isnan(figures[figure])
    }
    if not others:
        return "-", math.nan
    best = (max if figure.more_is_better else min)(others, key=lambda peer: others[peer])
    ours = row[QUIRE][figure]
    quotient = (ours, others[best]) if figure.more_is_better else (others[best], ours)
    return best, quotient[0] / quotient[1] if quotient[1] else math.nan


def ratio(value: float, of: float | None) -> str:
    return f"{value / of:.2f}" if of else "-"


def describe_host() -> dict[str, Any]:
    """The machine, the day and the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    described = _git("describe", "--always", "--dirty", "--abbrev=10", "--exclude=*")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": described or "unknown",
    }


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""


def _roof(roof: Mapping[str, Any]) -> str:
    told: Sequence[tuple[str, str, str]] = (
        ("read_bytes_per_s", "GB/s read", "no bandwidth"),
        ("bf16_flops", "GFLOP/s bf16", "no bf16 instructions"),
        ("int8_ops", "Gop/s int8", "no int8 instructions"),
    )
    return ", ".join(f"{roof[key] / 1e9:.0f} {unit}" if roof[key] else lack for key, unit, lack in told)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"
