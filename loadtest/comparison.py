"""The results of a comparison: figures, medians, tables and ratios to Quire."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.output import markdown, save_json

QUIRE = "quire"
ROOT = Path(__file__).parents[1]


class Figure(NamedTuple):
    """A number of a point: one of its keys, or a quantile in milliseconds."""

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
FIGURES = (
    OUTPUT,
    Figure("all tok/s", "total_tokens_per_s"),
    TTFT,
    Figure("TTFT p99 ms", "ttft_s", "p99"),
    Figure("ITL p50 ms", "itl_s", "p50"),
    Figure("ITL p99 ms", "itl_s", "p99"),
)
IDLE_LOAD = 0.5


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
    """Everything measured so far; `peers` describes the servers."""

    host: dict[str, Any]
    settings: dict[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    drives: list[Drive] = field(default_factory=list)
    is_interrupted: bool = False

    def rows(self, model: str) -> Iterator[tuple[str, int, Row]]:
        """Yield workload, concurrency and medians; failed points are left out."""
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
                        row[peer] = {figure: statistics.median(map(figure.of, points)) for figure in FIGURES}
                if row:
                    yield load["name"], level, row

    def markdown(self) -> str:
        """Return the tables, with the machine, absent servers and failures."""
        return "\n".join(
            [*self._head(), *(line for model in self.settings["models"] for line in self._of_model(model))]
        )

    def write(self, folder: Path) -> None:
        """Write results.json and table.md."""
        save_json(folder / "results.json", self)
        (folder / "table.md").write_text(self.markdown() + "\n", encoding="utf-8")

    def _driven(self, model: str) -> list[str]:
        return list(dict.fromkeys(drive.peer for drive in self.drives if drive.model == model))

    def _of(self, model: str, peer: str) -> list[Drive]:
        return [drive for drive in self.drives if (drive.model, drive.peer) == (model, peer)]

    def _machine(self) -> str:
        host = self.host
        return f"{host['cpu']}, {host['cores']} cores, {host['date'][:10]}, commit {host['commit']}"

    def _head(self) -> Iterable[str]:
        settings = self.settings
        yield f"{self._machine()}. {settings['precision']} weights, {settings['num_threads']} threads, {settings['kv_gib']} GiB"
        yield f"of K/V, medians of {settings['rounds']} rounds."
        if self.host["load_average"] > IDLE_LOAD:
            yield f"The machine was busy before (load average {self.host['load_average']:.1f}), which affects the figures."
        absent = [name for name, peer in self.peers.items() if not peer["here"]]
        if absent:
            yield f"Not here: {', '.join(absent)}."

    def _of_model(self, model: str) -> Iterable[str]:
        peers = self._driven(model)
        if not peers:
            return
        yield f"\n### {model}\n"
        servers = []
        for peer in peers:
            drives, known = self._of(model, peer), self.peers[peer]
            ready = " / ".join(f"{drive.ready_s:.1f} s" for drive in drives)
            rss = max(drive.peak_rss_bytes for drive in drives)
            servers.append((peer, known["version"], ready, _size(rss), _size(known["installed_bytes"])))
        yield from markdown(("server", "version", "first token after", "peak RSS", "installed"), servers, 2)
        yield from self._against_best(model)
        for workload in dict.fromkeys(name for name, _, _ in self.rows(model)):
            yield f"\n{self._describe(workload)}\n"
            rows = []
            for name, level, row in self.rows(model):
                for peer, figures in row.items() if name == workload else ():
                    share = ratio(figures[OUTPUT], row.get(QUIRE, {}).get(OUTPUT))
                    rows.append((level, peer, *(f"{figures[figure]:.4g}" for figure in FIGURES), share))
            titles = (figure.title for figure in FIGURES)
            yield from markdown(("concurrent", "server", *titles, "of Quire's output"), rows, 2)
        for drive in self.drives:
            for failure in drive.failures if drive.model == model else ():
                yield f"\n{drive.peer}, round {drive.round + 1}: {failure.splitlines()[0]}"

    def _against_best(self, model: str) -> Iterable[str]:
        rows = [(name, level, row) for name, level, row in self.rows(model) if QUIRE in row and len(row) > 1]
        if not rows:
            return
        yield "\nQuire against the best other server in each figure; above 1 Quire is ahead\n"
        leads = []
        for name, level, row in rows:
            best = [lead_over_best(row, figure) for figure in FIGURES]
            leads.append((name, level, *(f"{lead:.2f} {peer}" for peer, lead in best)))
        yield from markdown(("workload", "concurrent", *(figure.title for figure in FIGURES)), leads, 2)

    def _describe(self, workload: str) -> str:
        load = next(load for load in self.settings["workloads"] if load["name"] == workload)
        shared = f"{load['prefix']} shared words, then " if load["prefix"] else ""
        return f"**{workload}**: {shared}{load['prompt']} words of prompt, {load['output']} tokens out"


def lead_over_best(row: Row, figure: Figure) -> tuple[str, float]:
    """Return the best other server by one figure, and Quire's lead over it."""
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
    """Describe the machine, the date and the commit."""
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


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"
