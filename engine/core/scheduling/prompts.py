"""Plans the prompt chunks of a step, of new requests and of preempted ones that resume.

No prompt blocks the queue. Short prompts come first, whole and in order. Long prompts, which no single step can hold,
share the rest of the budget: half is for the first, half for the one that needs the fewest tokens. The first prompt
makes progress in every step: a step holds at least 1 token of it, and if it is long, 1 / RESERVE of the tokens are kept
from short prompts. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from engine.core.budget import Allowance
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.scheduling.running import RunningQueue
from engine.core.sequence import Sequence, Status
from engine.core.spans import Missing, divided
from engine.core.step import Sample


class PromptPlan:
    """Adds chunks to one step: `resume`, then `admit`, then `finish`.

    With `in_order` long prompts do not share: after out-of-memory, the prompt that does not fit is found sooner.
    """

    __slots__ = ("_allowance", "_delayed", "_in_order", "_is_full", "_kv", "_long", "_missing", "_queue", "_step")

    def __init__(
        self,
        kv: KVCacheManager,
        queue: RunningQueue,
        step: InFlightStep,
        allowance: Allowance,
        missing: Missing,
        *,
        in_order: bool,
    ) -> None:
        self._kv, self._queue, self._step, self._allowance, self._missing = kv, queue, step, allowance, missing
        self._in_order = in_order
        self._is_full = False
        self._long: list[Sequence] = []
        self._delayed: list[Sequence] = []  # admitted, but their blocks are still being loaded

    def resume(self, sequences: list[Sequence], urgent: Sequence | None = None) -> None:
        """Continue the prompts of running sequences, except long ones; first that of one with an atomic span."""
        others = [seq for seq in sequences if seq is not urgent]
        self._long = [seq for seq in others if seq.is_chunked_prefill and not self._in_order]
        self._allowance.begin_prompts(holds_back=bool(self._long) and self._long[0] is sequences[0])
        if urgent is not None and len(others) < len(sequences):
            self._plan_chunk(urgent, least=1)
        self._is_full = not self._allowance.num_tokens
        for seq in others:
            if self._in_order or not seq.is_chunked_prefill:
                self._plan_chunk(seq)

    def admit(self, admitted: Iterable[Sequence]) -> None:
        """Begin the prompts of sequences that are admitted one by one, while there is room.

        Sequences whose blocks are loaded compute in the next step, so that this one does not wait for the blocks.
        """
        if self._is_full or not self._allowance.num_tokens:
            return
        step, num_loads = self._step, len(self._step.swap_in)
        for seq in admitted:
            if len(step.swap_in) > num_loads:
                num_loads = len(step.swap_in)
                self._delayed.append(seq)
            elif seq.is_chunked_prefill and not self._in_order:
                self._long.append(seq)
            else:
                self._plan_chunk(seq)
                if self._is_full or not self._allowance.num_tokens:
                    break

    def finish(self, now: float) -> None:
        """Add the chunks of long prompts; if a step would be empty, one whose blocks are loading."""
        self._allowance.release()
        # Some may have been preempted for others that were admitted.
        if long := [seq for seq in self._long if seq.status is Status.PREFILL and self._num_left(seq)]:
            self._plan_long(long, now)
        elif not self._step.sequences and (delayed := [seq for seq in self._delayed if seq.status is Status.PREFILL]):
            self._plan_chunk(delayed[0])

    def _num_left(self, seq: Sequence) -> int:
        """Return how many positions of a prompt can be computed now: up to vectors that are not made yet."""
        spans, start, stop = seq.request.spans, seq.num_planned, len(seq.tokens)
        return (self._missing.clip(spans, start, stop) if spans else stop) - start

    def _plan_long(self, long: list[Sequence], now: float) -> None:
        allowance, seconds = self._allowance, self._allowance.long_s(long, len(self._queue.followers), now)
        first, soonest = long[0], min(long, key=self._num_left)
        if soonest is first:
            allowance.seconds = seconds
            self._plan_chunk(first, least=1)
            return
        allowance.seconds = seconds / 2
        self._plan_chunk(first, least=1)
        allowance.seconds += seconds / 2 if seconds < inf else 0.0
        self._plan_chunk(soonest)

    def _plan_chunk(self, seq: Sequence, least: int = 0) -> None:
        """Plan the next chunk of a prompt, of at least `least` positions."""
        start = seq.num_planned
        num_left = self._kv.reach(seq) - start
        count = self._allowance.prompt(start, num_left, seq.request.spans, least) if num_left > 0 else 0
        self._is_full = self._is_full or start + count < len(seq.tokens)
        stop, spans = start + count, seq.request.spans
        if spans:
            stop = self._missing.clip(spans, start, stop)
        span = divided(spans, stop) if spans else None
        if span is not None:
            # One that is alone in a step may exceed a limit that is lowered.
            is_alone = span.start <= start and not self._step.sequences
            has_room = span.end - start <= (num_left if is_alone else min(self._allowance.num_tokens, num_left))
            stop = span.end if has_room else max(span.start, start)
        if stop == start:
            return
        stop = self._kv.chunk_end(seq, stop)
        count = stop - start
        self._allowance.take_prompt(start, count, seq.request.spans)
        self._kv.cover(seq, stop, self._step)
        seq.num_planned = stop
        samples: tuple[Sample, ...] = ()
        if stop == len(seq.tokens):
            seq.move(Status.RUNNING)
            samples = self._first_samples(seq)
        self._step.add_chunk(seq, start, count, samples)

    def _first_samples(self, seq: Sequence) -> tuple[Sample, ...]:
        """Return the samples at the end of a prompt, one a choice; n > 1 forks here."""
        if not seq.params.max_tokens:
            return ()
        drawing = [seq]
        if not seq.is_forked and seq.beam_group is None:  # a search has only its first beam yet
            seq.is_forked = True
            children = [seq.fork(choice, self._queue.take_seq_id()) for choice in range(1, seq.params.n)]
            self._kv.fork(seq, children)
            self._queue.requests[seq.request_id] += children
            self._step.children[len(self._step.sequences)] = children
            for child in children:
                self._queue.start(child)
                self._step.add_row(child)
            drawing += children
        return tuple(sample for sequence in drawing for sample in sequence.samples)
