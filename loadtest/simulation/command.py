"""`quire simulate`: replay traces under several schedulers, size fleets, or show what paging buys.

The scheduler is the one that serves; time is virtual. Files and tables are handled here and nowhere else in the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.core.policies import POLICIES
from loadtest.plots import require_matplotlib
from loadtest.report import without_nan
from loadtest.simulation import paging
from loadtest.simulation.calibrate import progress_bar
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts
from loadtest.simulation.figures import Targets, summarize
from loadtest.simulation.fleet import capacity
from loadtest.simulation.replay import History, replay
from loadtest.simulation.replica import SimulationError
from loadtest.simulation.report import Row, show, show_fleets
from loadtest.simulation.routers import ROUTERS
from loadtest.simulation.trace import TraceRequest, at_speed, clipped, read_trace, write_trace
from loadtest.simulation.variants import make_variants
from loadtest.simulation.workloads import WORKLOADS, generate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare `replay`, `fleet` and `paging`, each with options of its own."""
    ways = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    each = ways.add_parser("replay", help="run traces or workloads under one scheduler or several")
    _add_common(each)
    each.add_argument("--policy", nargs="+", choices=tuple(POLICIES), help="default: as calibrated")
    each.add_argument("--save-trace", type=Path, metavar="FILE", help="write the requests of the one workload as CSV")
    each.set_defaults(simulate=_replay)
    fleet = ways.add_parser("fleet", help="find the requests a second that replicas can take within the targets")
    _add_common(fleet)
    fleet.add_argument("--policy", nargs=1, choices=tuple(POLICIES), help="default: as calibrated")
    fleet.add_argument(
        "--replicas", type=_positive_int, nargs="+", default=[1, 2, 4], metavar="N", help="default 1 2 4"
    )
    fleet.add_argument("--router", nargs="+", choices=tuple(ROUTERS), default=list(ROUTERS), help="default: all")
    fleet.add_argument("--share", type=_share, default=0.99, help="of requests within the targets; default 0.99")
    fleet.set_defaults(simulate=_fleet)
    story = ways.add_parser("paging", help="show what a paged pool buys, request by request")
    paging.add_options(story)
    story.set_defaults(simulate=paging.run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    named = "; ".join(f"{name} ({workload.summary})" for name, workload in WORKLOADS.items())
    parser.add_argument("source", nargs="+", metavar="TRACE", help=f"a CSV file, or a workload: {named}")
    parser.add_argument(
        "--num", type=_positive_int, metavar="N", help="requests, of a fleet each replica's; of a file, the first"
    )
    parser.add_argument("--rate", type=_positive, metavar="R", help="requests a second of a workload")
    parser.add_argument("--speed", type=_positive, default=1.0, metavar="X", help="have all arrive so much faster")
    parser.add_argument(
        "--clip", action="store_true", help="cut what is too long for the model, instead of refusing it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of workloads; default 0")
    parser.add_argument(
        "--costs", type=Path, default=DEFAULT_COSTS, metavar="FILE",
        help="from `quire calibrate`; default: SmolLM2-135M on two Zen 5 cores",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="+", default=[], dest="assignments", metavar="FIELD=VALUE[,VALUE...]",
        help="settings of the scheduler; several values are compared",
    )  # fmt: skip
    parser.add_argument(
        "--depth", type=int, choices=(0, 1), default=0, help="steps planned ahead; default 0, as on a CPU"
    )
    parser.add_argument("--target-ttft-ms", type=_positive, default=1000.0, metavar="MS", help="default 1000")
    parser.add_argument("--target-tpot-ms", type=_positive, default=50.0, metavar="MS", help="default 50")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def _positive_int(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write."""
    if options.plot:
        require_matplotlib()
    status: int = options.simulate(options)
    return status


def _replay(options: argparse.Namespace) -> int:
    costs, console = StepCosts.load(options.costs), Console()
    variants = make_variants(costs.settings, options.policy, options.assignments)
    max_model_len = min(variant.config.max_model_len for variant in variants)
    workloads = [(_name(source), _rows(source, options, max_model_len, console)) for source in options.source]
    if options.save_trace:
        if len(workloads) > 1:
            raise SimulationError(f"--save-trace writes one workload, and {len(workloads)} were named.")
        write_trace(options.save_trace, workloads[0][1])
    targets, rows, histories = _targets(options), [], []
    with progress_bar(console) as progress:
        for name, requests in workloads:
            for variant in variants:
                task = progress.add_task(f"{name}, {variant.name}", total=len(requests))

                def on_progress(count: int, task: Any = task) -> None:
                    if not count % 64:
                        progress.update(task, completed=count)

                history = replay(requests, variant.config, costs, depth=options.depth, on_progress=on_progress)
                progress.update(task, completed=len(requests))
                histories.append(history)
                rows.append(Row(name, variant.name, summarize(history, targets)))
    show(rows, targets, console)
    _tell_refusals(rows, histories, console)
    if options.json:
        variants_document = {variant.name: asdict(variant.config) for variant in variants}
        figures = [{"workload": row.workload, "variant": row.variant, **row.figures.as_dict()} for row in rows]
        _write(options, {"variants": variants_document, "replays": figures})
    if options.plot:
        from loadtest.simulation.plots import draw_replays

        draw_replays(options.plot, rows, histories)
    return 0


def _fleet(options: argparse.Namespace) -> int:
    costs, console = StepCosts.load(options.costs), Console()
    if len(options.source) > 1:
        raise SimulationError(f"a fleet is sized for one trace, and {len(options.source)} were named.")
    variants = make_variants(costs.settings, options.policy, options.assignments)
    if len(variants) > 1:
        raise SimulationError(f"a fleet is sized for one setting, and --set names {len(variants)}.")
    config = variants[0].config
    found: dict[tuple[str, int], float] = {}
    with progress_bar(console) as progress:
        task = progress.add_task("fleets", total=len(options.replicas) * len(options.router))
        for num in options.replicas:
            rows = _rows(options.source[0], options, config.max_model_len, console, num)
            if rows[-1].arrival_s <= 0:
                raise SimulationError("a fleet cannot be sized for requests that all arrive at once.")
            for router in options.router:
                found[router, num] = capacity(
                    rows, config, costs, num_replicas=num, router=ROUTERS[router], targets=_targets(options),
                    share=options.share, depth=options.depth,
                )  # fmt: skip
                progress.advance(task)
    goal = f"{options.share:.0%} with TTFT up to {options.target_ttft_ms:g} ms and TPOT up to {options.target_tpot_ms:g} ms"
    show_fleets(found, goal, console)
    if options.json:
        fleets = [{"router": router, "replicas": num, "requests_per_s": rate} for (router, num), rate in found.items()]
        _write(options, {"config": asdict(config), "fleets": fleets})
    if options.plot:
        from loadtest.simulation.plots import draw_fleets

        draw_fleets(options.plot, found, goal)
    return 0


def _name(source: str) -> str:
    return source if source in WORKLOADS else Path(source).name


def _rows(
    source: str, options: argparse.Namespace, max_model_len: int, console: Console, num_replicas: int = 1
) -> list[TraceRequest]:
    """The requests of a workload, so many for each replica, or of a file, as they shall arrive."""
    if source in WORKLOADS:
        num = (options.num or WORKLOADS[source].num) * num_replicas
        rows = generate(source, num=num, rate=options.rate, seed=options.seed, max_model_len=max_model_len)
    else:
        if options.rate is not None:
            raise SimulationError("--rate is for workloads; the arrivals of a file are scaled with --speed.")
        trace = read_trace(Path(source))
        rows = trace.requests[: options.num]
        if trace.num_unanswered:
            console.print(f"{source}: {trace.num_unanswered} lines without output are left out.", style="yellow")
        if options.clip:
            rows = clipped(rows, max_model_len)
    return at_speed(rows, options.speed)


def _targets(options: argparse.Namespace) -> Targets:
    return Targets(options.target_ttft_ms / 1e3, options.target_tpot_ms / 1e3)


def _tell_refusals(rows: Sequence[Row], histories: Sequence[History], console: Console) -> None:
    """Why requests were refused, each reason once a replay, with the first of its sentences."""
    for row, history in zip(rows, histories, strict=True):
        if history.refused:
            sentence, total = next(iter(history.refused)), sum(history.refused.values())
            told = f"{row.workload}, {row.variant}: {total} refused, the first because: {sentence} --clip cuts them."
            console.print(told, style="yellow", markup=False)


def _write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    kept = ("source", "num", "rate", "speed", "clip", "seed", "depth", "target_ttft_ms", "target_tpot_ms")
    asked = {name: getattr(options, name) for name in kept}
    document = without_nan({"asked": asked, **results})
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
