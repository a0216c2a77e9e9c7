"""Pictures of benchmarks and comparisons; only these need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.client import Outcome
from loadtest.errors import LoadtestError
from loadtest.report import Point, gaps, ttfts

_COMPARED = ("out tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms")


class PlotError(LoadtestError):
    """A picture cannot be drawn; the message says what to install."""


def require_matplotlib() -> Any:
    """Return matplotlib's pyplot, which draws to files only. Raises PlotError."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install 'quire-serve[plot]'.") from None
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


def draw_comparison(
    path: Path, title: str, base: str, rows: Sequence[tuple[str, int, Mapping[str, Mapping[Any, float]]]]
) -> None:
    """Draw a column for each workload and a line for each server, over concurrency.

    A row is (workload, concurrency, figures of each server); a figure's key has the `title` that labels its axis.
    """
    plt = require_matplotlib()
    workloads = list(dict.fromkeys(workload for workload, _, _ in rows))
    figures = [key for key in next(iter(rows[0][2].values())) if key.title in _COMPARED]
    names = list(dict.fromkeys(name for _, _, row in rows for name in row))
    shape = {"figsize": (4.2 * len(workloads), 3.1 * (1 + len(figures))), "constrained_layout": True}
    figure, axes = plt.subplots(1 + len(figures), len(workloads), squeeze=False, sharex="col", **shape)
    for column, workload in zip(axes.T, workloads, strict=True):
        of_workload = [(level, row) for name, level, row in rows if name == workload]
        for name in names:
            points = [(level, row[name], row.get(base)) for level, row in of_workload if name in row]
            style = {"marker": "o", "label": name, "linewidth": 2.5 if name == base else 1.2}
            for axis, key in zip(column, figures, strict=False):
                axis.plot([level for level, _, _ in points], [values[key] for _, values, _ in points], **style)
            shares = [(level, values[figures[0]] / of[figures[0]]) for level, values, of in points if of]
            column[-1].plot([level for level, _ in shares], [share for _, share in shares], **style)
        for axis, key in zip(column, figures, strict=False):
            is_log = not key.more_is_better and all(row[name][key] > 0 for _, row in of_workload for name in row)
            axis.set(ylabel=key.title)
            if is_log:
                log_y(plt, axis)
            else:
                axis.set(ylim=(0, None))
        column[0].set(title=workload, xscale="log")
        column[-1].set(ylabel=f"{figures[0].title} / {base}'s", ylim=(0, None), xlabel="concurrent requests")
        levels = sorted({level for level, _ in of_workload})
        column[-1].set_xticks(levels, [str(level) for level in levels])
        column[-1].xaxis.set_minor_formatter("")
    axes[0][0].legend()
    figure.suptitle(title.replace(", ", "\n", 1), fontsize="medium", wrap=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
