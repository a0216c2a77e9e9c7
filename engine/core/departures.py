"""How sequences leave: for good, or to make way; and what a plan in flight still names stays until it is committed.

Every end and every preemption passes here. Blocks and slots are given back at once, or at the commit of the last plan
that names them. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from collections import deque

from engine.core.errors import QuireError
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.kv.page_table import blocks_for
from engine.core.recorder import Recorder
from engine.core.running import RunningQueue
from engine.core.sequence import Sequence, Status
from engine.core.types import FinishReason, PromptInfo, TokenEvent, TokenLogprob


class Departures:
    """end, preempt, and settle what either has left behind."""

    __slots__ = ("_in_flight", "_kv", "_queue", "_recorder", "num_leaving")

    def __init__(
        self, kv: KVCacheManager, queue: RunningQueue, recorder: Recorder, in_flight: deque[InFlightStep]
    ) -> None:
        self._kv, self._queue, self._recorder = kv, queue, recorder
        self._in_flight = in_flight
        self.num_leaving = 0  # sequences that hold blocks only because a plan in flight names them

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
        """Leave for good, with one terminal event a choice. A beam does so with its whole search."""
        seq = seq.beams[0] if seq.beams else seq
        self.retire(seq)
        choices = (seq.choice,) if seq.is_forked else range(seq.params.n)
        num_generated = 0 if seq.search is not None else seq.num_generated  # a search that is cut short has no answer
        timings = self._recorder.finished(seq, reason, now, len(choices), num_generated)
        return [
            TokenEvent(seq.request_id, choice, token_ids, logprobs, reason, stop_reason, prompt, timings, error)
            for choice in choices
        ]

    def retire(self, seq: Sequence) -> None:
        """Leave the queues and the request, and free what no step names."""
        self._drop_beams(seq)
        if seq.status in (Status.PREFILL, Status.RUNNING):
            self._queue.stop(seq)
            if self._leave(seq):
                # Now, for whoever was told may be back before the step is; what that computes is nobody's.
                self._kv.leave(seq)
                self._kv.hide(seq)
            else:
                self._kv.free(seq)
        elif not seq.is_leaving:
            self._queue.dequeue(seq)
            self._kv.discard(seq)
        seq.move(Status.DONE)
        self._queue.strike(seq)

    def _drop_beams(self, first: Sequence) -> None:
        """Of a search, let go of all beams but the first."""
        for beam in first.beams[1:]:
            self._queue.stop(beam)
            beam.move(Status.DONE)
            if not self._leave(beam):
                self._kv.free(beam)
        del first.beams[1:]

    def preempt(self, seq: Sequence) -> None:
        """Have a running sequence give way, at once or as soon as no plan in flight names it.

        A beam gives way with its whole search, which starts anew: some of its beams alone could not go on, and the rest
        would hold blocks that they do nothing with.
        """
        if seq.beams:
            seq = seq.beams[0]
            held = {block for beam in seq.beams for block in beam.kv.blocks}
            seq.headroom = max(len(held) - blocks_for(seq.num_prompt, seq.kv.block_size), 0)
            self._drop_beams(seq)
        self._queue.stop(seq)
        seq.move(Status.PREEMPTED)
        seq.num_preemptions += 1
        if not self._leave(seq):
            self._set_aside(seq)

    def _set_aside(self, seq: Sequence) -> None:
        """Free a preempted sequence, saved to host memory where that is possible; it keeps its tokens and its place.

        A beam search forgets its tokens: its choices are made of numbers that come out the same again.
        """
        if seq.search is None:
            self._kv.suspend(seq)
        else:
            seq.begin_search(self._queue.take_seq_id())
        self._recorder.preempted(seq)
        self._kv.free(seq)
        self._queue.enqueue(seq)

    def _leave(self, seq: Sequence) -> bool:
        """True if a plan in flight names the sequence, so that its blocks have to stay until that is committed."""
        seq.is_leaving = seq.num_in_flight > 0
        self.num_leaving += seq.is_leaving
        return seq.is_leaving

    def settle(self, seq: Sequence) -> None:
        """After a commit: show full blocks to the prefix cache, and let go of a sequence that left its last step."""
        if seq.num_computed >= seq.kv.next_publish and seq.kv.blocks:
            self._kv.publish(seq)
        if seq.is_leaving and not seq.num_in_flight:
            seq.is_leaving = False
            self.num_leaving -= 1
            if seq.status is Status.PREEMPTED:
                self._set_aside(seq)
            else:
                self._kv.free(seq)
