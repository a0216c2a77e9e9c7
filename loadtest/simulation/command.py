"""`quire simulate`: replays and fleets on a virtual clock.

The scheduler is the one that serves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from engine.core.queues import POLICIES
from engine.overload import QueueLimits
from loadtest.arguments import given, positive_float, positive_int, share
from loadtest.errors import LoadtestError
from loadtest.output import progress_bar, save_json
from loadtest.plots import require_matplotlib
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts
from loadtest.simulation.figures import Targets, recording_figures, summarize
from loadtest.simulation.fleet import capacity
from loadtest.simulation.recording import is_recording, replay_recording
from loadtest.simulation.replay import History, replay
from loadtest.simulation.replica import Replica
from loadtest.simulation.report import Row, show, show_fleets, show_recordings
from loadtest.simulation.routers import ROUTERS
from loadtest.simulation.together import Model, replay_together
from loadtest.simulation.trace import TraceRequest, at_speed, clipped, read_trace, write_trace
from loadtest.simulation.variants import groups_of, make_variants
from loadtest.simulation.workloads import WORKLOADS, generate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `simulate replay` and `simulate fleet`."""
    ways = parser.add_subparsers(required=True, metavar="WHAT", dest="what")
    each = ways.add_parser(
        "replay", help="run traces or workloads under schedulers, or a recording of `serve --record`"
    )
    _add_shared(each)
    each.add_argument("--policy", nargs="+", choices=tuple(POLICIES), help="default: as calibrated")
    each.add_argument("--save-trace", type=Path, metavar="FILE", help="write the requests of the one workload as CSV")
    each.add_argument(
        "--together", type=Path, nargs="+", metavar="FILE",
        help="costs, one file a trace: these are of models in one daemon, whose steps take turns",
    )  # fmt: skip
    each.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")
    each.set_defaults(simulate=_replay)
    fleet = ways.add_parser("fleet", help="find the requests a second that replicas can take within the targets")
    _add_shared(fleet)
    fleet.add_argument("--policy", nargs=1, choices=tuple(POLICIES), help="default: as calibrated")
    fleet.add_argument("--replicas", type=positive_int, nargs="+", default=[1, 2, 4], metavar="N", help="default 1 2 4")
    fleet.add_argument("--router", nargs="+", choices=tuple(ROUTERS), default=list(ROUTERS), help="default: all")
    fleet.add_argument("--share", type=share, default=0.99, help="of requests within the targets; default 0.99")
    fleet.set_defaults(simulate=_fleet)


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write."""
    status: int = options.simulate(options)
    return status


def _replay_recordings(options: argparse.Namespace) -> int:
    """Replay recordings step for step. 1 if a plan differs from the recorded one."""
    if options.policy or options.assignments or not all(is_recording(Path(source)) for source in options.source):
        raise LoadtestError("a recording is replayed as it was, without --policy, --set and other traces.")
    replayed = {source: replay_recording(Path(source)) for source in options.source}
    show_recordings(replayed)
    figures = {source: {**recording_figures(done), "difference": done.difference} for source, done in replayed.items()}
    save_json(options.json, {"settings": given(options), "recordings": figures})
    return int(any(done.difference for done in replayed.values()))


def _replay(options: argparse.Namespace) -> int:
    if any(is_recording(Path(source)) for source in options.source):
        return _replay_recordings(options)
    if options.together:
        return _together(options)
    if options.plot:
        require_matplotlib()
    costs = StepCosts.load(options.costs)
    variants = make_variants(costs.settings, options.policy, options.assignments)
    max_model_len = min(variant.config.max_model_len for variant in variants)
    workloads = [(_name(source), _rows(source, options, max_model_len)) for source in options.source]
    if options.save_trace:
        if len(workloads) > 1:
            raise LoadtestError(f"--save-trace writes one workload, and {len(workloads)} were named.")
        write_trace(options.save_trace, workloads[0][1])
    targets, rows, histories = _targets(options), [], []
    with progress_bar() as progress:
        task = progress.add_task("replays", total=len(workloads) * len(variants))
        for name, requests in workloads:
            for variant in variants:
                new_replica = _new_replica(options)
                history = replay(requests, variant.config, costs, depth=options.depth, new_replica=new_replica)
                histories.append(history)
                rows.append(Row(name, variant.name, summarize(history, targets)))
                progress.advance(task)
    show(rows, targets)
    for variant in variants:
        if len(variant.config.groups) > 1:
            print(
                f"{variant.name}: blocks of {len(variant.config.groups)} groups of layers: {groups_of(variant.config)}."
            )
    _print_refusals(rows, histories)
    figures = [{"workload": row.workload, "variant": row.variant, **asdict(row.figures)} for row in rows]
    settings = {variant.name: asdict(variant.config) for variant in variants}
    save_json(options.json, {"settings": given(options), "variants": settings, "replays": figures})
    if options.plot:
        from loadtest.simulation.plots import draw_replays

        draw_replays(options.plot, rows, histories)
    return 0


def _together(options: argparse.Namespace) -> int:
    """Replay a trace for each model of one daemon."""
    if len(options.together) != len(options.source) or options.plot or options.save_trace:
        raise LoadtestError(
            "--together takes as many files of costs as there are traces, without --plot and --save-trace."
        )
    models = []
    for source, file in zip(options.source, options.together, strict=True):
        costs = StepCosts.load(file)
        (variant,) = make_variants(costs.settings, None, [])
        models.append(Model(_rows(source, options, variant.config.max_model_len), variant.config, costs))
    targets, histories = _targets(options), replay_together(models)
    named = zip(options.source, options.together, histories, strict=True)
    rows = [Row(_name(source), file.stem, summarize(history, targets)) for source, file, history in named]
    show(rows, targets)
    _print_refusals(rows, histories)
    figures = [{"workload": row.workload, "model": row.variant, **asdict(row.figures)} for row in rows]
    save_json(options.json, {"settings": given(options), "together": figures})
    return 0


def _fleet(options: argparse.Namespace) -> int:
    costs = StepCosts.load(options.costs)
    if len(options.source) > 1:
        raise LoadtestError(f"a fleet is sized for one trace, and {len(options.source)} were named.")
    variants = make_variants(costs.settings, options.policy, options.assignments)
    if len(variants) > 1:
        raise LoadtestError(f"a fleet is sized for one setting, and --set names {len(variants)}.")
    config = variants[0].config
    found: dict[tuple[str, int], float] = {}
    with progress_bar() as progress:
        task = progress.add_task("fleets", total=len(options.replicas) * len(options.router))
        for num in options.replicas:
            rows = _rows(options.source[0], options, config.max_model_len, num_replicas=num)
            if rows[-1].arrival_s <= 0:
                raise LoadtestError("a fleet cannot be sized for requests that all arrive at the same time.")
            if len(rows) * (1 - options.share) < 1:
                print(f"{len(rows)} requests are too few to measure {options.share:.0%} of them.")
            for router in options.router:
                found[router, num] = capacity(
                    rows, config, costs, num_replicas=num, router=ROUTERS[router], targets=_targets(options),
                    share=options.share, depth=options.depth, new_replica=_new_replica(options),
                )  # fmt: skip
                progress.advance(task)
    goal = f"{options.share:.0%} with TTFT up to {options.target_ttft_ms:g} ms and TPOT up to {options.target_tpot_ms:g} ms"
    show_fleets(found, goal)
    fleets = [{"router": router, "replicas": num, "requests_per_s": rate} for (router, num), rate in found.items()]
    save_json(options.json, {"settings": given(options), "config": asdict(config), "fleets": fleets})
    return 0


def _print_refusals(rows: Sequence[Row], histories: Sequence[History]) -> None:
    """Print how many requests a replay refused, and the first reason."""
    for row, history in zip(rows, histories, strict=True):
        if history.refused:
            reason, total = next(iter(history.refused)), sum(history.refused.values())
            print(f"{row.workload}, {row.variant}: {total} refused, the first because: {reason} --clip cuts them.")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    """Declare the options of replay and fleet."""
    named = "; ".join(f"{name} ({workload.summary})" for name, workload in WORKLOADS.items())
    parser.add_argument("source", nargs="+", metavar="TRACE", help=f"a CSV file, a recording, or a workload: {named}")
    parser.add_argument(
        "--num", type=positive_int, metavar="N", help="requests, of a fleet each replica's; of a file, the first"
    )
    parser.add_argument("--rate", type=positive_float, metavar="R", help="requests a second of a workload")
    parser.add_argument("--speed", type=positive_float, default=1.0, metavar="X", help="have all arrive so much faster")
    parser.add_argument(
        "--clip", action="store_true", help="cut requests that are too long for the model, instead of refusing them"
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
    parser.add_argument(
        "--max-num-queued-reqs", type=positive_int, metavar="N", help="that may wait at a replica; more get 429"
    )
    parser.add_argument("--max-num-queued-tokens", type=positive_int, metavar="N", help="the same, tokens of prompts")
    parser.add_argument("--target-ttft-ms", type=positive_float, default=1000.0, metavar="MS", help="default 1000")
    parser.add_argument("--target-tpot-ms", type=positive_float, default=50.0, metavar="MS", help="default 50")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def _name(source: str) -> str:
    """Return the name of a workload in the figures."""
    return source if source in WORKLOADS else Path(source).name


def _rows(source: str, options: argparse.Namespace, max_model_len: int, *, num_replicas: int = 1) -> list[TraceRequest]:
    """Return the requests of a workload or a file, in order of arrival."""
    if source in WORKLOADS:
        num = (options.num or WORKLOADS[source].num) * num_replicas
        found = generate(source, num=num, rate=options.rate, seed=options.seed, max_model_len=max_model_len)
    else:
        if options.rate is not None:
            raise LoadtestError("--rate is for workloads; the arrivals of a file are scaled with --speed.")
        trace = read_trace(Path(source))
        found = trace.requests[: options.num]
        if trace.num_unanswered:
            print(f"{source}: {trace.num_unanswered} lines without output are left out.")
        if options.clip:
            found = clipped(found, max_model_len)
    return at_speed(found, options.speed)


def _targets(options: argparse.Namespace) -> Targets:
    """Return the targets of a good answer."""
    return Targets(options.target_ttft_ms / 1e3, options.target_tpot_ms / 1e3)


def _new_replica(options: argparse.Namespace) -> Callable[..., Replica]:
    """Return a constructor of replicas with the queue limits of the options."""
    return partial(Replica, limits=QueueLimits(options.max_num_queued_reqs, options.max_num_queued_tokens))
