"""A fleet in two tiers: prompts are computed by prefill replicas and handed over to the decode replicas that go on from there.

As server/handoff.py and engine/connector do it: a request belongs to a decode replica, which asks for prompts with at least
MIN_BLOCKS blocks that its own cache has not got; the parcel has all full blocks, what is cached there is not written; the
rest of the prompt and the answer are computed where the request is. Prompts whose parcels fail, for want of shared memory
or in time, are not simulated: none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from engine.core.admission import check_request
from engine.core.config import SchedulerConfig
from engine.core.errors import ClientError, OverloadedError
from engine.core.types import Request, SamplingParams, TokenEvent
from loadtest.simulation.costs import Handoff, StepCosts
from loadtest.simulation.replay import History, sampling_s, timed
from loadtest.simulation.replica import Replica, SimulationError
from loadtest.simulation.routers import Router, least_loaded
from loadtest.simulation.trace import TraceRequest, to_request

MIN_BLOCKS = 4  # as server/handoff.py has it


class _Asked(NamedTuple):
    """A prompt that is computed for a decode replica."""

    row: TraceRequest
    request: Request
    place: int


class _Delivery(NamedTuple):
    """A parcel on its way; ordered by when it comes, then by its request."""

    at_s: float
    number: int
    num_blocks: int
    asked: _Asked


class TwoTiers:
    """Arrivals in order, and parcels between the tiers. A history's replicas are those that decode."""

    def __init__(self, config: SchedulerConfig, handoff: Handoff, history: History, router: Router) -> None:
        self._config, self._handoff, self._history, self._router = config, handoff, history, router
        self.prefill: list[Replica] = []
        self._asked: dict[str, _Asked] = {}
        self._deliveries: list[_Delivery] = []

    def arrive(self, row: TraceRequest, index: int) -> None:
        """The next request."""
        now, history = row.arrival_s, self._history
        self.advance(now)
        request, place = to_request(row, index), self._router(history.replicas, row, index)
        is_short = self._num_missing(request, history.replicas[place]) < MIN_BLOCKS
        if is_short or not self._ask(_Asked(row, request, place), index):
            history.submit(row, request, place, now)

    def advance(self, until_s: float) -> None:
        """Simulate both tiers up to a moment. Prefill goes first, for nothing that decoding does comes back to it."""
        for replica in self.prefill:
            replica.advance(until_s)
        while self._deliveries and self._deliveries[0].at_s <= until_s:
            self._deliver(heappop(self._deliveries))
        for replica in self._history.replicas:
            replica.advance(until_s)

    def sent(self, place: int, event: TokenEvent) -> None:
        """A prefill replica is done with a prompt, and packs what its cache has of it."""
        replica, asked = self.prefill[place], self._asked.pop(event.request_id)
        num_blocks = replica.count_cached(asked.request, self._num_blocks(asked.request))
        replica.pause(num_blocks * self._handoff.pause_s, replica.now)
        at_s = replica.now + self._handoff.trip_s + num_blocks * self._handoff.block_s
        heappush(self._deliveries, _Delivery(at_s, int(event.request_id), num_blocks, asked))

    def _ask(self, asked: _Asked, index: int) -> bool:
        """Have a prompt computed; False if the prefill tier does not take it."""
        place = least_loaded(self.prefill, asked.row, index)
        try:
            check_request(asked.request, self._config)  # what can never be served is refused where it was asked for
            prompt = replace(asked.request, params=SamplingParams(max_tokens=0), tenant="", weight=1.0)
            self.prefill[place].submit(prompt, asked.row.arrival_s)
        except (ClientError, OverloadedError):
            return False
        self._asked[prompt.request_id] = asked
        self._history.replicas[asked.place].num_expected += 1
        return True

    def _deliver(self, delivery: _Delivery) -> None:
        row, request, place = delivery.asked
        replica = self._history.replicas[place]
        replica.advance(delivery.at_s)
        replica.num_expected -= 1
        replica.pause(replica.adopt(request, delivery.num_blocks) * self._handoff.pause_s, delivery.at_s)
        self._history.submit(row, request, place, delivery.at_s)

    def _num_blocks(self, request: Request) -> int:
        """Full blocks of a prompt, but for its last token, which is computed where the answer is drawn."""
        return (len(request.prompt) - 1) // self._config.block_size

    def _num_missing(self, request: Request, replica: Replica) -> int:
        num_blocks = self._num_blocks(request)
        return num_blocks - replica.count_cached(request, num_blocks)


def replay_tiers(
    rows: Sequence[TraceRequest],
    config: SchedulerConfig,
    costs: StepCosts,
    *,
    num_prefill: int,
    num_decode: int,
    router: Router = least_loaded,
    depth: int = 0,
    new_replica: Callable[..., Replica] = Replica,
) -> History:
    """As `replay`, with replicas in two tiers; the history's are those of both, decoding ones first. Raises SimulationError."""
    if not config.enable_prefix_caching or config.num_host_blocks:
        raise SimulationError("blocks are handed over through the prefix cache; leave it on, and num_host_blocks at 0.")
    if not costs.handoff.block_s:
        raise SimulationError("the costs do not say what handing blocks over takes; measure them with quire calibrate.")
    history = History()
    tiers = TwoTiers(config, costs.handoff, history, router)
    settings = {"depth": depth, "sample_every_s": sampling_s(rows)}
    history.replicas += [new_replica(config, costs, on_finish=history.finish, **settings) for _ in range(num_decode)]
    tiers.prefill += [
        new_replica(config, costs, on_finish=partial(tiers.sent, place), **settings) for place in range(num_prefill)
    ]
    with timed(history):
        for index, row in enumerate(rows):
            tiers.arrive(row, index)
        tiers.advance(inf)
    history.replicas += tiers.prefill
    for replica in history.replicas:
        replica.check_integrity()
    return history
