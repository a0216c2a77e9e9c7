"""Options of `simulate replay` and `simulate fleet`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.core.scheduling.admission import QueueLimits
from loadtest.arguments import positive_float, positive_int
from loadtest.errors import LoadtestError
from loadtest.simulation.costs import DEFAULT_COSTS
from loadtest.simulation.figures import Targets
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest, at_speed, clipped, read_trace
from loadtest.simulation.workloads import WORKLOADS, generate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of both commands."""
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


def name(source: str) -> str:
    """Return the name of a workload in the figures."""
    return source if source in WORKLOADS else Path(source).name


def rows(source: str, options: argparse.Namespace, max_model_len: int, *, num_replicas: int = 1) -> list[TraceRequest]:
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


def targets(options: argparse.Namespace) -> Targets:
    """Return the targets of a good answer."""
    return Targets(options.target_ttft_ms / 1e3, options.target_tpot_ms / 1e3)


def new_replica(options: argparse.Namespace) -> Callable[..., Replica]:
    """Return a constructor of replicas with the queue limits of the options."""
    return partial(Replica, limits=QueueLimits(options.max_num_queued_reqs, options.max_num_queued_tokens))
