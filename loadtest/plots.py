"""Pictures of a benchmark or a simulation, drawn with matplotlib where it is installed; the rest never needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.config import SchedulerConfig
from loadtest.client import Outcome
from loadtest.report import Point, gaps, ttfts
from loadtest.simulate import Trace


class PlotError(Exception):
    """A picture cannot be drawn; the message says what to install."""


def require_matplotlib() -> Any:
    """matplotlib's pyplot without a display. Raises PlotError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install 'quire[plot]'.") from None
    mpl.use("Agg")
    mpl.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    return plt


def draw_bench(path: Path, points: Sequence[Point], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Throughput and latency over the sweep, the trade between them, and the TTFT and ITL distributions."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    (throughput, trade), (first, between) = axes
    levels = [point.level for point in points]
    throughput.plot(levels, [point.output_tokens_per_s for point in points], marker="o")
    throughput.set(
        title="Throughput", xlabel=points[0].load.rpartition(" ")[0], ylabel="output tokens / s", ylim=(0, None)
    )
    for quantile in ("p50", "p99"):
        latency = [getattr(point.tpot_s, quantile) * 1e3 for point in points]
        trade.plot([point.output_tokens_per_s for point in points], latency, marker="o", label=f"TPOT {quantile}")
    for point in points:
        trade.annotate(f"{point.level:g}", (point.output_tokens_per_s, point.tpot_s.p50 * 1e3), xytext=(4, 4),
                       textcoords="offset points", fontsize=8)  # fmt: skip
    trade.set(title="Latency against throughput", xlabel="output tokens / s", ylabel="ms / token", ylim=(0, None))
    trade.legend()
    for load, of_load in outcomes.items():
        _cdf(first, ttfts(of_load), load)
        _cdf(between, gaps(of_load), load)
    first.set(title="Time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    between.set(title="Time between chunks", xlabel="ms", ylabel="share of gaps", xscale="log")
    for axis in (first, between):
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cdf(axis: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        ordered = sorted(max(second * 1e3, 0.01) for second in seconds)  # the axis is logarithmic
        axis.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=label)


def draw_simulation(path: Path, trace: Trace, static_blocks: int, config: SchedulerConfig) -> None:
    """Blocks in use against static allocation and the pool, and the queues below."""
    plt = require_matplotlib()
    figure, (memory, queues) = plt.subplots(2, 1, figsize=(10, 7), sharex=True, constrained_layout=True)
    times = [sample.time for sample in trace.samples]
    memory.fill_between(times, [sample.held for sample in trace.samples], step="pre", alpha=0.5, label="held (paged)")
    memory.axhline(static_blocks, color="tab:red", linestyle="--", label=f"static allocation: {static_blocks}")
    memory.axhline(trace.peak, color="tab:green", linestyle=":", label=f"paged peak: {trace.peak}")
    memory.set(
        title=f"KV blocks of {config.block_size} tokens in use, {config.policy}", ylabel="blocks", ylim=(0, None)
    )
    memory.legend()
    for name in ("running", "waiting", "preempted"):
        queues.step(times, [getattr(sample, name) for sample in trace.samples], where="pre", label=name)
    queues.set(xlabel="step", ylabel="sequences", ylim=(0, None))
    queues.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
