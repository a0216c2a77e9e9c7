"""A step that was launched kernel by kernel, or as a graph: its tensors on their way to the host, and what they say.

On a GPU nothing waits before `wait`: results travel to pinned memory behind an event. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.stats import FailureCause
from engine.core.step import Fault, PendingStep, StepResult
from engine.core.types import TokenLogprob
from engine.runtime.execution.plain_steps import NOT_FINITE
from engine.runtime.models.pooler import Pooled
from engine.runtime.pool.batch import Ranks
from engine.runtime.sampling.sampler import Logprobs, Sampled
from engine.runtime.speculation.drafter import fold

_RULED_OUT = Fault(
    "allowed_token_ids, bad_words and the other constraints of this answer leave no token to continue with; allow more.",
    FailureCause.RULED_OUT,
)

_NO_IMAGE = Fault(
    "An image of this request could not be computed; try again, or send a smaller one.", FailureCause.IMAGE
)


class Scores(NamedTuple):
    """Log probabilities of one slice's prompt tokens, in chunks."""

    slice_index: int
    num_top: int
    chunks: list[Logprobs]


class Computed(NamedTuple):
    """What a step has computed."""

    sampled: Sampled | None = None
    scores: Sequence[Scores] = ()
    pooled: Pooled | None = None
    lacking: Sequence[int] = ()  # slices with an image that could not be computed

    def to_host(self) -> Computed:
        """Return copies in pinned memory, complete when the stream reaches them."""
        sampled, pooled = self.sampled, self.pooled
        if sampled is not None:
            logprobs = None if sampled.logprobs is None else _to_host(sampled.logprobs)
            sampled = sampled._replace(
                ids=_pinned(sampled.ids), is_finite=_pinned(sampled.is_finite), logprobs=logprobs
            )
        if pooled is not None:
            pooled = pooled._replace(sums=_pinned(pooled.sums), is_sane=_pinned(pooled.is_sane))
        scores = [each._replace(chunks=[_to_host(chunk) for chunk in each.chunks]) for each in self.scores]
        return Computed(sampled, scores, pooled, self.lacking)


class ModelStep(PendingStep):
    """A launched step; its tensors are on their way to the host."""

    def __init__(
        self,
        slices: Sequence[SequenceSlice],
        computed: Computed,
        learn: Callable[[Sequence[SequenceSlice], StepResult], None],
        event: torch.cuda.Event | None,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._owners = [
            index
            for index, piece in enumerate(slices)
            for _ in (range(len(piece.samples) + len(piece.drafts)) if piece.drafts else piece.samples)
        ]
        self._slices, self._learn = slices, learn
        self._has_drafts = any(piece.drafts for piece in slices)
        self._result: StepResult | None = None
        self.is_over = False  # the host has waited for it
        self._sampled, self._scores, self._pooled, self._lacking = computed
        rows = () if self._sampled is None else self._sampled.logprob_rows
        self._num_top = {row: slices[self._owners[row]].params.logprobs or 0 for row in rows}
        self._event = event
        if self._sampled is not None and self._sampled.constrained is not None:
            self._sampled.constrained.read = self._ids

    def _ids(self) -> list[int]:
        """Return the drawn ids; waits until they are on the host."""
        assert self._sampled is not None
        if self._event is not None:
            self._ranks.await_event(self._event)
        return self._sampled.ids.tolist()

    def wait(self) -> StepResult:
        self.is_over = True
        if self._result is None:
            self._result = self._read()
            self._learn(self._slices, self._result)
        return self._result

    def _read(self) -> StepResult:
        if self._event is not None:
            self._ranks.await_event(self._event)
        result = StepResult(token_ids=[])
        faults: dict[int, Fault] = {}  # by row
        if self._sampled is not None:
            result.token_ids = self._sampled.ids.tolist()
            is_finite = self._sampled.is_finite.tolist()
            if self._sampled.constrained is not None:
                outcome = self._sampled.constrained.settle()
                result.ended = outcome.ended
                faults = {
                    row: Fault(
                        f"This answer's grammar could not be applied any further: {error}.", FailureCause.GRAMMAR
                    )
                    for row, error in outcome.errors.items()
                }
            for row in [row for row, good in enumerate(is_finite) if not good]:
                ruled_out = self._slices[self._owners[row]].params.rules_out_tokens
                faults[row] = _RULED_OUT if ruled_out else NOT_FINITE
            if self._sampled.logprobs is not None:
                entries = self._sampled.logprobs.to_types(list(self._num_top.values()))
                result.logprobs = dict(zip(self._num_top, entries, strict=True))
        errors = {} if self._has_drafts else {self._owners[row]: fault for row, fault in faults.items()}
        prompt_logprobs: dict[int, Sequence[TokenLogprob]] = {}
        for scores in self._scores:
            entries = [
                entry for chunk in scores.chunks for entry in chunk.to_types([scores.num_top] * len(chunk.chosen))
            ]
            prompt_logprobs[scores.slice_index] = entries
            if any(entry.logprob != entry.logprob for entry in entries):
                errors[scores.slice_index] = NOT_FINITE
        if self._pooled is not None:
            result.pooled, void = self._pooled.to_types()
            errors |= dict.fromkeys(void, NOT_FINITE)
        errors |= dict.fromkeys(self._lacking, _NO_IMAGE)
        result.prompt_logprobs, result.errors = prompt_logprobs, errors
        return fold(result, faults, self._slices) if self._has_drafts else result


def _to_host(logprobs: Logprobs) -> Logprobs:
    return Logprobs(*map(_pinned, logprobs))


def _pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, complete when the stream reaches it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
