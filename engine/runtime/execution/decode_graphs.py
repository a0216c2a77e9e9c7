"""Decode steps as CUDA graphs, recorded once for each batch size.

A step of a small model is about three hundred kernels of a few microseconds, which the host cannot launch as fast as
they run. A graph contains them all: the batch from DecodeInputs, the model, the draw, and the drawn ids where the next
step reads them. A batch between two sizes is padded. The splits of attention are recorded too, so steps with a long
context have separate graphs, of fewer sizes.

Of several ranks each captures the same graphs in the same order, with its parts of the model and the collectives. All
launch the same graph in a step, because they get the same rows. The first rank's draw is sent to the others in the
graph; what others draw is overwritten. Engine thread.

The inputs are on the device at fixed addresses. The host sends a few numbers a row in one copy. Block tables are on the
device, a row a slot, and a step sends each table's last block; other entries that the device lacks are written before, and
slots of recurrent state when they change. Ids are read on the device; the host sends one only if the device does not have
it, as after a prompt. Of several ranks the first prepares the rows, and each sends
them to its device. Engine thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.types import Progress, ReportProgress
from engine.runtime.attention.backend import Batch
from engine.runtime.cuda.sampling import sample
from engine.runtime.cuda.sampling_row import Draws
from engine.runtime.kv_layout import StateTensors
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.pool.batch import DecodeRows
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import Changes, RowTables
from engine.runtime.sampling.draw import as_signed
from engine.runtime.sampling.wish import lowest_score
from engine.runtime.transfer import Staging, to_device


class _Field(IntEnum):
    """The numbers sent for each row: int64 or, from TEMPERATURE on, the bits of float64.

    After them come the last block of each group's table, and then where each group stores K and V.
    """

    SLOT = 0
    ID = 1  # -1: the last id drawn for the slot
    POSITION = 2
    BLOCK_AT = 3  # index of the last block in its table
    SEED = 4
    TOP_K = 5
    TEMPERATURE = 6
    LOWEST = 7
    TOP_P = 8


_LARGEST_TOP_K = (1 << 31) - 1  # the kernels' limit, above any vocabulary: keeps all tokens


def longest_context(rows: DecodeRows) -> int:
    """Return the most tokens that a row attends to."""
    return int(rows.fields[_Field.POSITION].max()) + 1


class DecodeInputs:
    """Rows of a step with one token a sequence; padding rows after them have no effect."""

    def __init__(
        self, config: SchedulerConfig, device: torch.device, tables: RowTables, deltas: Tensor | None = None
    ) -> None:
        """`deltas` [max_num_seqs + 1] int64 are by slot what is added to positions behind images; None: nothing."""
        self._deltas = deltas
        num_seqs, self._block_size = config.max_num_seqs, config.block_size
        self._host_tables, self._num_groups = tables, config.num_groups
        num_fields = len(_Field) + 2 * config.num_groups
        shape = (num_fields, num_seqs)
        # Used alternately, so that the next step need not wait for the previous copy.
        self._hosts = cycle([Staging(shape, torch.int64, device) for _ in range(2)])
        # A padding row: no context, nothing stored, a slot without a sequence.
        self._padding = np.zeros((num_fields, 1), np.int64)
        self._padding[_Field.SLOT], self._padding[_Field.POSITION] = num_seqs, -1
        self._padding[len(_Field) + config.num_groups :] = -1
        self._fields = torch.from_numpy(self._padding).repeat(1, num_seqs).to(device)
        table_shape = (config.num_groups, num_seqs + 1, tables.width)
        self._tables = torch.zeros(table_shape, dtype=torch.int32, device=device)
        # The slots of recurrent state that rows read and write; a padding row has none.
        self._states = torch.full((2, num_seqs + 1, config.state_blocks), -1, dtype=torch.int32, device=device)
        self._sent_states = np.full(self._states.shape, -1, np.int32)  # what the device has of them
        self._rows = torch.arange(num_seqs, device=device)
        self._query_starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._kept, self._replays = torch.ones_like(self._query_starts), torch.zeros_like(self._query_starts)
        tables.num_sent[:] = 0

    def prepare(self, slices: Sequence[SequenceSlice], changes: Changes) -> DecodeRows:
        """Return the step's rows in the order of its slices."""
        rows = [_row(piece) for piece in slices]
        fields = np.empty((len(self._padding), len(rows)), np.int64)
        fields[: _Field.BLOCK_AT] = np.array([row[: _Field.BLOCK_AT] for row in rows], np.int64).T
        fields[_Field.SEED : _Field.TEMPERATURE] = np.array([row[3:5] for row in rows], np.int64).T
        fields[_Field.TEMPERATURE : len(_Field)] = np.array([row[5:] for row in rows]).view(np.int64).T
        at, offsets = np.divmod(fields[_Field.POSITION], self._block_size)
        blocks, kv_slots = fields[len(_Field) :].reshape(2, self._num_groups, -1)
        blocks[:] = self._host_tables.rows[: self._num_groups, fields[_Field.SLOT], at]
        kv_slots[:] = blocks * self._block_size + offsets
        fields[_Field.BLOCK_AT] = at
        return DecodeRows(fields, changes)

    def send(self, rows: DecodeRows) -> None:
        """Send a step's rows to the device."""
        host, num_rows = next(self._hosts), rows.fields.shape[1]
        array = host.begin()
        array[:, :num_rows], array[:, num_rows:] = rows.fields, self._padding
        slots, last, num_sent = rows.fields[_Field.SLOT], rows.fields[_Field.BLOCK_AT], self._host_tables.num_sent
        lacking = np.flatnonzero(num_sent[slots] < last)
        if len(lacking):
            missing = np.concatenate([self._missing(slots[row], num_sent[slots[row]], last[row]) for row in lacking])
            places, blocks = to_device(missing, torch.int64, self._fields.device).unbind(1)
            self._tables.view(-1).index_copy_(0, places, blocks.int())
        num_sent[slots] = last + 1
        if self._states.shape[2]:
            self._send_states(slots)
        host.send_to(self._fields)

    def _send_states(self, slots: NDArray[np.int64]) -> None:
        """Send the slots of recurrent state of rows whose slots are others than in their last step here."""
        states = np.stack(self._host_tables.read_states(slots))
        changed = np.flatnonzero((states != self._sent_states[:, slots]).any((0, 2)))
        if len(changed):
            sent = to_device(states[:, changed], torch.int32, self._states.device)
            self._states.index_copy_(1, to_device(slots[changed], torch.int64, sent.device), sent)
            self._sent_states[:, slots[changed]] = states[:, changed]

    def _missing(self, slot: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return a row's entries begin .. end - 1 of all groups: places on the device, and blocks."""
        at = np.arange(begin, end)
        first = (np.arange(self._num_groups)[:, None] * self._tables.shape[1] + slot) * self._tables.shape[2]
        return np.stack(
            ((first + at).ravel(), self._host_tables.rows[: self._num_groups, slot, begin:end].ravel()), axis=1
        )

    def compute(self, num_rows: int, max_context: int, last_ids: Tensor) -> tuple[Batch, Draws, Tensor]:
        """Return the first `num_rows` as a batch, how they are drawn, and their slots [num_rows].

        Device operations only, which a graph can record. Attention is split for contexts of `max_context` tokens;
        longer ones are correct but slower. `last_ids` [slots + 1] int64.
        """
        fields = self._fields[:, :num_rows]
        slots, known, position = fields[_Field.SLOT], fields[_Field.ID], fields[_Field.POSITION]
        places = slots * self._tables.shape[2] + fields[_Field.BLOCK_AT]
        blocks, kv_slots = fields[len(_Field) :].view(2, self._num_groups, num_rows)
        for tables, last in zip(self._tables, blocks, strict=True):
            tables.view(-1).index_copy_(0, places, last.int())
        moved = position.clamp(min=0)
        batch = Batch(
            ids=torch.where(known < 0, last_ids.index_select(0, slots), known),
            positions=moved if self._deltas is None else moved + self._deltas.index_select(0, slots),
            kv_slots=kv_slots[0],
            block_tables=self._tables[0].index_select(0, slots),
            query_starts=self._query_starts[: num_rows + 1],
            context_lens=(position + 1).int(),
            sample_rows=self._rows[:num_rows],
            query_lens_host=[1] * num_rows,
            context_lens_host=[max_context] * num_rows,
            block_tables_host=[()] * num_rows,
        )
        batch.others = [
            batch.of_group(stored, tables.index_select(0, slots), batch.block_tables_host)
            for tables, stored in zip(self._tables[1:], kv_slots[1:], strict=True)
        ]
        if self._states.shape[2]:
            batch.state_tensors = self._state_tensors(slots, batch.query_starts)
        floats = fields[_Field.TEMPERATURE : len(_Field)].view(torch.float64)
        temperature, lowest = floats[:2].float().unbind(0)
        draws = Draws(
            temperature=temperature,
            top_k=fields[_Field.TOP_K].int(),
            top_p=floats[2],
            lowest=lowest,
            seed=fields[_Field.SEED],
            position=position + 1,
        )
        return batch, draws, slots

    def _state_tensors(self, slots: Tensor, starts: Tensor) -> StateTensors:
        """Return the slots of rows with one token each, all of which is kept."""
        read, written = self._states.index_select(1, slots).unbind(0)
        rows, nothing = starts[:-1], self._replays[: len(slots)]
        return StateTensors(
            read=read,
            written=written,
            starts=starts,
            kept=self._kept[: len(slots)],
            replays=nothing,
            rows=rows,
            begins=starts,
            slice_of=rows,
            by_token=rows,
            prompts=nothing[:0],
            chunks=nothing[:0],
        )


def _row(piece: SequenceSlice) -> tuple[float, ...]:
    """Return the numbers of a slice that are not of its tables."""
    tokens, position, params = piece.tokens, piece.start, piece.sampling
    return (
        piece.slot,
        tokens[position] if position < len(tokens) else -1,
        position,
        as_signed(piece.samples[0].seed, 64),
        min(params.top_k, _LARGEST_TOP_K),
        params.temperature,
        lowest_score(params.min_p),
        params.top_p,
    )


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
