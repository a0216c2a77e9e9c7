"""Figures on paper: tables of variants, tenants and fleets, and the document that holds everything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.simulation.figures import Figures, Targets, recording_figures
from loadtest.simulation.recording import Replayed


class Row(NamedTuple):
    """One replay: of which workload, under which variant, and its figures."""

    workload: str
    variant: str
    figures: Figures


def in_ms(seconds: float) -> str:
    """Milliseconds on paper."""
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.1f}"


def in_percent(ratio: float) -> str:
    """A share on paper."""
    return "-" if math.isnan(ratio) else f"{ratio:.1%}"


_LATENCY = ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "e2e p50", "p99", "good", "fair")
_WORK = [
    "served",
    "refused",
    "429",
    "s",
    "out tok/s",
    "busy",
    "preempted",
    "swapped",
    "hits",
    "blocks",
    "most",
    "waiting",
]


def show(rows: Sequence[Row], targets: Targets, console: Console) -> None:
    """Print latencies and goodput, then the work done, then each tenant."""
    latency = _table("Latency, ms", ("workload", "variant"), _LATENCY)
    work = _table("Work", ("workload", "variant"), _WORK)
    previous = ""
    for row in rows:
        name = "" if row.workload == previous else row.workload
        previous = row.workload
        latency.add_row(name, row.variant, *_latencies(row.figures))
        work.add_row(name, row.variant, *_work(row.figures))
    console.print(latency)
    console.print(
        f"good: the share of requests with TTFT up to {targets.ttft_s * 1e3:g} ms and TPOT up to "
        f"{targets.tpot_s * 1e3:g} ms. fair: Jain's index of service among tenants that compete; "
        "-: no two wanted more than they got for long enough to be compared.",
        style="dim",
    )
    console.print(work)
    _show_tenants(rows, console)
    steps, cpu_s = sum(row.figures.sequence_steps for row in rows), sum(row.figures.cpu_s for row in rows)
    console.print(
        f"{steps:,} sequence-steps in {cpu_s:.2f} s of one core: {steps / cpu_s / 1e6:.2f} million a second.",
        style="dim",
    )


def _table(title: str, names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def _latencies(each: Figures) -> list[str]:
    spreads = (each.ttft_s, each.tpot_s, each.itl_s, each.e2e_s)
    times = [in_ms(value) for spread in spreads for value in (spread.p50, spread.p99)]
    return [*times, in_percent(each.goodput_ratio), "-" if math.isnan(each.fairness) else f"{each.fairness:.3f}"]


def _work(each: Figures) -> list[str]:
    counts = (each.num_served, each.num_refused + each.num_dropped, each.num_rejected)
    rates = (f"{each.end_s:.0f}", f"{each.output_tokens_per_s:,.0f}", in_percent(each.busy_ratio))
    cache = (str(each.preemptions), str(each.swapped), in_percent(each.prefix_hit_ratio))
    sizes = (f"{each.mean_blocks_held:,.0f}", f"{each.most_blocks_held:,}", str(each.most_waiting))
    return [*map(str, counts), *rates, *cache, *sizes]


def _show_tenants(rows: Sequence[Row], console: Console) -> None:
    """TTFT of each tenant; nothing where no trace names two."""
    if not any(row.figures.tenants for row in rows):
        return
    figures = ("served", "TTFT p50", "p99", "TPOT p50", "p99", "good")
    table = _table("Tenants, TTFT and TPOT, ms", ("workload", "variant", "tenant"), figures)
    for row in rows:
        for index, (name, each) in enumerate(row.figures.tenants.items()):
            heads = ("", "") if index else (row.workload, row.variant)
            times = (each.ttft_s.p50, each.ttft_s.p99, each.tpot_s.p50, each.tpot_s.p99)
            table.add_row(*heads, name, str(each.num_served), *map(in_ms, times), in_percent(each.goodput_ratio))
    console.print(table)


def show_recordings(replayed: Mapping[str, Replayed], console: Console) -> None:
    """Figures of each recording, and whether every plan was as recorded."""
    names = ("requests", "steps", "preempted", "TTFT p50", "p99", "ITL p50", "p99")
    table = _table("Recordings, ms", ("recording",), names)
    for name, done in replayed.items():
        figures = recording_figures(done)
        counts = [f"{figures[each]:,}" for each in ("requests", "steps", "preemptions")]
        times = [in_ms(figures[each][quantile]) for each in ("ttft_s", "itl_s") for quantile in ("p50", "p99")]
        table.add_row(name, *counts, *times)
    console.print(table)
    for name, done in replayed.items():
        verdict = (
            f"differs at {done.difference}" if done.difference else f"all {done.num_plans:,} plans are as recorded"
        )
        ending = f"it ends since {done.end}" if done.end else "it was cut off"
        console.print(f"{name}: {verdict}; {ending}.", markup=False)


def show_fleets(found: Mapping[tuple[str, int], float], goal: str, console: Console) -> None:
    """Requests a second by router and number of replicas."""
    table = Table(title=f"Requests a second, {goal}", box=box.SIMPLE_HEAD)
    table.add_column("replicas", justify="right")
    routers = list(dict.fromkeys(router for router, _ in found))
    for router in routers:
        table.add_column(router, justify="right")
        table.add_column("each", justify="right", style="dim")
    for num in dict.fromkeys(num for _, num in found):
        rates = [found[router, num] for router in routers]
        table.add_row(str(num), *(cell for rate in rates for cell in (f"{rate:.2f}", f"{rate / num:.2f}")))
    console.print(table)
