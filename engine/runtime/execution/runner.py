"""The Runner that computes with a model: a StepPlan in, sampled ids out.

    blocks moved -> batch -> forward -> prompt log probabilities, pooled states -> LM head of the sampled rows ->
    sampler -> host

Only rows that are sampled or scored go through the LM head. Drawn ids stay on the device, in `last_ids[slot]`, for the step
that needs them. Engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import Rows, SequenceSlice
from engine.core.step import PendingStep, Resources, StepPlan
from engine.core.types import Progress
from engine.runtime.attention.backend import Batch
from engine.runtime.execution.model_step import Computed, ModelStep, Scores
from engine.runtime.execution.plain_steps import plain_steps
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.lora.loader import group_rows
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.pooler import Pooled, Pooler, pool
from engine.runtime.native.decoder import Streams, Vectors
from engine.runtime.pool.batch import ALONE, BatchBuilder, Packet, Ranks, scored_portions
from engine.runtime.pool.groups import LayerGroups
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import Changes, RowTables
from engine.runtime.sampling.sampler import Sampled, Sampler, gather_logprobs, is_plain
from engine.runtime.speculation.drafter import Drafter, with_drafts
from engine.runtime.speculation.heads import Head, HeadDrafter
from engine.runtime.stores.host import HostPool
from engine.runtime.transfer import Drawn, to_device

if TYPE_CHECKING:
    from engine.runtime.execution.decode_graphs import DecodeGraphs  # needs Triton, which a CPU-only machine may lack
    from engine.runtime.execution.image_rows import Embed, ImageRows, ImageVectors  # of models with a tower alone
    from engine.runtime.execution.pieces import StepInPieces  # of models that attend both ways


class ModelRunner:
    """Owns the model, the pool and the sampler's state."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        config: SchedulerConfig,
        device: torch.device,
        head: Head | None = None,
        ranks: Ranks = ALONE,
        resources: Resources | None = None,
    ) -> None:
        """With a head, whose layers are the last of the pool, `heads` is its drafter and runs in every step.

        `ranks` compute the other parts of the model; this runner is the first rank's. `resources` has the grammars and
        adapters that plans name.
        """
        self._model, self._kv_cache, self._device = model, kv_cache, device
        self._ranks, self._resources = ranks, resources
        self._rows, self._tables = Rows(), RowTables(config)
        self._batches = BatchBuilder(config, device, self._tables)
        self._launched: deque[ModelStep] = deque()
        self._sampler = Sampler(device, resources)
        self._last_ids = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._plain = plain_steps(model, kv_cache, config, self._tables)
        self._config = config
        self._host_pool: HostPool | None = None
        self._graphs: DecodeGraphs | None = None
        self._drafter: Drafter | None = None
        self.heads = None if head is None else HeadDrafter(head, kv_cache, config, device, self._tables)
        self._images: ImageRows | None = None
        self.pooler: Pooler | None = None
        self.pauses_above = inf  # tokens; a step of more may pause
        self._paused: list[StepInPieces] = []  # at most one, and one beside it

    def begin(self) -> None:
        """On CUDA, run a step: cuBLAS's handle and workspace belong to a thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            num_tokens = min(2, self._config.max_model_len, self._config.max_num_batched_tokens)
            self.run(warm_up_plan(self._config, num_seqs=1, num_tokens=num_tokens)).wait()

    @torch.inference_mode()
    def capture(self, report: Callable[[Progress], None]) -> None:
        """Launch decode steps as CUDA graphs from now on; kernels must be Triton's."""
        from engine.runtime.execution.decode_graphs import DecodeGraphs

        self._ranks.capture()
        group = self._ranks.group
        deltas = None if self._images is None else self._images.deltas
        graphs = DecodeGraphs(self._model, self._kv_cache, self._config, self._last_ids, self._tables, group, deltas)
        graphs.capture(report)
        self._graphs = graphs

    def read_blocks(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy whole blocks out, as bytes."""
        if self._host_pool is not None:
            self._host_pool.settle()
        self._kv_cache.read_blocks(blocks, rows)

    def write_blocks(self, blocks: Sequence[int], rows: NDArray[np.uint8]) -> None:
        """Copy whole blocks in."""
        if self._host_pool is not None:
            self._host_pool.settle()
        if self._drafter is not None:
            self._drafter.forget(blocks)
        self._kv_cache.write_blocks(blocks, rows)

    def speculate(self, drafter: Drafter) -> None:
        """Draft from now on where plans have room; steps must then run one at a time."""
        self._drafter = drafter

    def take_images(self, embed: Embed, max_bytes: int) -> ImageVectors:
        """Compute prompts with images from now on; `embed` makes their vectors, of which so many bytes are kept."""
        from engine.runtime.execution.image_rows import ImageRows, ImageVectors

        assert self._resources is not None, "images are found there"
        vectors = ImageVectors(embed, max_bytes, self._resources)
        self._images = ImageRows(vectors, self._resources, self._device, self._config.max_num_seqs)
        return vectors

    def open_host_pool(self, num_blocks: int, folder: Path | None = None) -> HostPool:
        """Open host blocks for swapped K/V: in main memory, or on a CPU in a file.

        The file is in `folder`, or in the system's temporary folder. Raises MemoryBudgetError or ConfigError.
        """
        if self._device.type == "cuda":
            from engine.runtime.stores.pinned import PinnedPool

            self._host_pool = PinnedPool(self._kv_cache.blocks, num_blocks, self._device)
        else:
            self._host_pool = HostPool(self._kv_cache.blocks, num_blocks, folder)
        return self._host_pool

    @property
    def blocks(self) -> list[Tensor]:
        """Views of the pool, as KVCache has them."""
        return self._kv_cache.blocks

    @property
    def groups(self) -> LayerGroups:
        """Return the groups of layers that share the pool's blocks."""
        return self._kv_cache.groups

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch a step. A long one may pause; then the next has batch memory of its own."""
        batches = self._batches
        if self._paused:
            self._paused = [step for step in self._paused if not step.is_over]
            batches = self._beside if self._paused else batches
        if plan.num_tokens <= self.pauses_above:
            return self._run(plan, batches)
        from engine.runtime.execution.pieces import StepInPieces

        batches.batch = None
        self._paused.append(StepInPieces(partial(self._run, plan, batches), partial(self._resume, batches)))
        return self._paused[-1]

    @cached_property
    def _beside(self) -> BatchBuilder:
        return BatchBuilder(self._config, self._device, self._tables)

    def _resume(self, batches: BatchBuilder) -> None:
        """Prepare a step's batch again, in the place of another one's."""
        if batches.batch is not None:
            self._kv_cache.prepare(batches.batch)

    def _run(self, plan: StepPlan, batches: BatchBuilder) -> PendingStep:
        changes, plain = self._tables.follow(plan), self._plain
        if plan.rows and self._images is not None:
            self._images.follow(plan.rows)
        if plain is None:
            return self._launch(plan, changes, batches)
        if plan.rows:
            plain.follow(plan.rows)
        is_observed = self.heads is not None and not (self.heads.is_idle and plan.slots)  # a prompt ends its idle time
        if is_observed or not plain.takes(plan):
            return self._launch(plan, changes, batches)
        if self._drafter is not None:
            self._drafter.draft(plan, self._rows.follow(plan))
        elif plan.rows or plan.ids:
            self._rows.begin(plan)
        while self._launched:
            self._launched.popleft().wait()
        return plain.compute(plan, self._rows)

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, changes: Changes, batches: BatchBuilder) -> ModelStep:
        slices = self._rows.follow(plan)
        self._move_blocks(plan)
        if self._drafter is not None:
            slices = self._draft(self._drafter, plan, slices)
        self._await_text(slices)
        if not slices:
            computed = Computed()
        elif self._graphs is not None and not plan.replays and self._is_recorded(self._graphs, slices):
            computed = Computed(self._replay(self._graphs, slices, changes))
        else:
            computed = self._compute(batches, slices, changes, plan)
        event = None
        if self._device.type == "cuda":
            computed, event = computed.to_host(), torch.cuda.Event()
            event.record()
        step = ModelStep(slices, computed, self._rows.learn, event, self._ranks)
        self._launched.append(step)
        return step

    def _move_blocks(self, plan: StepPlan) -> None:
        """Copy blocks out, within the pool, and in."""
        if self._host_pool is not None:
            self._host_pool.begin(plan)
        if plan.copies:
            self._ranks.copy(plan.copies)
            self._kv_cache.copy_blocks(plan.copies)
        if self._host_pool is not None:
            self._host_pool.bring_in(plan)

    def _compute(
        self, batches: BatchBuilder, slices: Sequence[SequenceSlice], changes: Changes, plan: StepPlan
    ) -> Computed:
        """Launch a step kernel by kernel."""
        draws = plan.num_samples > 0
        packet = batches.prepare(slices, changes, plan.replays, plan.states)
        self._ranks.send(packet, draws=draws)
        batch = batches.to_batch(packet, self._last_ids)
        seen, vectors, failed = batch, None, list[int]()
        if self._images is not None and self._images.rows and self._images.has(slices):
            texts = packet.longs[packet.num_tokens : 2 * packet.num_tokens]
            vectors, positions, ends, failed = self._images.inputs(slices, texts)
            for each in (batch, *batch.others):
                each.ends = ends
            seen = batch if positions is None else replace(batch, positions=positions)
        if self._config.whole_step:
            lengths = np.repeat(np.array(packet.contexts, np.int32), packet.query_lens)
            batch.ends = to_device(lengths, torch.int32, self._device)
        batches.batch = batch  # before it is prepared: a step may pause there, too
        self._kv_cache.prepare(batch)
        heads = None if self.heads is None or self.heads.is_idle else self.heads
        returns_all = packet.keeps_all or (heads is not None and heads.needs_all)
        streams = None if heads is None else heads.new_streams(batch.ids)
        hidden = self._forward(slices, seen, None if returns_all else batch.sample_rows, streams, vectors)
        scores = self._score(slices, packet, hidden) if packet.scored else []
        pooled = self._pool(slices, packet, hidden) if packet.keeps_all else None
        sampled = None
        if draws:
            logits = self._model.logits(hidden.index_select(0, batch.sample_rows) if returns_all else hidden)
            sampled = self._sampler.sample(slices, logits, self._last_ids)
            self._ranks.share(self._last_ids)
        if heads is not None:
            states = hidden if streams is None else streams.out.flatten(1)
            heads.observe(slices, batch, states, None if sampled is None else sampled.ids)
        return Computed(sampled, scores, pooled, failed)

    def _pool(self, slices: Sequence[SequenceSlice], packet: Packet, hidden: Tensor) -> Pooled | None:
        return pool(slices, [*accumulate(packet.query_lens[:-1], initial=0)], hidden, self.pooler)

    def _is_recorded(self, graphs: DecodeGraphs, slices: Sequence[SequenceSlice]) -> bool:
        """Return whether a step runs as a graph, which has no vectors."""
        images = self._images
        is_in_image = images is not None and images.rows and images.has(slices, before_end=True)
        return graphs.takes(slices) and not is_in_image

    def _await_text(self, slices: Sequence[SequenceSlice]) -> None:
        """Wait for the ids of all steps but the last, if a draw depends on a text: only its last id may be missing.

        More than one may be where more than two steps overlap.
        """
        while self._launched and self._launched[0].is_over:
            self._launched.popleft()
        if len(self._launched) > 1 and any(piece.params.reads_text for piece in slices):
            for step in list(self._launched)[:-1]:
                step.wait()

    def _draft(self, drafter: Drafter, plan: StepPlan, slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
        """Return the slices with drafts, up to the first token that a grammar forbids."""
        found = drafter.draft(plan, slices)
        if self._images is not None and self._images.rows:
            found = {index: self._images.text_of(slices[index], drafts) for index, drafts in found.items()}
        kept = {index: drafts[: self._sampler.count_allowed(slices[index], drafts)] for index, drafts in found.items()}
        return with_drafts(slices, kept)

    def _forward(
        self,
        slices: Sequence[SequenceSlice],
        batch: Batch,
        rows: Tensor | None,
        streams: Streams | None,
        vectors: Vectors | None,
    ) -> Tensor:
        if streams is None and vectors is None and all(piece.params.adapter is None for piece in slices):
            return self._model.forward(batch.ids, batch.positions, self._kv_cache, rows)
        assert self._resources is not None, "only what has resources names an adapter or an image"
        groups = group_rows(slices, self._device, self._resources.find)
        return self._model.forward(batch.ids, batch.positions, self._kv_cache, rows, groups, streams, vectors)

    def _replay(self, graphs: DecodeGraphs, slices: Sequence[SequenceSlice], changes: Changes) -> Sampled:
        """Launch a step as a graph; rows with edited logits are drawn again after it."""
        rows = graphs.prepare(slices, changes)
        others = [row for row, piece in enumerate(slices) if not is_plain(piece)]
        self._ranks.send(rows, draws=bool(others))
        outputs = graphs.launch(rows)
        if not others:
            return Sampled(outputs.ids, outputs.is_finite, None, ())
        at = to_device(others, torch.int64, self._device)
        self._last_ids.index_copy_(0, outputs.slots.index_select(0, at), outputs.last_ids.index_select(0, at))
        sampled = self._sampler.sample(slices, outputs.logits, self._last_ids, Drawn(outputs.ids, outputs.is_finite))
        self._ranks.share(self._last_ids)
        return sampled

    def use_idle_moment(self) -> bool:
        """Prepare memory for later requests; return False if there is nothing to do."""
        return self._kv_cache.headroom is not None and self._kv_cache.headroom.grow(self._tables.num_seen)

    def close(self) -> None:
        """Release weights, pool and graphs."""
        self._graphs = None
        for step in self._paused:
            step.close()
        if self._host_pool is not None:
            self._host_pool.close()
            self._host_pool = None
        if self._drafter is not None:
            self._drafter.close()
        elif self.heads is not None:
            self.heads.close()
        del self._model, self._kv_cache
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _score(self, slices: Sequence[SequenceSlice], packet: Packet, hidden: Tensor) -> list[Scores]:
        """Score the prompt tokens after the positions of slices that ask for it."""
        asked = [(index, piece) for index, piece in enumerate(slices) if piece.prompt_logprobs >= 0]
        scores = []
        for (index, piece), rows in zip(asked, packet.scored, strict=True):
            following = piece.tokens[piece.start + 1 : piece.start + 1 + rows[1]]
            targets = to_device(following, torch.int64, self._device)
            portions = list(scored_portions(hidden, rows, self._model.vocab_size))
            chosen = targets.split([len(portion) for portion in portions])
            num_top = piece.prompt_logprobs
            chunks = [
                gather_logprobs(self._model.logits(portion), ids, num_top)
                for portion, ids in zip(portions, chosen, strict=True)
            ]
            scores.append(Scores(index, num_top, chunks))
        return scores
