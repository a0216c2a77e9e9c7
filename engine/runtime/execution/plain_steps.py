"""Steps that the native library computes in one call: all of their rows are drawn from the logits as the model leaves them.

Nothing of such a step is a tensor: after a forward pass, which takes the caches of a core, the first operation of torch or
numpy costs as much as all of this. runner.py computes the other steps, and the same bits. Engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from ctypes import addressof, c_char, memmove
from itertools import compress, count

from engine.core.config import SchedulerConfig
from engine.core.rows import Rows
from engine.core.step import Fault, RowStart, StepPlan, StepResult
from engine.core.types import SamplingParams
from engine.runtime.models.causal_lm import CausalLM, Described
from engine.runtime.native.library import DRAW, Draw, Library, ScaledLogits, StepArgs, StepGroup, native
from engine.runtime.native.parts import PagedLayer, PagedState, PagedStep
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import RowTables
from engine.runtime.sampling.wish import Wish, pack_draw

NOT_FINITE = Fault(
    "The model's output for this request is not a finite number; try another dtype, such as bfloat16 or float32."
)


class PlainSteps:
    """Computes such steps; other steps share the tables."""

    def __init__(
        self,
        library: Library,
        model: Described,
        pool: PagedStep,
        groups: Iterable[int],
        config: SchedulerConfig,
        tables: RowTables,
    ) -> None:
        """`groups` has the block table of each layer of the pool."""
        num_slots = config.max_num_seqs
        self._library, self._model, self._pool = library, model, pool
        self._others = set[int]()  # slots of rows that are not plain
        self._draws, self._ids, self._are_finite = (
            (Draw * num_slots)(),
            array("q", [0]) * num_slots,
            bytearray(num_slots),
        )
        shared = {
            addressof(layer.attend): StepGroup(addressof(layer.store), addressof(layer.attend), group)
            for layer, group in zip(pool, groups, strict=True)
            if isinstance(layer, PagedLayer)
        }
        states = next((addressof(layer.step) for layer in pool if isinstance(layer, PagedState)), None)
        self._groups = (StepGroup * len(shared))(*shared.values())
        self._args = StepArgs(
            head=addressof(self._model.head),
            groups=addressof(self._groups),
            tables=tables.rows.ctypes.data,
            states=states,
            scaled=ScaledLogits(multiplier=model.multiplier, cap=model.cap),
            draws=addressof(self._draws),
            num_groups=len(shared),
            num_tables=config.num_groups,
            num_slots=num_slots,
            width=tables.width,
            block_size=config.block_size,
            state_blocks=config.state_blocks,
            ids=self._ids.buffer_info()[0],
            is_finite=addressof(c_char.from_buffer(self._are_finite)),
        )

    def follow(self, rows: Iterable[RowStart]) -> None:
        """Take in rows that begin."""
        for row in rows:
            slot, params = row.slot, row.params
            if not isinstance(params, SamplingParams) or not params.draws_plainly or row.spans:
                self._others.add(slot)
                continue
            self._others.discard(slot)
            wish = Wish(params.temperature, params.top_k, params.top_p, params.min_p, row.seed, 0, slot)
            memmove(addressof(self._draws) + slot * DRAW.size, pack_draw(wish, self._model.head.n), DRAW.size)

    def takes(self, plan: StepPlan) -> bool:
        """Return whether a plan is such a step: without drafts, and it moves no blocks."""
        if not plan.num_tokens or plan.drafts or plan.replays or plan.copies or plan.swap_out or plan.swap_in:
            return False
        for chunk in plan.chunks:
            if chunk.slot in self._others or len(chunk.samples) > 1:
                return False
        return not self._others or self._others.isdisjoint(plan.slots)

    def compute(self, plan: StepPlan, rows: Rows) -> StepResult:
        """Compute a step, all steps before which are known."""
        args, drawn = self._args, rows.texts(plan.slots)
        numbers, known = [*plan.slots, *plan.positions], [text[-1] for text in drawn]
        midway = {move.slot: move.midway_after for move in plan.states} if plan.chunks else {}
        for chunk in plan.chunks:
            [text] = rows.texts((chunk.slot,))
            numbers += chunk.slot, chunk.start, chunk.num_tokens, len(chunk.samples), midway.get(chunk.slot, 0)
            known += text[chunk.start : chunk.start + chunk.num_tokens]
            if chunk.samples:
                drawn.append(text)
        sent = array("q", numbers + known)
        args.numbers, args.num_decodes, args.num_chunks = sent.buffer_info()[0], len(plan.slots), len(plan.chunks)
        args.decoder = self._model.decoder.bound_to(self._pool)
        self._library.step(args)
        result, are_finite = StepResult(self._ids[: len(drawn)].tolist()), self._are_finite[: len(drawn)]
        if 0 in are_finite:
            drawing = compress(count(), [True] * len(plan.slots) + [bool(chunk.samples) for chunk in plan.chunks])
            result.errors = {index: NOT_FINITE for index, good in zip(drawing, are_finite, strict=True) if not good}
        for text, token in zip(drawn, result.token_ids, strict=True):
            text.append(token)
        return result


def plain_steps(model: CausalLM, kv_cache: KVCache, config: SchedulerConfig, tables: RowTables) -> PlainSteps | None:
    """Return what computes plain steps, if the library does so for this model and pool."""
    library, pool = native(), kv_cache.paged_step
    if library is None or pool is None or config.whole_step or model.described is None:
        return None
    return PlainSteps(library, model.described, pool, kv_cache.groups.group_of, config, tables)
