"""The beams of a search as sequences: what each step brings is put together, and sequences follow each other.

A beam that goes on as another's continuation takes a hold on that one's blocks and lets go of its own; what both share is
copied before it is written, as always. Beams wait for each other, so that no plan in flight names one when that happens.
Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from engine.core.beam_search import Continuation
from engine.core.departures import Departures
from engine.core.kv.manager import KVCacheManager
from engine.core.recorder import Recorder
from engine.core.running import RunningQueue
from engine.core.sequence import Sequence, Status
from engine.core.types import FinishReason, TokenEvent, TokenLogprob


class Beams:
    """Takes in what a step has brought for a beam."""

    __slots__ = ("_departures", "_kv", "_queue", "_recorder")

    def __init__(self, kv: KVCacheManager, departures: Departures, queue: RunningQueue, recorder: Recorder) -> None:
        self._kv, self._departures, self._queue, self._recorder = kv, departures, queue, recorder

    def accept(self, seq: Sequence, entry: TokenLogprob, now: float) -> list[TokenEvent]:
        """A beam's likeliest next tokens. With those of the last one the search goes on by a token, or is over.

        Either is told: while the search goes on by an event without tokens.
        """
        search, beams = seq.search, seq.beams
        assert search is not None
        if seq.status is not Status.RUNNING:
            self._departures.settle(seq)
            return []
        if seq.num_computed >= seq.kv.next_publish:
            self._kv.publish(seq)
        if not search.put(beams.index(seq), entry.top):
            return []
        first = beams[0]
        if first.first_token_s < 0:
            self._recorder.began_search(first, now)
        if continuations := search.advance():
            self._go_on(beams, continuations)
            return [TokenEvent(first.request_id, 0, ())]  # nothing to show yet, but a step's work
        return self._end(first, now)

    def _go_on(self, beams: list[Sequence], continuations: list[Continuation]) -> None:
        first = beams[0]
        if len(beams) < len(continuations):
            slots = first.kv.slots
            first.take_slots(slots[:1])
            for slot in slots[1:]:
                self._queue.start(first.add_beam(slot, self._queue.take_seq_id()))
        # Whoever is followed stays in its own place, and all follow before anybody gets a token.
        for place, continuation in enumerate(continuations):
            if continuation.parent != place:
                self._kv.reassign(beams[place], beams[continuation.parent], self._queue.take_seq_id())
        for beam, continuation in zip(beams, continuations, strict=True):
            beam.tokens.append(continuation.token)
            beam.max_total = len(beam.tokens) + 1

    def _end(self, first: Sequence, now: float) -> list[TokenEvent]:
        """The n best answers, best first."""
        asked, search = first.request.params, first.search
        assert search is not None
        self._departures.retire(first)
        events = []
        for choice, answer in enumerate(search.finished[: asked.n]):
            entries = answer.logprobs
            last = entries[-1].token_id
            is_stop_token = answer.reason is FinishReason.STOP and last in asked.stop_token_ids - asked.eos_token_ids
            logprobs = None
            if asked.logprobs is not None:
                logprobs = tuple([entry._replace(top=entry.top[: asked.logprobs]) for entry in entries])
            events.append(
                TokenEvent(
                    request_id=first.request_id,
                    choice=choice,
                    token_ids=tuple([entry.token_id for entry in entries]),
                    logprobs=logprobs,
                    finish_reason=answer.reason,
                    stop_reason=last if is_stop_token else None,
                    prompt=first.prompt_info(),
                    timings=self._recorder.found(first, answer.reason, len(entries), now),
                )
            )
        return events
