"""Deadlines that are promised: whoever starts with one keeps it, by what steps are known to take; forecast.py says how long.

A request is promised its deadline as it starts, and starts no sooner than that can be done:

    with a deadline    if it would be in time beside all that run, nobody who was promised something would be late by it, and the
                       blocks of all promises fit the pool. Else it is passed over, until somebody leaves and its turn to
                       be looked at has come: a step looks at a few, however many wait
    any other          if nobody who was promised something would be late by it. Else the queue waits for that one

What others do to it later (drafts, long prompts, choices that run on, whatever the forecast had not thought of) is held to
what the promises leave: a step may take as much longer than the promised work alone as all of that has to spare, and where
that is not enough the others sit the step out. Promised work stands first among those that run, and never gives way.

Promised is the length that is known: max_tokens where min_tokens says so or nothing ends the answer. Else CAUTION times what is
expected; a longer answer goes on without a promise, and so does, from its start, one that alone is expected to take too long, or
that is tried because nobody else runs. A promise that cannot be kept any more holds nobody back.

Others wait for promises to be kept, but for no new ones: nothing is promised while anybody who runs is held back, and what
stands in line before a deadline starts before it. So a wait is at most what was promised before. Without deadlines all of this
costs a look at who is first. The background is promised nothing; nor, with `fair`, is a tenant that beside others has an equal
part of all seats; nor, with overlap, a search. With overlap a promise may be missed by a step: what those in flight hold is
not known to an end, and who leaves with them still counts. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.flight import FREE, Flight, Room
from engine.core.forecast import Work, seconds_left, work_of
from engine.core.memory import Memory
from engine.core.page_table import blocks_for
from engine.core.roster import Roster
from engine.core.sequence import Sequence, Status
from engine.core.step_time import Costs, StepTime, decode_load

CAUTION = 1.5  # times the mean: most answers are not longer
# A forecast for one that waits takes 1 us for each that runs: those beyond so many a step have to wait for a later one ...
MOST_EXAMINED = 8
MOST_RECALLED = 4  # ... and so many of these may have been passed over before
_ROUNDING_S = 1e-9


class _Beside(NamedTuple):
    """What whoever starts now would start beside."""

    works: list[Work]
    begins_s: float
    num_blocks: int  # that all promises need


class Promises:
    """expect a sequence when it comes; `next` is who may start; `room` bounds each step."""

    __slots__ = (
        "_config",
        "_easy_until_s",
        "_flights",
        "_is_holding_back",
        "_is_tight",
        "_is_tried",
        "_memory",
        "_num_to_examine",
        "_overlaps",
        "_roster",
        "_times",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        roster: Roster,
        times: StepTime,
        flights: deque[Flight],
        *,
        overlaps: bool,
    ) -> None:
        self._config, self._memory, self._roster = config, memory, roster
        self._times, self._flights, self._overlaps = times, flights, overlaps
        self._easy_until_s = 0.0  # nothing that a step may do before could break a promise
        self._is_holding_back = False
        self._num_to_examine = 0  # in the step that is being planned
        # Of the one that `next` has found: it needs the step that it starts in; it can be promised nothing.
        self._is_tight = self._is_tried = False

    # -- who starts --------------------------------------------------------------------------------------------------

    def expect(self, seq: Sequence) -> None:
        """A sequence comes: what it is to be promised, if anything."""
        request, params = seq.request, seq.request.params
        if request.deadline_s is None or seq.is_background or not self._times.is_known:
            return
        if seq.search is not None and self._overlaps:
            return  # beams wait for each other's commits, and draw in every other step only
        num_tokens = params.max_tokens
        if seq.num_expected is not None and seq.ending_ids:
            num_tokens = min(num_tokens, max(ceil(CAUTION * seq.num_expected), params.min_tokens))
        seq.promised_total = seq.num_prompt + num_tokens
        is_known = params.min_tokens >= params.max_tokens  # then it is hopeless, not unlikely, where time is short
        alone = seconds_left([self._work_of_new(seq)], self._times.costs, self._step_limit)
        if self._num_blocks([seq]) > self._memory.pool.num_blocks or (
            alone[0][0] > request.deadline_s and not is_known
        ):
            seq.promised_total = 0

    def next(self, now: float, flight: Flight) -> Sequence | None:
        """Who is to be started next, in the step that is being planned or after it.

        Those who could not be in time beside all that run are passed over until somebody leaves; where they are too many to be
        examined in this step, for some steps.
        """
        waiting = self._roster.waiting
        self._is_tight = self._is_tried = False
        beside: _Beside | None = None
        while (seq := waiting.first) is not None and (seq.promised_total or self._roster.has_promised):
            if seq.is_background or (seq.promised_total and seq.is_resuming):
                return seq  # the latter was promised already, and gave way for want of memory
            if seq.promised_total and self._has_its_part(seq):
                seq.promised_total = 0
            if flight.room.is_alone and not seq.promised_total:
                return None
            if seq.promised_total and self._is_holding_back and self._roster.running:
                waiting.hold(seq)
                continue
            if seq.promised_total and not self._num_to_examine:
                waiting.hold(seq, is_released=True)
                continue
            beside = beside or self._beside(now, flight)
            if not seq.promised_total:
                return seq if self._slack_with(seq, beside) >= self._least_slack_s(beside) else None
            self._num_to_examine -= 1
            if self._may_promise(seq, beside):
                return seq
            waiting.hold(seq)
        return seq

    def start(self, seq: Sequence, flight: Flight) -> None:
        """The one that `next` has found starts, in this step: only now, for there might have been no blocks for it."""
        if self._is_tried:
            seq.promised_total = 0
        if seq.promised_total:
            self._easy_until_s = 0.0
        if self._is_tight:  # pacing would bring it less far than foreseen
            flight.room, flight.spare_s = Room(0.0, is_alone=True), inf

    def _has_its_part(self, seq: Sequence) -> bool:
        """With `fair`, beside other tenants: whether an equal part of all seats is its tenant's, weight for weight."""
        if not self._roster.is_fair:
            return False
        accounts = {each.account for each in self._roster.running if not each.is_background} | {seq.account}
        equal = self._config.max_num_seqs / sum([account.weight for account in accounts])
        return len(accounts) > 1 and seq.account.share >= equal

    def _beside(self, now: float, flight: Flight) -> _Beside:
        running, costs = self._roster.running[: self._roster.num_due], self._times.costs
        works = sorted([work_of(seq, costs) for seq in running], key=attrgetter("num_decodes"))
        # Beside others the step that is being planned, or about to be, may have little room for what is new.
        begins_s = self._begins_s(now)
        if flight.slices:
            begins_s += self._times.seconds(flight.load)
        elif running:
            begins_s += costs.fixed_s + _decodes_s(running, costs)
        return _Beside(works, begins_s, self._num_blocks(self._roster.promised))

    def _may_promise(self, seq: Sequence, beside: _Beside) -> bool:
        """Whether all promises could be kept with this one's; or it is to be tried, which harms nobody."""
        fits = beside.num_blocks + self._num_blocks([seq]) <= self._memory.pool.num_blocks
        slack_s = self._slack_with(seq, beside) if fits else -inf
        if slack_s >= self._least_slack_s(beside):
            self._is_tight = slack_s < self._full_step_s(self._times.costs)
            return True
        self._is_tried = not beside.works  # it is not hopeless
        return self._is_tried

    def _slack_with(self, seq: Sequence, beside: _Beside) -> float:
        works = [*beside.works, self._work_of_new(seq)]
        return self._slack_s(works, self._times.costs, beside.begins_s, is_begun=bool(beside.works))

    def _least_slack_s(self, beside: _Beside) -> float:
        return self._least_chunk_s(self._times.costs) if beside.works else 0.0

    def _work_of_new(self, seq: Sequence) -> Work:
        work = work_of(seq, self._times.costs, max(self._memory.num_cached(seq), seq.num_saved))
        return work._replace(is_paced=not seq.promised_total and work.num_known > self._step_limit)

    def _num_blocks(self, sequences: list[Sequence]) -> int:
        """What all that is promised to these needs of the pool. Choices of a request share their prompt's."""
        rows: dict[str, int] = {}
        any_of: dict[str, Sequence] = {}
        for seq in sequences:
            rows[seq.request_id] = rows.get(seq.request_id, 0) + (len(seq.seats) or seq.num_seats)
            any_of[seq.request_id] = seq
        num_needed = 0
        for request_id, seq in any_of.items():
            size = seq.page_table.block_size
            num_shared = seq.num_prompt // size
            num_needed += num_shared + rows[request_id] * (blocks_for(seq.promised_total, size) - num_shared)
        return num_needed

    # -- what a step may take ------------------------------------------------------------------------------------------

    def room(self, now: float) -> Room:
        """How much the next step may hold besides what is promised."""
        self._num_to_examine = MOST_EXAMINED
        self._roster.waiting.recall(MOST_RECALLED)
        if not self._roster.has_promised:
            self._is_holding_back = False
            return FREE
        begins_s = self._begins_s(now)
        if begins_s < self._easy_until_s:
            return FREE
        costs = self._times.costs
        slack_s = self._review(costs, begins_s)
        if slack_s == inf:
            return FREE
        if slack_s > (full_s := self._full_step_s(costs)):
            self._easy_until_s = begins_s + (slack_s - full_s) / 2
            return FREE
        return self._share(costs, slack_s)

    def _share(self, costs: Costs, slack_s: float) -> Room:
        """As `room`, where promises have so little to spare."""
        promised, running = self._roster.promised, self._roster.running[: self._roster.num_due]
        if all(seq.status is Status.RUNNING for seq in promised):
            # The step brings them all nearer to their ends by as much as it would take if they were alone in it.
            spare_s = slack_s - _decodes_s(running[len(promised) :], costs)
            room = Room(max(spare_s - self._least_chunk_s(costs), 0.0), is_alone=spare_s < 0.0)
        else:
            room = Room(0.0, is_alone=True)  # paced, or beside others, a prompt might not get on by as much
        if room.is_alone and len(promised) < len(running):
            self._is_holding_back = True
        return room

    def planned(self, catching_up: list[Sequence], room: Room) -> None:
        """A step was planned beside promises: who had to sit it out, or was not given a token for its prompt?"""
        if not self._roster.has_promised:
            return
        sits_out = room.is_alone and len(self._roster.promised) < self._roster.num_due
        is_holding_back = sits_out or any(
            seq.status is Status.PREFILL and not (seq.promised_total or seq.is_long or seq.num_in_flight)
            for seq in catching_up
        )
        if self._is_holding_back and not is_holding_back:
            self._roster.waiting.release()
        self._is_holding_back = is_holding_back

    def _review(self, costs: Costs, begins_s: float) -> float:
        """Take leave of promises that were kept, and of those that cannot be; how much the others have to spare."""
        for seq in self._roster.promised:
            if seq.promised_total - 1 <= seq.num_planned < seq.num_prompt + seq.request.params.max_tokens - 1:
                self._roster.dismiss(seq)
        while promised := self._roster.promised:
            works = [work_of(seq, costs) for seq in promised]
            left = seconds_left(works, costs, self._step_limit)
            late = [work.owner for left_s, work in left if begins_s + left_s > work.due_s + _ROUNDING_S]
            if not late:
                return self._slack_s(works, costs, begins_s)
            for owner in late:
                assert owner is not None
                self._roster.dismiss(owner)
        return inf

    def _slack_s(self, works: list[Work], costs: Costs, begins_s: float, *, is_begun: bool = False) -> float:
        """How much later than foreseen all of this could be through, and no promise be broken; less what forecasts err by."""
        factor = 1.0 + self._times.error
        left = seconds_left(works, costs, self._step_limit, is_begun=is_begun)
        return min([work.due_s - begins_s - factor * left_s for left_s, work in left])

    def _begins_s(self, now: float) -> float:
        """When the next step does: once those in flight are through."""
        loads = [
            flight.load if flight.load.num_prompt_tokens else decode_load(flight.slices) for flight in self._flights
        ]
        return now + sum([self._times.seconds(load) for load in loads])

    def _full_step_s(self, costs: Costs) -> float:
        """No step takes longer."""
        config, limit = self._config, self._step_limit
        decodes_s = costs.decode_s * config.max_num_rows
        contexts_s = costs.context_s * self._memory.pool.num_held * self._memory.block_size
        return (
            costs.fixed_s
            + costs.chunked_s
            + decodes_s
            + contexts_s
            + costs.chunk_s(config.max_model_len - limit, limit)
        )

    def _least_chunk_s(self, costs: Costs) -> float:
        """What pacing and rounding may add to a step's prompts: a token each for the first in line and the soonest through."""
        return costs.chunked_s + 2 * costs.chunk_s(self._config.max_model_len, 1)

    @property
    def _step_limit(self) -> int:
        return self._config.max_num_batched_tokens


def _decodes_s(running: list[Sequence], costs: Costs) -> float:
    """What the next tokens of these add to a step."""
    positions = [seq.num_planned for seq in running if seq.status is Status.RUNNING]
    return costs.decode_s * len(positions) + costs.context_s * sum(positions)
