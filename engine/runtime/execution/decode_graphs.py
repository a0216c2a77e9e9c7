"""Decode steps as CUDA graphs, recorded once for each batch size.

A step of a small model is about three hundred kernels of a few microseconds, which the host cannot launch as fast as
they run. A graph contains them all: the batch from DecodeInputs, the model, the draw, and the drawn ids where the next
step reads them. A batch between two sizes is padded. The splits of attention are recorded too, so steps with a long
context have separate graphs, of fewer sizes.

Of several ranks each captures the same graphs in the same order, with its parts of the model and the collectives. All
launch the same graph in a step, because they get the same rows. The first rank's draw is sent to the others in the
graph; what others draw is overwritten. Engine thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.types import Progress, ReportProgress
from engine.runtime.cuda.sampling import sample
from engine.runtime.execution.decode_inputs import DecodeInputs, longest_context
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.pool.batch import DecodeRows
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.tables import Changes, RowTables

_PLANNED_CONTEXT = 8192  # tokens; longest context of the usual graphs


class Outputs(NamedTuple):
    """A step's results for R rows, always at the same addresses."""

    ids: Tensor  # [R] int64, drawn without penalties, biases and bans
    is_finite: Tensor  # [R] bool
    logits: Tensor  # [R, V] float32
    slots: Tensor  # [R] int64
    last_ids: Tensor  # [R] int64, the previous ids of the slots


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the graphs' rows: 1, 2, 4, then every 8 to 256, then every 16, and the maximum."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def long_graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the rows of graphs for long contexts, where padding costs little: powers of two."""
    return sorted({1 << power for power in range((max_num_seqs - 1).bit_length())} | {max_num_seqs})


class _GraphSet(NamedTuple):
    """Graphs for steps with contexts up to a number of tokens."""

    max_context: int
    sizes: list[int]
    replays: dict[int, Callable[[], Outputs]]


@cache
def _recording_stream() -> torch.cuda.Stream:
    """Return the one stream for recording: cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream()


class DecodeGraphs:
    """The graphs of one model over one pool."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        config: SchedulerConfig,
        last_ids: Tensor,
        tables: RowTables,
        group: Group = SINGLE,
        deltas: Tensor | None = None,
    ) -> None:
        """`last_ids` [max_num_seqs + 1] int64 is the runner's; its last slot is for padding. So are `tables`, and `deltas`."""
        self._group = group
        self._model, self._kv_cache, self._last_ids = model, kv_cache, last_ids
        self._inputs = DecodeInputs(config, last_ids.device, tables, deltas)
        self._sets = [_GraphSet(min(_PLANNED_CONTEXT, config.max_model_len), graph_sizes(config.max_num_seqs), {})]
        if config.max_model_len > _PLANNED_CONTEXT:
            self._sets.append(_GraphSet(config.max_model_len, long_graph_sizes(config.max_num_seqs), {}))
        # Shared by all graphs: separate results of a large vocabulary would take gigabytes. Only the first rank writes them.
        shape = (config.max_num_seqs, model.vocab_size)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=last_ids.device)

    def capture(self, report: ReportProgress) -> None:
        """Record every size, the largest first: smaller ones reuse its memory. All ranks call it."""
        pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        wanted = sorted(((size, graphs) for graphs in self._sets for size in graphs.sizes), key=lambda each: -each[0])
        for done, (size, graphs) in enumerate(wanted):
            report(Progress("cuda_graphs", f"decode steps of {size}", done, len(wanted), "graphs"))
            graphs.replays[size] = self._record(size, graphs.max_context, pool)
        report(Progress("cuda_graphs", "", len(wanted), len(wanted), "graphs"))

    def takes(self, slices: Sequence[SequenceSlice]) -> bool:
        """Return whether every sequence of the step has one token, one draw and no adapter."""
        return all(
            piece.num_tokens == 1
            and len(piece.samples) == 1
            and piece.prompt_logprobs < 0
            and piece.params.adapter is None
            for piece in slices
        )

    def prepare(self, slices: Sequence[SequenceSlice], changes: Changes) -> DecodeRows:
        """Return the rows of a step that this `takes`, for the graphs of all ranks."""
        return self._inputs.prepare(slices, changes)

    def launch(self, rows: DecodeRows) -> Outputs:
        """Run a step; the next one overwrites the result, which only the first rank's is."""
        num_rows, longest = rows.fields.shape[1], longest_context(rows)
        self._inputs.send(rows)
        graphs = next(graphs for graphs in self._sets if longest <= graphs.max_context)
        outputs = graphs.replays[graphs.sizes[bisect_left(graphs.sizes, num_rows)]]()
        return Outputs(*(each[:num_rows] for each in outputs))

    def _record(self, size: int, max_context: int, pool: Any) -> Callable[[], Outputs]:
        compute = partial(self._compute, size, max_context)
        if pool is None:
            return compute
        # Once before recording: kernels are compiled, libraries allocate workspaces, and ranks connect.
        stream = _recording_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        graph = torch.cuda.CUDAGraph()
        # It begins with a wait for the whole device. Other threads, such as an adapter's loader, may make calls that are
        # forbidden to this one while it records.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay

    def _compute(self, num_rows: int, max_context: int) -> Outputs:
        batch, draws, slots = self._inputs.compute(num_rows, max_context, self._last_ids)
        self._kv_cache.prepare(batch)
        hidden = self._model.forward(batch.ids, batch.positions, self._kv_cache)
        logits = self._model.logits(hidden, self._logits[:num_rows])
        # The three launches for top_k and top_p are in every graph, also for rows without them: two graphs of each size
        # would take twice the time to record.
        ids, is_finite = sample(logits, draws)
        self._group.broadcast(ids)
        self._last_ids.index_copy_(0, slots, ids)
        return Outputs(ids, is_finite, logits, slots, batch.ids)
