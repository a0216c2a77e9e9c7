"""Replays a trace through simulated daemons and records each outcome.

All replicas are advanced to each arrival before it is routed, so that the router sees the loads of that moment.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.errors import ClientError, OverloadedError
from engine.core.types import FinishReason, Request, TokenEvent
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.replica import Replica
from loadtest.simulation.routers import Router, round_robin
from loadtest.simulation.trace import TraceRequest, to_request

_NUM_SAMPLES = 2000  # of a replica's state over the whole trace, about


class Served(NamedTuple):
    """One answered request. Times are seconds, as its client sees them."""

    row: TraceRequest
    replica: int
    ttft_s: float
    queue_s: float
    decode_s: float
    num_tokens: int
    num_preemptions: int

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return self.decode_s / (self.num_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.ttft_s + self.decode_s


@dataclass(slots=True)
class History:
    """The outcome of a replay."""

    replicas: list[Replica] = field(default_factory=list)
    living: dict[str, tuple[TraceRequest, int]] = field(default_factory=dict)  # the row, and its replica
    served: list[Served] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)  # why, and how often
    num_rejected: int = 0  # with 429, the queue being full; they are not sent again
    num_dropped: int = 0  # accepted, and ended without an answer: their deadline could not be met
    cpu_s: float = 0.0  # of the simulation

    def submit(self, row: TraceRequest, request: Request, place: int, at_s: float) -> None:
        """Give a request to a replica, which may refuse it."""
        try:
            self.replicas[place].submit(request, at_s)
            self.living[request.request_id] = row, place
        except OverloadedError:
            self.num_rejected += 1
        except ClientError as error:
            self.refused[str(error)] = self.refused.get(str(error), 0) + 1

    def finish(self, event: TokenEvent) -> None:
        """Record the end of a request."""
        row, replica = self.living.pop(event.request_id)
        timings = event.timings
        if timings is None or event.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.num_dropped += 1
            return
        ttft_s = timings.queue_s + timings.prefill_s
        figures = ttft_s, timings.queue_s, timings.decode_s, row.output_tokens, timings.num_preemptions
        self.served.append(Served(row, replica, *figures))

    @property
    def end_s(self) -> float:
        """Return the time at which the last answer was complete."""
        return max(replica.now for replica in self.replicas)

    @property
    def num_sequence_steps(self) -> int:
        return sum(replica.num_sequence_steps for replica in self.replicas)


def replay(
    rows: Sequence[TraceRequest],
    config: SchedulerConfig,
    costs: StepCosts,
    *,
    depth: int = 0,
    num_replicas: int = 1,
    router: Router = round_robin,
    new_replica: Callable[..., Replica] = Replica,
) -> History:
    """Simulate until everything is answered, from rows in order of arrival.

    Requests that can never be served are refused, as the daemon refuses them.
    """
    history = History()
    settings = {"depth": depth, "sample_every_s": rows[-1].arrival_s / _NUM_SAMPLES, "on_finish": history.finish}
    history.replicas += [new_replica(config, costs, **settings) for _ in range(num_replicas)]
    with timed(history):
        for index, row in enumerate(rows):
            for replica in history.replicas:
                replica.advance(row.arrival_s)
            chosen = router(history.replicas, row, index)
            history.submit(row, to_request(row, index), chosen, row.arrival_s)
        for replica in history.replicas:
            replica.advance(inf)
    for replica in history.replicas:
        replica.check_integrity()
    return history


@contextmanager
def timed(history: History) -> Iterator[None]:
    """Measure the CPU time, without garbage collections.

    The scheduler makes no reference cycles, and looking for them takes a tenth of the time.
    """
    was_enabled, begun = gc.isenabled(), time.process_time()
    gc.disable()
    try:
        yield
    finally:
        history.cpu_s = time.process_time() - begun
        if was_enabled:
            gc.enable()
