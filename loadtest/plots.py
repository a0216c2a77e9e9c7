"""Pictures of benchmarks; only these need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.client import Outcome
from loadtest.errors import LoadtestError
from loadtest.report import Point, gaps, ttfts


def require_matplotlib() -> Any:
    """Return matplotlib's pyplot, which draws to files only. Raises LoadtestError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise LoadtestError("plots need matplotlib, which is not installed: pip install 'quire-serve[plot]'.") from None
    mpl.use("Agg")
    mpl.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    return plt


def log_y(plt: Any, axes: Any) -> None:
    """Give the y axis a logarithmic scale with plain numbers."""
    axes.set(yscale="log")
    axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def draw_bench(path: Path, points: Sequence[Point], outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw throughput, latency, and the distributions of TTFT and ITL."""
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
        good = [outcome for outcome in of_load if not outcome.error]
        _cdf(first, ttfts(good), load)
        _cdf(between, gaps(good), load)
    first.set(title="Time to first token", xlabel="ms", ylabel="share of requests", xscale="log")
    between.set(title="Time between chunks", xlabel="ms", ylabel="share of gaps", xscale="log")
    for axis in (first, between):
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cdf(axis: Any, seconds: Sequence[float], label: str) -> None:
    if seconds:
        ordered = sorted(max(second * 1e3, 0.1) for second in seconds)  # the axis is logarithmic
        axis.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", label=label)
