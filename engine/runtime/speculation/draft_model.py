"""Drafts by a smaller model, with separate K/V in the same block numbers as the target's first group.

It computes missing positions only when it is asked to draft: first those up to the last known token, then one token for
each draft. Known positions are tracked by block, so K/V that sequences share, by the prefix cache or by forks, is
computed once. An error there makes a draft worse and does not change an answer.

It draws with the noise that the target will use, so where the two models agree about the probabilities they agree about
the token, at any temperature. Penalties, biases and grammars are applied by the target alone. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import StepPlan
from engine.runtime.attention.backend import AttentionBackend
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.pool.batch import BatchBuilder
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import RowTables
from engine.runtime.sampling.draw import draw
from engine.runtime.sampling.sampler import wishes
from engine.runtime.speculation.drafter import KnownPositions, draft_by_depth
from engine.runtime.transfer import to_device


class DraftModel:
    """A Drafter with weights."""

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_cache: KVCache,
        config: SchedulerConfig,
        device: torch.device,
    ) -> None:
        self._model, self._backend, self._kv_cache, self._device = model, backend, kv_cache, device
        self._last_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._max_tokens = config.max_num_batched_tokens
        self._tables = RowTables(config)
        # Its layers keep every position: they have the blocks of the first group, and no recurrent state.
        self._batches = BatchBuilder(replace(config, windows=(), state_blocks=0), device, self._tables)
        self._known = KnownPositions(config, self._tables)

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        """See Drafter; sequences with many missing positions get no drafts yet."""
        if plan.copies:
            self._kv_cache.copy_blocks(plan.copies)
        self._tables.follow(plan)
        self._known.follow(plan, slices)
        room, catching_up, asked = self._max_tokens, [], {}
        for index, num_drafts in plan.drafts:
            piece = slices[index]
            stop = piece.start + piece.num_tokens
            begin = self._known.up_to(piece)
            num_tokens = min(stop - begin, room)
            if num_tokens and stop + num_drafts <= self._model.max_model_len:
                room -= num_tokens
                is_ready = begin + num_tokens == stop
                samples = piece.samples if is_ready else ()
                catching_up.append(piece._replace(start=begin, num_tokens=num_tokens, samples=samples))
                self._known.note(piece.slot, begin, begin + num_tokens)
                if is_ready:
                    asked[index] = num_drafts
        drawn = self._draw(catching_up) if catching_up else None
        return {} if drawn is None else self._go_on(slices, asked, drawn)

    def forget(self, blocks: Sequence[int]) -> None:
        self._known.bring(blocks)

    def _go_on(self, slices: Sequence[SequenceSlice], asked: Mapping[int, int], drawn: Tensor) -> dict[int, list[int]]:
        """Draw the further drafts, one step each; `drawn` are the first ones."""

        def draw_next(depth: int, going: Sequence[int]) -> Tensor:
            if not depth:
                return drawn
            following = [slices[index] for index in going]
            more = self._draw([piece.at(piece.start + piece.num_tokens - 1 + depth) for piece in following])
            assert more is not None
            return more

        drafts = draft_by_depth(asked, draw_next)
        for index, num_drafts in asked.items():
            piece = slices[index]
            last = piece.start + piece.num_tokens + num_drafts - 1  # position of the last draft, which was not read
            self._known.note(piece.slot, piece.start, last, last + 1)
        return drafts

    @torch.inference_mode()
    def _draw(self, slices: Sequence[SequenceSlice]) -> Tensor | None:
        """Compute positions, draw after slices with samples; return ids on the device."""
        batch = self._batches.build(slices, self._last_ids)
        self._backend.prepare(batch)
        hidden = self._model.forward(batch.ids, batch.positions, self._kv_cache, batch.sample_rows)
        if not len(batch.sample_rows):
            return None
        ids = draw(self._model.logits(hidden), wishes(slices)).ids
        slots = to_device([piece.slot for piece in slices if piece.samples], torch.int64, self._device)
        self._last_ids.index_copy_(0, slots, ids)
        return ids

    def close(self) -> None:
        """Release weights and pool."""
        del self._model, self._backend, self._kv_cache
