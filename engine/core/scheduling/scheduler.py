"""The scheduler: which tokens of which sequences run next, and in which blocks.

One `plan` and one `commit` a step. With overlap several steps are in flight: planning needs counts, never token values,
and blocks that a step in flight names are freed at its commit, never before. Engine thread. It knows no clock (time is an
argument), no tensors, no text.
"""

from __future__ import annotations

from collections import abc, deque
from collections.abc import Iterable, Iterator

from engine.core.budget import Allowance, Beside, StepBudget
from engine.core.config import SchedulerConfig
from engine.core.errors import ComputeError
from engine.core.in_flight import InFlightStep, roll_back
from engine.core.kv.manager import KVCacheManager
from engine.core.kv.tiers import TransferEnd
from engine.core.scheduling.admission import check_request
from engine.core.scheduling.beams import BeamGroup
from engine.core.scheduling.deadlines import Deadlines
from engine.core.scheduling.drafts import DraftPlanner
from engine.core.scheduling.output import OutputProcessor
from engine.core.scheduling.prompts import PromptPlan
from engine.core.scheduling.running import RunningQueue
from engine.core.scheduling.stats_recorder import StatsRecorder
from engine.core.sequence import Sequence, Status
from engine.core.spans import Missing, divided
from engine.core.stats import FailureCause, Snapshot, Stats
from engine.core.step import StepPlan, StepResult
from engine.core.types import AbortCause, FinishReason, Request, StepEvents, TokenEvent

_ENDS = {AbortCause.STOP_STRING: FinishReason.STOP, AbortCause.CONTENT_FILTER: FinishReason.CONTENT_FILTER}


class Scheduler:
    """`add` and `abort` at any time; `plan` and `commit` in turns, commits in the order of their plans.

    Beside a step of a text that is longer than steps are else, and has paused, a plan has other texts, and is committed first.
    """

    def __init__(self, config: SchedulerConfig, stats: Stats | None = None) -> None:
        self.config = config
        self.stats = stats if stats is not None else Stats()
        self._budget = StepBudget(config)
        self.kv = KVCacheManager(config, self.stats, self._budget.times)
        self.tiers = self.kv.tiers
        self._recorder = StatsRecorder(config, self.stats, self.kv)
        self._queue = RunningQueue(self._recorder, config)
        self.deadlines: Deadlines | None = None  # from the first request with a deadline on
        self._in_flight: deque[InFlightStep] = deque()
        has_drafts = config.num_speculative_tokens > 0
        self._drafts = DraftPlanner(config, self.kv, self.stats) if has_drafts else None
        self._output = OutputProcessor(self.kv, self._queue, self._recorder, self._drafts)
        self._decoding: list[Sequence] = []  # in the last step ...
        self._decoding_slots: tuple[int, ...] = ()  # ... and their rows ...
        self._decoding_choices: list[tuple[str, int]] = []  # ... and what their events name
        self._leaders: list[Sequence] = []  # that compute what others may begin with
        self._next_step_id = 0
        self._made_room = False  # for an atomic span, by decodes that waited, in the last step
        self._committed_s = 0.0
        self.missing = Missing()  # vectors that prompts wait for

    @property
    def has_work(self) -> bool:
        """Return whether any sequence lives or any step is in flight."""
        return bool(self._queue.requests or self._in_flight)

    @property
    def has_spans(self) -> bool:
        """Return whether any sequence lives whose prompt has spans."""
        return self._queue.num_with_spans > 0

    @property
    def is_seen(self) -> bool:
        """Return whether there is any request but those that are held."""
        return self._queue.is_seen

    @property
    def has_foreground(self) -> bool:
        """Return whether some of that is not background work."""
        return self._queue.has_foreground

    def plan_beside(self, beside: Beside | None) -> None:
        """Plan steps beside the engines of other models from now on; None while they are idle."""
        self._budget.beside = beside or Beside(0.0, self.config.target_itl_s)

    # -- add and abort -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises a ClientError if it can never run."""
        check_request(request, self.config)
        assert request.request_id not in self._queue.requests, f"request id {request.request_id} is taken"
        names = self.kv.first_names(request)
        queue = self._queue.queue_of(request)
        seq_id = self._queue.take_seq_id()
        key, account = queue.key(request), queue.account(request)
        seq = Sequence(request, 0, seq_id, key, self.config.block_size, names, account)
        if request.params.beam is not None:
            BeamGroup(seq)
        self._queue.requests[request.request_id] = [seq]
        self._queue.num_with_spans += bool(request.spans)
        self._queue.enqueue(seq, is_parked=self.kv.prefetch(seq))
        if request.deadline_s is not None or request.max_queue_s is not None:
            self.deadlines = self.deadlines or Deadlines(self.kv, self._budget.times, self.config)
            self.deadlines.watch(seq)

    def drop_hopeless(self, now: float) -> list[TokenEvent]:
        """End the waiting requests that can no longer meet their deadline; called before each plan."""
        events: list[TokenEvent] = []
        for seq, target, error in () if self.deadlines is None else self.deadlines.take_hopeless(now):
            self._recorder.dropped(seq, target)
            events += self._output.end(seq, FinishReason.DROPPED, now, error=error)
        return events

    def abort(self, request_id: str, cause: AbortCause, now: float, choice: int | None = None) -> list[TokenEvent]:
        """End a request, or one of its forked choices; others are ignored."""
        reason = _ENDS.get(cause, FinishReason.ABORT)
        events: list[TokenEvent] = []
        for seq in list(self._queue.requests.get(request_id, ())):
            if choice is None or (seq.is_forked and seq.choice == choice):
                events += self._output.end(seq, reason, now)
        self.stats.aborted[cause] += len(events)
        self._queue.update_gauges()
        return events

    def abort_all(self, cause: AbortCause, now: float) -> list[TokenEvent]:
        """End all requests."""
        return [event for request_id in list(self._queue.requests) for event in self.abort(request_id, cause, now)]

    # -- plan --------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step, or None if nothing can run before the steps in flight are committed."""
        if self.kv.pins.until:
            self.kv.pins.expire(now)
        if self._queue.parked:
            self._queue.release_followers()
            self._queue.unpark([seq for seq in self._queue.parked if seq.kv.awaits_until_s <= now])
        if self._leaders:
            self._leaders = [seq for seq in self._leaders if seq.leads]
        if not self.kv.has_blocks_for(len(self._queue.running)):
            self._queue.foreground.arrange(self._queue.running)  # some may be preempted
        step = InFlightStep(planned_s=now)
        limit = self._budget.limit(has_foreground=self._queue.has_foreground)
        if self._queue.may_yield:
            self._admit_first(now, step)
        due, urgent = self._queue.due(limit), None
        if self.config.whole_step and self.has_long:
            due = [seq for seq in due if len(seq.tokens) <= self.config.whole_step]
        self.missing.digests.clear()
        if self._queue.num_with_spans:
            due, urgent = self._make_room(due, limit)
        catching_up = self._plan_decodes(step, due)
        admits = self._queue.num_queued > 0 and (self.kv.has_slot or self._queue.has_takeable)
        allowance: Allowance | None = None
        if limit > step.num_decodes and (catching_up or admits):
            allowance = Allowance(self._budget, limit, step.positions)
            prompts = PromptPlan(self.kv, self._queue, step, allowance, self.missing, in_order=self._budget.is_reduced)
            prompts.resume(catching_up, urgent)
            if admits:
                prompts.admit(self._admit(now, step))
            prompts.finish(now)
            step.load = allowance.load
        if not (step.sequences or step.arrivals):
            self.kv.dropped(step)  # sequences were admitted and preempted again
            is_stuck = catching_up and not self._in_flight and not self.missing.digests
            return self._plan_without_last(now) if is_stuck else None
        if self._drafts is not None:
            allowance = allowance or Allowance(self._budget, limit, step.positions)
            self._drafts.plan(step, allowance, len(self._queue.running))
        return self._launch(step)

    def _plan_without_last(self, now: float) -> StepPlan | None:
        """Preempt the last of several prompts that wait for each other's blocks, and return the next step.

        What a prompt may still need assumes that blocks which slide out of its window become free. One that another
        prompt reads in its own window does not.
        """
        running = self._queue.running
        if len(running) < 2:
            return None
        self._output.preempt(running[-1])
        return self.plan(now)

    def _make_room(self, due: list[Sequence], limit: int) -> tuple[list[Sequence], Sequence | None]:
        """Return what a step plans, and the first prompt if it has come to an atomic span; some decodes may wait for it.

        They wait for no two such steps in turn.
        """
        was_made, self._made_room = self._made_room, False
        for urgent in due:
            span = divided(urgent.request.spans, urgent.num_planned + 1)
            if span is not None and urgent.status is Status.PREFILL and not self.missing.lacks(span):
                break
        else:
            return due, None
        num_decodes = max(limit - (span.end - urgent.num_planned), 0)
        decodes = [seq for seq in due if seq.status is not Status.PREFILL]
        self._made_room = len(decodes) > num_decodes and not was_made
        waiting = set(decodes[num_decodes:]) if self._made_room else ()
        return [seq for seq in due if seq not in waiting], urgent

    def _launch(self, step: InFlightStep) -> StepPlan:
        """Complete a step and return it as a plan; from here on it is in flight."""
        if self.config.num_host_blocks:
            step.swap_out = self.tiers.host.take_due()
        step.step_id = self._next_step_id
        self._next_step_id += 1
        self._in_flight.append(step)
        if step.chunks:  # it may be long; what a step of decodes changes is seen at its commit
            self._queue.update_gauges()
        return step.plan()

    def _plan_decodes(self, step: InFlightStep, due: list[Sequence]) -> list[Sequence]:
        """Give every running sequence in `due` its next position; returns the prompts not computed yet.

        The queue is walked from its front, and victims are taken from its end. So a planned sequence is preempted only as
        a beam of a search whose other beams are.
        """
        catching_up: list[Sequence] = []
        skipped: set[Sequence] = set()
        positions = step.positions
        for seq in due:
            start = seq.num_planned
            if start >= seq.fast_path_until and not self._is_ready(seq, catching_up, step):
                skipped.add(seq)
                continue
            positions.append(start)
            seq.num_planned = start + 1
        step.sequences += [seq for seq in due if seq not in skipped] if skipped else due
        step.num_decodes = step.num_samples = len(positions)
        if step.sequences != self._decoding:  # mostly they are those of the last step
            self._decoding = list(step.sequences)
            self._decoding_slots = tuple([seq.slot for seq in step.sequences])
            self._decoding_choices = [(seq.request_id, seq.choice) for seq in step.sequences]
            self._queue.update_gauges()
        step.slots, step.choices = self._decoding_slots, self._decoding_choices
        # Some may have been preempted meanwhile: the beams of a search are preempted together.
        return catching_up and [seq for seq in catching_up if seq.status is Status.PREFILL]

    def _is_ready(self, seq: Sequence, catching_up: list[Sequence], step: InFlightStep) -> bool:
        """Prepare a sequence for its next position; returns whether it decodes in this step."""
        if seq.status is not Status.RUNNING:
            catching_up.append(seq)
            return False
        if seq.num_planned >= seq.max_total - 1:
            return False  # its last token is in flight, or it waits for other beams
        if seq.num_planned >= seq.kv.writable_until and not self._make_writable(seq, step):
            return False
        if seq.beam_group is not None and seq.has_row:
            step.add_beam(seq, seq.num_planned)
        step.add_row(seq)
        if seq.fast_path_until:
            seq.update_fast_path()
        return True

    def _make_writable(self, seq: Sequence, step: InFlightStep) -> bool:
        """Allocate a block for the next position, preempting from the end; False if it must wait."""
        while not self.kv.extend(seq, step):
            if self._output.num_leaving:
                return False  # the next commit frees blocks
            victim = self._queue.running[-1]
            self._output.preempt(victim)
            if seq.status is not Status.RUNNING:
                return False  # it was its own victim
        return True

    def _admit_first(self, now: float, step: InFlightStep) -> None:
        """Let the policy preempt sequences for the next waiting one, before the step has slices."""
        seq = self._queue.first_waiting
        if seq is None or seq.kv.ticket is not None or seq.is_background or self._follows(seq):
            return
        if self._claim(seq, step):
            self._start(seq, now)

    def _admit(self, now: float, step: InFlightStep) -> Iterator[Sequence]:
        """Start waiting sequences, in order, while slots and blocks last; yields one at a time.

        One block stays available for each running sequence, which may need it next.
        """
        for seq in self._next_waiting():
            if seq.is_background and self._queue.has_foreground:
                return
            if self._follows(seq):
                continue
            if not self._claim(seq, step):
                return
            self._start(seq, now)
            yield seq

    def _follows(self, seq: Sequence) -> bool:
        """Park a waiting sequence that begins as a prompt which is being computed; returns whether it waits for that.

        Prompts that arrive together would each compute what they share. A short one waits for no long one, which is paced.
        """
        if not self._leaders or seq.status is not Status.WAITING:
            return False
        is_short = len(seq.tokens) <= self.config.max_num_batched_tokens
        leaders = [
            leader
            for leader in self._leaders
            if leader.is_background <= seq.is_background and not (is_short and leader.is_chunked_prefill)
        ]
        if (found := self.kv.find_leader(seq, leaders)) is not None:
            self._queue.follow(seq, *found)
        return found is not None

    def _next_waiting(self) -> Iterator[Sequence]:
        """Yield the waiting sequences in order; when one is asked for, the one before has started."""
        if self.has_long:
            yield from [seq for seq in self._queue.waiting if len(seq.tokens) <= self.config.whole_step]
            return
        while (seq := self._queue.first_waiting) is not None:
            yield seq

    def _start(self, seq: Sequence, now: float) -> None:
        """Start a waiting sequence whose blocks are allocated."""
        self._recorder.admitted(seq, now)
        self._queue.dequeue(seq)
        seq.move(Status.PREFILL)
        seq.is_chunked_prefill = len(seq.tokens) - seq.num_planned > self.config.max_num_batched_tokens
        self._queue.start(seq)
        if seq.leads:
            self._leaders.append(seq)

    def _claim(self, seq: Sequence, step: InFlightStep) -> bool:
        """Allocate slots and blocks for a waiting sequence; returns whether that succeeded."""
        running = self._queue.running
        if any(parked.kv.is_fetched_again for parked in self._queue.parked):
            return False  # its place is before this one
        ahead = [other for other in self._queue.followers if other.place < seq.place]
        if ahead and not self.kv.has_room_for([seq, *ahead], reserve=len(running)):
            return False  # their places are, too
        while (loads := self.kv.allocate(seq, reserve=len(running))) is None:
            if not self._make_way(seq, step):
                return False
        if loads:
            step.add_loads(seq, loads)
        return True

    def _make_way(self, seq: Sequence, step: InFlightStep) -> bool:
        """Preempt background work for a waiting sequence, or the policy's victims if they free enough; False if it must wait."""
        if seq.kv.is_fetched_again:
            self._queue.park(seq)
            return False
        if self._output.num_leaving:
            return False  # the next commit frees blocks
        # A sequence that started in this plan and loads blocks is no victim: the two could preempt each other forever.
        victims = [victim for victim in self._queue.takeable(seq) if victim not in step.arrivals]
        if victims and not victims[0].is_background:
            victims = self.kv.enough(victims, seq, len(self._queue.running))
            self.stats.yielded += len(victims)
        else:
            victims = victims[:1]
        for victim in victims:
            if victim.status in (Status.PREFILL, Status.RUNNING):  # else it was preempted with another beam
                self._output.preempt(victim)
        return bool(victims)

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> StepEvents:
        """Take in the result of the oldest plan, or of one beside it; returns the events in plan order."""
        is_oldest = self._in_flight[0].step_id == plan.step_id
        step = self._in_flight.popleft() if is_oldest else self._in_flight.pop()
        assert step.step_id == plan.step_id, "a step that is neither the oldest nor the newest in flight"
        # With overlap the device begins a step when the one before it ends.
        seconds = now - max(step.planned_s, self._committed_s)
        if is_oldest:
            self._committed_s = now
        prompts = step.load if step.load.num_prompt_tokens else None
        num_drafts = sum(step.num_drafts.values()) if step.num_drafts else 0
        self._budget.observe(prompts, step.positions, num_drafts, seconds)
        self.kv.committed(step)
        for seq in step.arrivals:
            self._output.settle(seq)
        events = self._output.process(step, result, now)
        self._queue.foreground.charge(step)
        self._recorder.stepped(step, plan.num_tokens, now)
        if step.entries or step.chunks or not events.is_plain(step.num_decodes):  # else no block came or went
            self._queue.update_gauges()
        return events

    @property
    def has_long(self) -> bool:
        """Return whether the oldest step in flight is of a text longer than steps are else; a plan has none beside it."""
        most = self.config.whole_step
        return bool(most and self._in_flight and self._in_flight[0].num_tokens > most)

    @property
    def newest_s(self) -> float:
        """Return the seconds that the newest step in flight is expected to take."""
        return self._budget.times.seconds(self._in_flight[-1].load)

    @property
    def awaits_newest(self) -> bool:
        """Return whether any sequence of the newest step in flight has not ended or been preempted."""
        return not all(seq.is_leaving for seq in self._in_flight[-1].all_sequences)

    def paused(self, seconds: float) -> None:
        """Leave out time in which the newest step in flight did not go on."""
        self._in_flight[-1].planned_s += seconds

    def roll_back(self, now: float, failure: str | None = None) -> list[TokenEvent]:
        """Undo the plans in flight, for which the device had no memory, and halve the next steps.

        With `failure`, an error message, the request with the largest part in the oldest step ends with that error.
        """
        oldest = self._in_flight[0]
        self._made_room = False
        for step in self._in_flight:
            self.kv.rolled_back(step)
        for seq, is_whole in roll_back(self._in_flight).items():
            if seq.is_leaving:
                self._output.settle(seq)
            elif seq.status not in (Status.PREFILL, Status.RUNNING):
                pass  # it was preempted with another beam
            elif not is_whole:
                self._output.preempt(seq)
            elif seq.status is Status.RUNNING:
                seq.move(Status.PREFILL)
                seq.is_chunked_prefill = False  # a step held all that it has to recompute
        self._budget.out_of_memory(oldest.num_tokens)
        events: list[TokenEvent] = []
        if failure is not None:
            for seq in list(self._queue.requests.get(oldest.largest(self._queue.requests) or "", ())):
                events += self._output.end(seq, FinishReason.ERROR, now, error=ComputeError(failure))
            self.stats.failed[FailureCause.OUT_OF_MEMORY] += len(events)
        self._queue.update_gauges()
        return events

    def give_up_copies(self) -> None:
        """Stop copying blocks to and from host memory; preempted sequences are recomputed."""
        self.tiers.host.give_up()
        self.stats.failed_copies += 1
        self._queue.update_gauges()

    def transferred(self, reports: Iterable[TransferEnd]) -> None:
        """Take in the ends of transfers between host memory and the stores."""
        self._queue.unpark(self.tiers.finish(reports))
        self._queue.update_gauges()

    @property
    def has_parked(self) -> bool:
        """True if any sequence waits for a transfer, and for nothing else."""
        return bool(self._queue.parked)

    @property
    def recent_lengths(self) -> abc.Sequence[int]:
        """Return the tokens, prompts included, of the sequences completed last."""
        return self._recorder.lengths

    @property
    def running(self) -> list[Sequence]:
        """Return the running sequences, to be read only. Any thread may ask."""
        return list(self._queue.running)

    def snapshot(self) -> Snapshot:
        """Return the pool and all sequences; of those without blocks, no more than may run."""
        listed, num_empty = [], 0
        for seq in self._queue.holders(self._in_flight):
            num_empty += not seq.kv.tables
            if seq.kv.tables or num_empty <= self.config.max_num_seqs:
                listed.append(seq.view())
        queue = [seq.request_id for seq in self._queue.waiting]
        num_free, num_cached, num_held = self.kv.pool.counts
        return Snapshot(num_free, num_held, num_cached, self.kv.pool.findable, tuple(listed), tuple(queue))
