"""`quire simulate tiers`: the smallest fleet for a workload, of replicas that do everything and of a prefill and a decode tier."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich import box
from rich.console import Console
from rich.table import Table

from loadtest.arguments import not_negative, open_console, positive_float, positive_int, share
from loadtest.simulation import asked
from loadtest.simulation.calibrate import progress_bar
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.fleet import natural_rate
from loadtest.simulation.replica import SimulationError
from loadtest.simulation.report import in_ms, in_percent
from loadtest.simulation.routers import ROUTERS
from loadtest.simulation.sizing import Sizing, Tried, best_by_total, smallest
from loadtest.simulation.variants import make_variants


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what the way takes."""
    asked.add_options(parser)
    parser.add_argument("--most", type=positive_int, default=8, metavar="N", help="replicas to try; default 8")
    parser.add_argument("--share", type=share, default=0.99, help="of requests within the targets; default 0.99")
    parser.add_argument(
        "--router", choices=tuple(ROUTERS), default="least-loaded", help="to replicas that decode; default least-loaded"
    )
    parser.add_argument(
        "--latency-ms", type=not_negative, default=0.0, metavar="MS",
        help="of a network between the tiers, for each prompt; default 0: one machine's memory, as calibrated",
    )  # fmt: skip
    parser.add_argument("--bandwidth", type=positive_float, metavar="GB/S", help="of that network; default: any")


def run(options: argparse.Namespace) -> int:
    """Search, print, write. 1 if no fleet was large enough."""
    console = open_console()
    costs = _with_network(StepCosts.load(options.costs), options)
    variants = make_variants(costs.settings, None, options.assignments)
    if len(options.source) > 1 or len(variants) > 1:
        raise SimulationError("tiers are sized for one trace and one setting; name one of each.")
    config = variants[0].config
    rows = asked.rows(options.source[0], options, config.max_model_len, console)
    if rows[-1].arrival_s <= 0:
        raise SimulationError("tiers cannot be sized for requests that all arrive at once.")
    sizing = Sizing(
        rows, config, costs, router=ROUTERS[options.router], targets=asked.targets(options), depth=options.depth,
        new_replica=asked.new_replica(options),
    )  # fmt: skip
    found: list[Tried] = []
    with progress_bar() as progress:
        task = progress.add_task("fleets", total=options.most * (options.most + 1) // 2)
        for tried in sizing.search(options.most, options.share):
            found.append(tried)
            progress.advance(task)
    goal = (
        f"{natural_rate(rows):.3g} requests a second, {options.share:.0%} with TTFT up to {options.target_ttft_ms:g} ms "
        f"and TPOT up to {options.target_tpot_ms:g} ms"
    )
    _show(found, options.share, goal, console)
    if options.json:
        fleets = [
            {"prefill": each.fleet.num_prefill, "decode": each.fleet.num_decode, **_figures(each)} for each in found
        ]
        network = {"latency_ms": options.latency_ms, "bandwidth": options.bandwidth, "handoff": asdict(costs.handoff)}
        sought = {"share": options.share, "router": options.router, **network}
        asked.write(options, {**sought, "config": asdict(config), "fleets": fleets})
    if options.plot:
        from loadtest.simulation.plots import draw_tiers

        draw_tiers(options.plot, found, options.share, goal)
    return 0 if any(each.good_ratio >= options.share for each in found) else 1


def _with_network(costs: StepCosts, options: argparse.Namespace) -> StepCosts:
    """What a handoff takes over a network as well."""
    handoff = costs.handoff
    sending_s = handoff.block_bytes / (options.bandwidth * 1e9) if options.bandwidth else 0.0
    trip_s, block_s = handoff.trip_s + options.latency_ms / 1e3, handoff.block_s + sending_s
    return replace(costs, handoff=replace(handoff, trip_s=trip_s, block_s=block_s))


def _figures(each: Tried) -> dict[str, object]:
    return {"good_ratio": each.good_ratio, "ttft_s": asdict(each.ttft_s), "tpot_s": asdict(each.tpot_s)}


def _show(found: Sequence[Tried], share: float, goal: str, console: Console) -> None:
    table = Table(title=goal, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("replicas", justify="right")
    for kind in ("alike", "prefill + decode"):
        for column in (kind, "good", "TTFT p50", "p99", "TPOT p50", "p99"):
            table.add_column(column, justify="right", no_wrap=True)
    kinds = [best_by_total(found, is_tiered=is_tiered) for is_tiered in (False, True)]
    for total in sorted({each.fleet.total for each in found}):
        cells: list[str] = []
        for best in kinds:
            each = best.get(total)
            cells += [""] * 6 if each is None else [
                str(each.fleet), in_percent(each.good_ratio),
                *(in_ms(value) for spread in (each.ttft_s, each.tpot_s) for value in (spread.p50, spread.p99)),
            ]  # fmt: skip
        table.add_row(str(total), *cells)
    console.print(table)
    console.print("Times in ms. Of each number of replicas the best split is shown.", style="dim")
    for kind, is_tiered in (("alike", False), ("in tiers, prefill + decode", True)):
        least = smallest(found, share, is_tiered=is_tiered)
        console.print(f"Smallest {kind}: {'none of those tried' if least is None else least.fleet}.")
