"""What a step has brought: tokens are appended, sequences end, prompts are scored, and each of it is told as an event.

Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.beams import Beams
from engine.core.departures import Departures
from engine.core.drafts import DraftPlanner
from engine.core.errors import ComputeError, InvalidRequestError
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.recorder import Recorder
from engine.core.sequence import Sequence, Status
from engine.core.stats import FailureCause, Stats
from engine.core.step import Drafted, Fault, StepResult
from engine.core.types import FinishReason, PlainToken, PromptInfo, StepEvents, TokenEvent, TokenLogprob

Entries = list[TokenEvent | PlainToken]


class Outcomes:
    """Takes in the results of steps."""

    __slots__ = ("_beams", "_departures", "_drafts", "_kv", "_recorder", "_stats", "_taken_in_s")

    def __init__(
        self,
        kv: KVCacheManager,
        departures: Departures,
        beams: Beams,
        recorder: Recorder,
        stats: Stats,
        drafts: DraftPlanner | None,
    ) -> None:
        self._kv, self._departures, self._recorder, self._stats = kv, departures, recorder, stats
        self._beams, self._drafts = beams, drafts
        self._taken_in_s = 0.0  # when the last step was

    def take_in(self, step: InFlightStep, result: StepResult, now: float) -> StepEvents:
        """Every slice's outcome, in plan order."""
        told = StepEvents()
        events = told.entries
        special = {*step.children, *result.errors, *result.prompt_logprobs, *result.pooled, *result.drafted}
        num_plain = 0 if special or result.ended or result.logprobs else step.num_decodes
        self._take_in_decodes(step.sequences[:num_plain], result.token_ids, now, events)
        cursor = num_plain
        for index in range(num_plain, len(step.slices)):
            self._commit(index, step, result, cursor, now, events, is_special=index in special)
            cursor += len(step.slices[index].samples)
        return told

    def _take_in_decodes(self, sequences: Seq[Sequence], token_ids: Seq[int], now: float, events: Entries) -> None:
        """Of slices of one token: the one that each has drawn, about which there is nothing else to be told."""
        gaps, last_s, num_last = self._recorder.gaps, self._taken_in_s, 0
        for seq, token in zip(sequences, token_ids, strict=False):
            seq.num_in_flight -= 1
            seq.num_computed = num_computed = seq.num_computed + 1
            if num_computed < seq.fast_commit_until and token not in seq.ending_ids:
                # What `_accept` does for most tokens, without the calls.
                seq.tokens.append(token)
                previous_s = seq.last_token_s
                if previous_s == last_s:  # most: a look-up in `gaps` costs twice as much
                    num_last += 1
                else:
                    gaps[previous_s] = gaps.get(previous_s, 0) + 1
                seq.last_token_s = now
                events.append((seq.request_id, seq.choice, token))
            else:
                self._accept(seq, token, None, False, now, events)
        if num_last:
            gaps[last_s] = gaps.get(last_s, 0) + num_last
        self._taken_in_s = now

    def _commit(
        self,
        index: int,
        step: InFlightStep,
        result: StepResult,
        cursor: int,
        now: float,
        events: Entries,
        *,
        is_special: bool,
    ) -> None:
        """A slice's outcome, whatever it is; the first of its draws is number `cursor` of all."""
        piece, seq = step.slices[index], step.sequences[index]
        seq.num_in_flight -= 1
        seq.num_computed = piece.start + piece.num_tokens
        if is_special:
            self._commit_special(index, step, result, cursor, now, events)
        elif not piece.samples:
            self._accept_chunk(seq, now, events)
        elif (logprob := result.logprobs.get(cursor)) is not None and seq.search is not None:
            events += self._beams.accept(seq, logprob, now)
        else:
            self._accept(seq, result.token_ids[cursor], logprob, cursor in result.ended, now, events)

    def _commit_special(
        self, index: int, step: InFlightStep, result: StepResult, cursor: int, now: float, events: Entries
    ) -> None:
        """A slice that failed, forked or had drafts, or that brings log probabilities or hidden states of its prompt."""
        seq = step.sequences[index]
        seq.prompt_logprobs += result.prompt_logprobs.get(index, ())
        if index in result.pooled:
            seq.pool(result.pooled[index])
        drawing = (seq, *step.children.get(index, ()))
        for child in drawing[1:]:
            child.num_in_flight -= 1
            child.num_computed = seq.num_computed
        if index in result.errors:
            for failed in drawing:
                self._fail(failed, result.errors[index], now, events)
        elif index in result.drafted:
            self._accept_drafted(seq, step.slices[index].start, result.drafted[index], now, events)
        elif seq.search is not None and step.slices[index].samples:
            events += self._beams.accept(seq, result.logprobs[cursor], now)
        elif step.slices[index].samples:
            for place, drawer in enumerate(drawing, start=cursor):
                is_end = place in result.ended
                self._accept(drawer, result.token_ids[place], result.logprobs.get(place), is_end, now, events)
        else:
            self._accept_chunk(seq, now, events)

    def _accept(
        self,
        seq: Sequence,
        token: int,
        logprob: TokenLogprob | None,
        is_end: bool,
        now: float,
        events: Entries,
    ) -> None:
        """Append a drawn token, end the sequence if that was its last (by its grammar: `is_end`), and tell."""
        if seq.status is Status.DONE:
            self._departures.settle(seq)
            return
        tokens = seq.tokens
        tokens.append(token)
        prompt, previous_s = None, seq.last_token_s
        if previous_s >= 0:
            gaps = self._recorder.gaps
            gaps[previous_s] = gaps.get(previous_s, 0) + 1
        else:
            self._recorder.first_token(seq, now)
            if seq.request.pins and seq.num_computed >= seq.kv.next_publish:
                self._kv.publish(seq)  # so that it can be told
            prompt = seq.prompt_info()
        seq.last_token_s = now
        logprobs = None if logprob is None else (logprob,)
        if token not in seq.ending_ids and len(tokens) < seq.max_total and not is_end:
            if logprobs is None and prompt is None:
                events.append((seq.request_id, seq.choice, token))
            else:
                events.append(TokenEvent(seq.request_id, seq.choice, (token,), logprobs, prompt=prompt))
            if seq.num_computed >= seq.kv.next_publish or seq.is_leaving:
                self._departures.settle(seq)
            seq.rest()
            return
        self._finish(seq, (token,), logprobs, is_end, prompt, now, events)

    def _accept_drafted(self, seq: Sequence, start: int, drafted: Drafted, now: float, events: Entries) -> None:
        """Append several tokens drawn in one step, up to one that ends the sequence. No plan in flight is behind it."""
        if seq.status is Status.DONE:
            self._departures.settle(seq)
            return
        assert self._drafts is not None
        self._drafts.learn(seq, drafted)
        drawn = drafted.token_ids
        if not drawn:
            seq.num_computed = seq.num_planned = start
            self._departures.settle(seq)  # it may have been preempted since it was planned
            return
        num = next((count for count, token in enumerate(drawn, start=1) if token in seq.ending_ids), len(drawn))
        token_ids = tuple(drawn[:num])
        logprobs = None if drafted.logprobs is None else drafted.logprobs[:num]
        seq.tokens += token_ids
        seq.num_computed = seq.num_planned = start + num
        gaps = self._recorder.gaps
        gaps[seq.last_token_s] = gaps.get(seq.last_token_s, 0) + 1
        if num > 1:
            gaps[now] = gaps.get(now, 0) + num - 1  # they come together, as a client sees them come
        seq.last_token_s = now
        is_end = drafted.is_end and num == len(drawn)
        if token_ids[-1] in seq.ending_ids or len(seq.tokens) == seq.max_total or is_end:
            self._finish(seq, token_ids, logprobs, is_end, None, now, events)
            return
        events.append(TokenEvent(seq.request_id, seq.choice, token_ids, logprobs))
        self._departures.settle(seq)

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
        """The last of these tokens was the sequence's last."""
        last = token_ids[-1]
        reason, stop_reason = FinishReason.LENGTH, None
        if last in seq.ending_ids or is_end:
            reason = FinishReason.STOP
            stop_reason = last if last in seq.params.stop_token_ids - seq.params.eos_token_ids else None
        if seq.num_computed >= seq.kv.next_publish:
            self._kv.publish(seq)
        events += self._departures.end(seq, reason, now, token_ids, logprobs, stop_reason, prompt)
        self._departures.settle(seq)

    def _accept_chunk(self, seq: Sequence, now: float, events: Entries) -> None:
        """Part of a prompt was computed; with max_tokens 0 its end is the end of the sequence."""
        is_scored = not seq.params.max_tokens and seq.num_computed == seq.num_prompt
        if is_scored and seq.status is not Status.DONE:
            if seq.num_computed >= seq.kv.next_publish:
                self._kv.publish(seq)
            events += self._departures.end(seq, FinishReason.LENGTH, now, prompt=seq.prompt_info())
        self._departures.settle(seq)

    def _fail(self, seq: Sequence, fault: Fault, now: float, events: Entries) -> None:
        """This sequence could not be computed; it ends alone."""
        self._kv.hide(seq)  # what came of it may be wrong, and is not for others to find
        if seq.status is not Status.DONE:
            is_clients = fault.cause in (FailureCause.GRAMMAR, FailureCause.RULED_OUT)
            error = InvalidRequestError(fault.message) if is_clients else ComputeError(fault.message)
            told = self._departures.end(seq, FinishReason.ERROR, now, error=error)
            self._stats.failed[fault.cause] += len(told)
            events += told
        self._departures.settle(seq)
