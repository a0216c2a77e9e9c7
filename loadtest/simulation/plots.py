"""Pictures of replays: blocks, queues and latencies of each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.plots import log_y, require_matplotlib
from loadtest.simulation.replay import History
from loadtest.simulation.report import Row

_QUANTILES = ("p50", "p90", "p99")


def draw_replays(path: Path, rows: Sequence[Row], histories: Sequence[History]) -> None:
    """Draw a column for each workload: blocks, queue, TTFT, TPOT, tenants."""
    plt = require_matplotlib()
    workloads = list(dict.fromkeys(row.workload for row in rows))
    num_rows = 5 if any(row.figures.tenants for row in rows) else 4
    size = {"figsize": (5.5 * len(workloads), 3 * num_rows), "constrained_layout": True}
    figure, axes = plt.subplots(num_rows, len(workloads), squeeze=False, **size)
    for column, workload in zip(axes.T, workloads, strict=True):
        chosen = [(row, history) for row, history in zip(rows, histories, strict=True) if row.workload == workload]
        blocks, waiting, ttft, tpot = column[:4]
        for row, history in chosen:
            samples = history.replicas[0].samples
            times = [sample.time_s for sample in samples]
            blocks.step(times, [sample.blocks_held for sample in samples], where="post", label=row.variant)
            queued = [sample.num_waiting + sample.num_preempted for sample in samples]
            waiting.step(times, queued, where="post", label=row.variant)
        blocks.set(title=workload, xlabel="s", ylabel="KV blocks held", ylim=(0, None))
        waiting.set(xlabel="s", ylabel="requests waiting", ylim=(0, None))
        each = [row for row, _ in chosen]
        for axis, name in ((ttft, "ttft_s"), (tpot, "tpot_s")):
            values = {
                row.variant: [getattr(getattr(row.figures, name), quantile) * 1e3 for quantile in _QUANTILES]
                for row in each
            }
            _bars(axis, _QUANTILES, values)
            axis.set(ylabel=f"{name[:4].upper()}, ms")
        log_y(plt, ttft)
        tpot.set(ylim=(0, None))
        names = sorted({name for row in each for name in row.figures.tenants})
        if num_rows == 5:
            tenants = column[4]
            tenants.set_axis_off()
        if names:
            tenants.set_axis_on()
            values = {row.variant: [row.figures.tenants[name].ttft_s.p99 * 1e3 for name in names] for row in each}
            _bars(tenants, names, values)
            tenants.set(ylabel="TTFT p99 by tenant, ms")
            log_y(plt, tenants)
            tenants.tick_params(axis="x", labelrotation=30)
    handles, labels = axes[0][0].get_legend_handles_labels()  # the same in every column
    figure.legend(handles, labels, loc="outside upper center", ncols=2 * len(workloads), fontsize="small")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _bars(axis: Any, groups: Sequence[str], values: Mapping[str, Sequence[float]]) -> None:
    """Grouped bars: one a variant in each group."""
    width = 0.8 / len(values)
    for index, (variant, heights) in enumerate(values.items()):
        places = [group + (index - (len(values) - 1) / 2) * width for group in range(len(groups))]
        axis.bar(places, heights, width, label=variant)
    axis.set_xticks(range(len(groups)), groups)
