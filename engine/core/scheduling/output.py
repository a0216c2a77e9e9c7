"""Processes step results: tokens, events, ends and preemptions of sequences.

Every end and every preemption passes here. Blocks and slots are freed immediately, or at the commit of the last step in
flight that names them. Engine thread.
"""

from __future__ import annotations

from itertools import count

from engine.core.errors import ComputeError, ErrorValue, InvalidRequestError, QuireError
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.scheduling.beams import BeamSearches
from engine.core.scheduling.drafts import DraftPlanner
from engine.core.scheduling.running import RunningQueue
from engine.core.scheduling.stats_recorder import StatsRecorder
from engine.core.sequence import Group, Sequence, Status
from engine.core.stats import FailureCause
from engine.core.step import Drafted, Fault, StepResult
from engine.core.types import FinishReason, PlainTokens, PromptInfo, StepEvents, TokenEvent, TokenLogprob

Entries = list[TokenEvent | PlainTokens]


class OutputProcessor:
    """Turns results into events, and removes sequences that end or are preempted."""

    def __init__(
        self, kv: KVCacheManager, queue: RunningQueue, recorder: StatsRecorder, drafts: DraftPlanner | None
    ) -> None:
        self._kv, self._queue, self._recorder, self._drafts = kv, queue, recorder, drafts
        self._beams = BeamSearches(kv, queue, recorder)
        self._processed_s = 0.0  # when the last step was processed
        self.num_leaving = 0  # sequences that hold blocks only because a step in flight names them

    # -- results of a step -------------------------------------------------------------------------------------------

    def process(self, step: InFlightStep, result: StepResult, now: float) -> StepEvents:
        """Take in the result of every slice; returns the events in plan order."""
        made = StepEvents()
        events = made.entries
        has_special = result.errors or result.logprobs or result.drafted or result.ended
        num_plain = 0 if has_special else step.num_decodes
        if num_plain:
            self._process_decodes(step, result.token_ids, now, events)
        cursor = num_plain
        for index in range(num_plain, len(step.sequences)):
            cursor += self._process_slice(index, step, result, cursor, now, events)
        return made

    def _process_decodes(self, step: InFlightStep, token_ids: list[int], now: float, events: Entries) -> None:
        """Take in one sampled token of each sequence that decodes, with nothing else to report."""
        gaps, last_s, num_others, first_plain = self._recorder.gaps, self._processed_s, 0, 0
        for index, seq, token in zip(count(), step.sequences[: step.num_decodes], token_ids, strict=False):
            seq.num_computed = num_computed = seq.num_computed + 1
            if num_computed < seq.fast_commit_until and token not in seq.ending_ids:
                # The same as `_accept` for most tokens, without the calls.
                seq.tokens.append(token)
                previous_s = seq.last_token_s
                if previous_s != last_s:  # false for most: a look-up in `gaps` costs more
                    num_others += 1
                    gaps[previous_s] = gaps.get(previous_s, 0) + 1
                seq.last_token_s = now
                continue
            num_others += 1
            if index > first_plain:
                events.append(PlainTokens(step.choices, token_ids, range(first_plain, index)))
            first_plain = index + 1
            self._accept(seq, token, None, False, now, events)
        if step.num_decodes > first_plain:
            events.append(PlainTokens(step.choices, token_ids, range(first_plain, step.num_decodes)))
        if step.num_decodes > num_others:
            gaps[last_s] = gaps.get(last_s, 0) + step.num_decodes - num_others
        self._processed_s = now

    def _process_slice(
        self, index: int, step: InFlightStep, result: StepResult, cursor: int, now: float, events: Entries
    ) -> int:
        """Take in the result of any slice, whose samples begin at `cursor` among all; returns how many it has."""
        seq = step.sequences[index]
        start, num_tokens, num_samples = step.sizes(index)
        drawing = (seq, *step.children.get(index, ()))
        for each in drawing:
            each.num_computed = start + num_tokens
        seq.prompt_logprobs += result.prompt_logprobs.get(index, ())
        if index in result.pooled:
            seq.pool(result.pooled[index])
        if index in result.errors:
            for failed in drawing:
                self._fail(failed, result.errors[index], now, events)
        elif index in result.drafted:
            self._accept_drafted(seq, start, result.drafted[index], now, events)
        elif not num_samples:
            self._accept_chunk(seq, now, events)
        elif seq.beam_group is not None:
            self._accept_beam(seq, result.logprobs[cursor], now, events)
        else:
            for place, drawer in enumerate(drawing, start=cursor):
                is_end = place in result.ended
                self._accept(drawer, result.token_ids[place], result.logprobs.get(place), is_end, now, events)
        return num_samples

    def _accept(
        self, seq: Sequence, token: int, logprob: TokenLogprob | None, is_end: bool, now: float, events: Entries
    ) -> None:
        """Append a sampled token, and end the sequence if that was its last; `is_end`: by its grammar."""
        if seq.status is Status.DONE:
            self.settle(seq)
            return
        tokens = seq.tokens
        tokens.append(token)
        prompt, previous_s = None, seq.last_token_s
        if previous_s >= 0:
            gaps = self._recorder.gaps
            gaps[previous_s] = gaps.get(previous_s, 0) + 1
        else:
            self._recorder.first_token(seq, now)
            if seq.request.pins:
                self._publish(seq)  # the event says how much is pinned
            prompt = seq.prompt_info()
        seq.last_token_s = now
        logprobs = None if logprob is None else (logprob,)
        if token not in seq.ending_ids and len(tokens) < seq.max_total and not is_end:
            if logprobs is None and prompt is None:
                events.append(TokenEvent(seq.request_id, seq.choice, (token,)))
            else:
                events.append(TokenEvent(seq.request_id, seq.choice, (token,), logprobs, prompt=prompt))
            if seq.num_computed >= seq.kv.next_publish or seq.is_leaving:
                self.settle(seq)
            seq.update_fast_path()
            return
        self._finish(seq, (token,), logprobs, is_end, prompt, now, events)

    def _accept_beam(self, seq: Sequence, logprob: TokenLogprob, now: float, events: Entries) -> None:
        """Take in a beam's likeliest next tokens. Once all beams have theirs, the search advances or ends."""
        if seq.status is not Status.RUNNING:
            self.settle(seq)
            return
        self._publish(seq)
        answers, first = self._beams.accept(seq, logprob, now), seq.first_beam
        if answers:
            self.retire(first)
            events += answers
        elif answers is not None:
            events.append(TokenEvent(first.request_id, 0, ()))  # no token is certain yet, but the search moved on

    def _accept_drafted(self, seq: Sequence, start: int, drafted: Drafted, now: float, events: Entries) -> None:
        """Append the tokens of a slice with drafts, up to one that ends the sequence."""
        if seq.status is Status.DONE:
            self.settle(seq)
            return
        assert self._drafts is not None
        self._drafts.observe(seq, drafted)
        drawn = drafted.token_ids
        if not drawn:
            seq.num_computed = seq.num_planned = start
            if seq.kv.state.slot:  # it is behind `start`, and the position is computed again
                seq.kv.is_lost = True
                if seq.status is Status.RUNNING:
                    self.preempt(seq)
                    return
            self.settle(seq)  # it may have been preempted since it was planned
            return
        num = next((count for count, token in enumerate(drawn, start=1) if token in seq.ending_ids), len(drawn))
        token_ids = tuple(drawn[:num])
        logprobs = None if drafted.logprobs is None else drafted.logprobs[:num]
        seq.tokens += token_ids
        seq.num_computed = seq.num_planned = start + num
        gaps = self._recorder.gaps
        gaps[seq.last_token_s] = gaps.get(seq.last_token_s, 0) + 1
        if num > 1:
            gaps[now] = gaps.get(now, 0) + num - 1  # they reach the client together
        seq.last_token_s = now
        is_end = drafted.is_end and num == len(drawn)
        if token_ids[-1] in seq.ending_ids or len(seq.tokens) == seq.max_total or is_end:
            self._finish(seq, token_ids, logprobs, is_end, None, now, events)
            return
        events.append(TokenEvent(seq.request_id, seq.choice, token_ids, logprobs))
        if seq.kv.state.slot:
            seq.kv.state.num_behind, seq.fast_path_until = num - 1, 0
        self.settle(seq)

    def _finish(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        is_end: bool,
        prompt: PromptInfo | None,
        now: float,
        events: Entries,
    ) -> None:
        """End a sequence whose last token is the last of `token_ids`."""
        last = token_ids[-1]
        reason, stop_reason = FinishReason.LENGTH, None
        if last in seq.ending_ids or is_end:
            reason = FinishReason.STOP
            stop_reason = last if last in seq.params.stop_token_ids - seq.params.eos_token_ids else None
        self._publish(seq)
        events += self.end(seq, reason, now, token_ids, logprobs, stop_reason, prompt)
        self.settle(seq)

    def _accept_chunk(self, seq: Sequence, now: float, events: Entries) -> None:
        """Take in a part of a prompt. With max_tokens 0 the end of the prompt is the end of the sequence."""
        is_scored = not seq.params.max_tokens and seq.num_computed == seq.num_prompt
        if is_scored and seq.status is not Status.DONE:
            self._publish(seq)
            events += self.end(seq, FinishReason.LENGTH, now, prompt=seq.prompt_info())
        self.settle(seq)

    def _fail(self, seq: Sequence, fault: Fault, now: float, events: Entries) -> None:
        """End one sequence that could not be computed."""
        self._kv.exclude_from_cache(seq)  # its K/V may be wrong
        if seq.status is not Status.DONE:
            is_clients = fault.cause in (FailureCause.GRAMMAR, FailureCause.RULED_OUT)
            error = InvalidRequestError(fault.message) if is_clients else ComputeError(fault.message)
            ends = self.end(seq, FinishReason.ERROR, now, error=error)
            self._recorder.failed(fault.cause, len(ends))
            events += ends
        self.settle(seq)

    # -- ends and preemptions ----------------------------------------------------------------------------------------

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_reason: int | None = None,
        prompt: PromptInfo | None = None,
        error: QuireError | None = None,
    ) -> list[TokenEvent]:
        """End a sequence, a beam with its whole search; returns one terminal event a choice."""
        seq = seq.first_beam
        self.retire(seq)
        choices = (seq.choice,) if seq.is_forked else range(seq.params.n)
        num_generated = seq.num_generated if seq.beam_group is None else 0  # an aborted search has no answer
        timings = self._recorder.finished(seq, reason, now, len(choices), num_generated)
        value = None if error is None else ErrorValue.of(error)
        return [
            TokenEvent(seq.request_id, choice, token_ids, logprobs, reason, stop_reason, prompt, timings, value)
            for choice in choices
        ]

    def retire(self, seq: Sequence) -> None:
        """Remove a sequence from its queue and its request, and free what no step in flight names."""
        if seq.beam_group is not None:
            self._drop_beams(seq.beam_group)
        if seq.status in (Status.PREFILL, Status.RUNNING):
            self._queue.stop(seq)
            if self._leave(seq):
                # Published now: the client's next request may arrive before the step ends. What the step adds is unknown.
                self._kv.leave(seq)
                self._kv.exclude_from_cache(seq)
            else:
                self._kv.free(seq)
        elif not seq.is_leaving:
            self._queue.dequeue(seq)
            self._kv.discard(seq)
        seq.move(Status.DONE)
        self._queue.strike(seq)

    def preempt(self, seq: Sequence) -> None:
        """Preempt a running sequence; it waits again, now or once no step in flight names it.

        A beam is preempted with its whole search: the other beams cannot continue without it.
        """
        seq = seq.first_beam
        if seq.beam_group is not None:
            self._drop_beams(seq.beam_group)
        self._queue.stop(seq)
        seq.move(Status.PREEMPTED)
        seq.history.num_preemptions += 1
        seq.history.preempted_s += (self._processed_s,)
        if not self._leave(seq):
            self._suspend(seq)

    def settle(self, seq: Sequence) -> None:
        """After a commit, publish full blocks, and free those of a sequence that has left its last step."""
        if seq.kv.tables:
            self._publish(seq)
        if seq.is_leaving and not seq.is_in_flight:
            seq.is_leaving = False
            self.num_leaving -= 1
            if seq.status is Status.PREEMPTED:
                self._suspend(seq)
            else:
                self._kv.free(seq)

    def _drop_beams(self, group: Group) -> None:
        """End all beams of a search but the first."""
        for beam in group.disband():
            self._queue.stop(beam)
            beam.move(Status.DONE)
            if not self._leave(beam):
                self._kv.free(beam)

    def _suspend(self, seq: Sequence) -> None:
        """Free a preempted sequence, with a ticket if possible. A search starts again from the prompt."""
        if seq.beam_group is None:
            self._kv.suspend(seq)
        else:
            seq.beam_group.restart(self._queue.take_seq_id())
        self._recorder.preempted(seq)
        self._kv.free(seq)
        self._queue.enqueue(seq)

    def _leave(self, seq: Sequence) -> bool:
        """Return whether a step in flight names the sequence, which keeps its blocks."""
        seq.is_leaving = seq.is_in_flight
        self.num_leaving += seq.is_leaving
        return seq.is_leaving

    def _publish(self, seq: Sequence) -> None:
        """Publish a sequence's blocks if the next one is full."""
        if seq.num_computed >= seq.kv.next_publish:
            self._kv.publish(seq)
