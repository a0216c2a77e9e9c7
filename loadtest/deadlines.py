"""What deadlines are worth in the simulator: who is in time, late or dropped, with promises and without them.

A workload of `quire simulate` replayed by the very scheduler that serves, its requests with a deadline for the whole answer,
once as it is and once as it would be if a deadline only dropped what is hopeless. Lengths are known (`min_tokens` is
`max_tokens`), or told by max_tokens alone and learned. With `--daemon` a burst on a real one (deadlines_daemon.py).
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from unittest.mock import patch

from engine.core.config import SchedulerConfig
from engine.core.policies import POLICIES
from engine.core.promises import Promises
from engine.core.types import FinishReason, Request, TokenEvent
from loadtest import deadlines_daemon
from loadtest.arguments import positive_float, positive_int, probability
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts
from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest, to_request
from loadtest.simulation.variants import make_variants
from loadtest.simulation.workloads import WORKLOADS, generate


@dataclass(frozen=True)
class Outcome:
    """What became of the requests of one replay."""

    workload: str
    policy: str
    lengths: str  # known, or told by max_tokens alone
    share: float  # of the requests, that have a deadline
    promises: bool
    in_time: int
    late: int
    dropped: int
    goodput: float  # those in time, of all that have a deadline
    others_worst_wait_s: float  # until they were started, of those that have none
    end_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `deadlines`."""
    parser.add_argument(
        "--daemon",
        action="store_true",
        help="a burst on a real daemon instead; of the options --deadline-ms and --json",
    )
    parser.add_argument("--workload", nargs="+", default=["bursty-chat"], choices=tuple(WORKLOADS))
    parser.add_argument("--policy", nargs="+", default=["fcfs"], choices=tuple(POLICIES))
    parser.add_argument("--deadline-ms", type=positive_float, default=4000.0, help="of the whole answer; default 4000")
    parser.add_argument("--rate", type=positive_float, default=12.0, help="requests a second; default 12")
    parser.add_argument("--num", type=positive_int, default=600, help="requests; default 600")
    parser.add_argument("--share", type=probability, nargs="+", default=[1.0, 0.5], help="of requests with a deadline")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Replay, print, write."""
    if options.daemon:
        return deadlines_daemon.run(max(round(options.deadline_ms), 1), options.json)
    costs = StepCosts.load(DEFAULT_COSTS)
    print("workload          policy    lengths   with  promises  in time  late  dropped  goodput  others wait at most")
    found = [
        _show(_replay(options, workload, variant.config, costs, (lengths, share, promises)))
        for workload in options.workload
        for variant in make_variants(costs.settings, options.policy, [])
        for lengths in ("known", "learned")
        for share in options.share
        for promises in (False, True)
    ]
    if options.json:
        asked = {key: getattr(options, key) for key in ("deadline_ms", "rate", "num", "seed")}
        document = {"asked": asked, "outcomes": [asdict(each) for each in found]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _replay(
    options: argparse.Namespace, workload: str, config: SchedulerConfig, costs: StepCosts, case: tuple[str, float, bool]
) -> Outcome:
    lengths, share, promises = case
    size = {"num": options.num, "rate": options.rate, "seed": options.seed}
    replica, rng = _Watched(config, costs), random.Random(options.seed)
    with nullcontext() if promises else patch.object(Promises, "expect"):
        for index, row in enumerate(generate(workload, max_model_len=config.max_model_len, **size)):
            deadline_s = options.deadline_ms / 1e3 if rng.random() < share else None
            replica.ask(_request(row, index, deadline_s, is_known=lengths == "known"))
        return replica.outcome(workload, config.policy, lengths, share, promises=promises)


def _request(row: TraceRequest, index: int, deadline_s: float | None, *, is_known: bool) -> Request:
    request = to_request(row, index)
    params = request.params
    if is_known:
        params = replace(params, max_tokens=row.output_tokens, min_tokens=row.output_tokens)
    return replace(request, params=params, deadline_s=deadline_s)


class _Watched:
    """A replica, and what became of what it was asked for."""

    def __init__(self, config: SchedulerConfig, costs: StepCosts) -> None:
        self._replica = Replica(config, costs, on_finish=self._finish)
        self._requests: dict[str, Request] = {}
        self._num = {"in_time": 0, "late": 0, "dropped": 0}
        self._worst_wait_s = 0.0

    def ask(self, request: Request) -> None:
        self._replica.advance(request.arrival_s)
        self._requests[request.request_id] = request
        self._replica.submit(request, request.arrival_s)

    def _finish(self, event: TokenEvent) -> None:
        request = self._requests.pop(event.request_id)
        if request.deadline_s is None:
            assert event.timings is not None
            self._worst_wait_s = max(self._worst_wait_s, event.timings.queue_s)
        elif event.finish_reason is FinishReason.DROPPED:
            self._num["dropped"] += 1
        else:
            is_late = self._replica.now - request.arrival_s > request.deadline_s
            self._num["late" if is_late else "in_time"] += 1

    def outcome(self, workload: str, policy: str, lengths: str, share: float, *, promises: bool) -> Outcome:
        self._replica.advance(inf)
        self._replica.check_integrity()
        goodput = self._num["in_time"] / max(sum(self._num.values()), 1)
        return Outcome(
            workload, policy, lengths, share, promises, **self._num, goodput=goodput,
            others_worst_wait_s=self._worst_wait_s, end_s=self._replica.now,
        )  # fmt: skip


def _show(outcome: Outcome) -> Outcome:
    waits = f"{outcome.others_worst_wait_s:.1f} s" if outcome.share < 1 else "-"
    print(
        f"{outcome.workload:<18}{outcome.policy:<10}{outcome.lengths:<9}{outcome.share:>5.0%}"
        f"{'yes' if outcome.promises else 'no':>10}{outcome.in_time:>9}{outcome.late:>6}{outcome.dropped:>9}"
        f"{outcome.goodput:>9.1%}{waits:>21}"
    )
    return outcome
