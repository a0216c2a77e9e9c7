"""Clients that send a request, wait for the answer and send the next, in front of simulated daemons and a router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.types import FinishReason, Request, TokenEvent
from loadtest.errors import LoadtestError
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.credits import Credits, Seen, cacheable, names_of
from loadtest.simulation.fleet_figures import Figures
from loadtest.simulation.policies import POLICIES, Policy
from loadtest.simulation.replica import Replica


class Answered(NamedTuple):
    """One answer as its client sees it; times are seconds."""

    replica: int
    ttft_s: float
    e2e_s: float
    credited: int  # tokens, by the router when it chose


class Delays(NamedTuple):
    """Seconds that pass outside the engines."""

    before_s: float = 0.0  # from the client's request to the engine: router, HTTP, tokens
    after_s: float = (
        0.0  # from the engine's last token to the end of the answer at the client, without the first token's way
    )
    events_s: float = 0.0  # from a block's event to the router


NO_DELAYS = Delays()


class Known(NamedTuple):
    """What is known of a daemon: its scheduler, its step times, and the delays outside it."""

    config: SchedulerConfig
    costs: StepCosts
    delays: Delays = NO_DELAYS


class _Sent(NamedTuple):
    """A request on its way."""

    client: int
    place: int
    at_s: float
    num_uncredited: int
    credited: int


class ClosedLoop:
    """A fleet under a closed loop of clients. Deterministic: the same rows give the same answers."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: StepCosts,
        *,
        num_replicas: int,
        policy: Policy,
        delays: Delays = NO_DELAYS,
    ) -> None:
        self.replicas = [Replica(config, costs, on_finish=self._finisher(place)) for place in range(num_replicas)]
        self._policy, self._delays, self._block_size = policy, delays, config.block_size
        self.credits = [Credits(lambda each=each: each.now, delays.events_s) for each in self.replicas]  # type: ignore[misc]
        if policy.has_events:
            for replica, credits_ in zip(self.replicas, self.credits, strict=True):
                replica.listen(credits_)
        self._sent: dict[str, _Sent] = {}
        self._arrivals: list[tuple[float, int]] = []  # time at the engine, client
        self.answers: dict[str, Answered] = {}

    def run(self, requests: Sequence[Request], num_clients: int) -> list[Answered]:
        """Serve the requests in order; return the answers in that order. Raises LoadtestError if one has none."""
        for client in range(min(num_clients, len(requests))):
            heappush(self._arrivals, (self._delays.before_s, client))
        place = 0
        while True:
            busy = min((each for each in self.replicas if each.has_work), key=lambda each: each.now, default=None)
            if place < len(requests) and self._arrivals and self._arrivals[0][0] <= (busy.now if busy else inf):
                at_s, client = heappop(self._arrivals)
                self._route(requests[place], client, at_s, place)
                place += 1
            elif busy is not None:
                busy.turn()
            else:
                break
        for replica in self.replicas:
            replica.check_integrity()
        if len(self.answers) < len(requests):
            raise LoadtestError(f"{len(requests) - len(self.answers)} requests have no answer.")
        return [self.answers[request.request_id] for request in requests]

    @property
    def num_cached_tokens(self) -> int:
        """Return the prompt tokens that came from the caches."""
        return sum(replica.stats.prefix_hit_tokens for replica in self.replicas)

    def _route(self, request: Request, client: int, at_s: float, count: int) -> None:
        names = names_of(request.prompt, self._block_size)
        num_tokens, seen = len(request.prompt), []
        for place, credits_ in enumerate(self.credits):
            credits_.receive(at_s)
            there = [sent for sent in self._sent.values() if sent.place == place]
            credited = min(credits_.num_credited(names) * self._block_size, num_tokens - 1)
            waiting = sum(sent.num_uncredited for sent in there)
            seen.append(Seen(len(there), waiting, credited, len(credits_)))
        chosen = self._policy.choose(seen, num_tokens, count)
        credited = seen[chosen].credited
        if not self._policy.has_events:
            self.credits[chosen].routed(names)
        self._sent[request.request_id] = _Sent(client, chosen, at_s, num_tokens - credited, credited)
        self.replicas[chosen].submit(replace(request, arrival_s=at_s), at_s)

    def _finisher(self, place: int) -> Callable[[TokenEvent], None]:
        def finish(event: TokenEvent) -> None:
            sent, timings = self._sent.pop(event.request_id), event.timings
            if timings is None or event.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                raise LoadtestError(f"request {event.request_id} ended without an answer.")
            ttft_s = self._delays.before_s + timings.queue_s + timings.prefill_s
            self.answers[event.request_id] = Answered(
                place, ttft_s, ttft_s + timings.decode_s + self._delays.after_s, sent.credited
            )
            between_s = self._delays.after_s + self._delays.before_s
            heappush(self._arrivals, (self.replicas[place].now + between_s, sent.client))

        return finish


def foresee(requests: Sequence[Request], known: Known, *, policy: str, num_daemons: int, num_clients: int) -> Figures:
    """Return the figures of a run on the virtual clock. Raises LoadtestError for an unknown policy."""
    if policy not in POLICIES:
        names = ", ".join(POLICIES)
        raise LoadtestError(f"the policy {policy!r} is not simulated; leave it out, or name one of {names}.")
    loop = ClosedLoop(known.config, known.costs, num_replicas=num_daemons, policy=POLICIES[policy], delays=known.delays)
    answers = loop.run(requests, num_clients)
    prompts = [request.prompt for request in requests]
    return Figures.of_times(
        [answer.ttft_s for answer in answers],
        [answer.e2e_s for answer in answers],
        num_requests=len(answers),
        num_failed=0,
        prompt_tokens=sum(map(len, prompts)),
        ideal_tokens=sum(cacheable(prompts, known.config.block_size)),
        cached_tokens=loop.num_cached_tokens,
        duration_s=max(replica.now for replica in loop.replicas),
        shares=tuple(sum(answer.replica == place for answer in answers) for place in range(num_daemons)),
    )
