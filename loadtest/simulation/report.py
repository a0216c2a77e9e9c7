"""Tables of replays, tenants, recordings and fleets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loadtest.output import in_ms, print_table
from loadtest.report import Spread
from loadtest.simulation.figures import Figures, Targets, recording_figures
from loadtest.simulation.recording import Replayed
from loadtest.simulation.variants import groups_of


class Row(NamedTuple):
    """One replay: its workload, its variant and its figures."""

    workload: str
    variant: str
    figures: Figures


def in_percent(ratio: float) -> str:
    """Return a share for a table; "-" for NaN."""
    return "-" if math.isnan(ratio) else f"{ratio:.1%}"


_LATENCY = ("TTFT p50", "p99", "TPOT p50", "p99")
_WORK = ("served", "refused", "429", "s", "out tok/s", "busy", "preempted", "hits", "blocks", "most", "waiting")


def show(rows: Sequence[Row], targets: Targets) -> None:
    """Print latencies and goodput, then the work done, then each tenant."""
    print("Latencies, ms")
    print_table(
        ("workload", "variant", *_LATENCY, "ITL p50", "p99", "e2e p50", "p99", "good"),
        ((row.workload, row.variant, *_latencies(row.figures)) for row in rows),
        num_names=2,
    )
    print(
        f"good: the share of requests with TTFT up to {targets.ttft_s * 1e3:g} ms and TPOT up to "
        f"{targets.tpot_s * 1e3:g} ms"
    )
    works = ((row.workload, row.variant, *_work(row.figures)) for row in rows)
    print_table(("workload", "variant", *_WORK), works, num_names=2)
    _show_tenants(rows)
    steps, cpu_s = sum(row.figures.sequence_steps for row in rows), sum(row.figures.cpu_s for row in rows)
    print(f"{steps:,} sequence-steps in {cpu_s:.2f} s of one core: {steps / cpu_s / 1e6:.2f} million a second.")


def _in_ms(*spreads: Spread) -> list[str]:
    """Return the median and p99 of each spread."""
    return [in_ms(value, 1 if value < 0.1 else 0) for spread in spreads for value in (spread.p50, spread.p99)]


def _latencies(each: Figures) -> list[str]:
    return [*_in_ms(each.ttft_s, each.tpot_s, each.itl_s, each.e2e_s), in_percent(each.goodput_ratio)]


def _work(each: Figures) -> list[str]:
    counts = (each.num_served, each.num_refused + each.num_dropped, each.num_rejected)
    rates = (f"{each.end_s:.0f}", f"{each.output_tokens_per_s:,.0f}", in_percent(each.busy_ratio))
    cache = (str(each.preemptions), in_percent(each.prefix_hit_ratio))
    sizes = (f"{each.mean_blocks_held:,.0f}", f"{each.most_blocks_held:,}", str(each.most_waiting))
    return [*map(str, counts), *rates, *cache, *sizes]


def _show_tenants(rows: Sequence[Row]) -> None:
    """Print TTFT and TPOT of each tenant, if a trace names two."""
    lines = [
        (row.workload, row.variant, name, each.num_served, *_in_ms(each.ttft_s, each.tpot_s), in_percent(each.goodput_ratio))
        for row in rows
        for name, each in row.figures.tenants.items()
    ]  # fmt: skip
    if lines:
        print("Tenants, ms")
        print_table(("workload", "variant", "tenant", "served", *_LATENCY, "good"), lines, num_names=3)


def show_recordings(replayed: Mapping[str, Replayed]) -> None:
    """Print the figures of each recording, and whether every plan was as recorded."""
    lines = []
    for name, done in replayed.items():
        figures = recording_figures(done)
        counts = [f"{figures[each]:,}" for each in ("requests", "steps", "preemptions")]
        lines.append((name, *counts, *_in_ms(figures["ttft_s"], figures["itl_s"])))
    print("Recordings, ms")
    print_table(("recording", "requests", "steps", "preempted", "TTFT p50", "p99", "ITL p50", "p99"), lines)
    for name, done in replayed.items():
        if len(done.config.groups) > 1:
            print(f"{name}: blocks of {len(done.config.groups)} groups of layers: {groups_of(done.config)}.")
        verdict = (
            f"differs at {done.difference}" if done.difference else f"all {done.num_plans:,} plans are as recorded"
        )
        ending = f"it ends since {done.end}" if done.end else "it was cut off"
        print(f"{name}: {verdict}; {ending}.")


def show_fleets(found: Mapping[tuple[str, int], float], goal: str) -> None:
    """Print requests a second by router and number of replicas."""
    print(f"Requests a second, {goal}")
    routers = list(dict.fromkeys(router for router, _ in found))
    lines = []
    for num in dict.fromkeys(num for _, num in found):
        rates = [found[router, num] for router in routers]
        lines.append((num, *(cell for rate in rates for cell in (f"{rate:.2f}", f"{rate / num:.2f}"))))
    print_table(("replicas", *(cell for router in routers for cell in (router, "each"))), lines)
