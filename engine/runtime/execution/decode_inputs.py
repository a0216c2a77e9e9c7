"""The inputs of decode steps, on the device at fixed addresses, for captured graphs.

The host sends a few numbers a row in one copy. Block tables are on the device, a row a slot, and a step sends each
table's last block; a table that is new, or has grown by more, is written before. Ids are read on the device; the host
sends one only if the device does not have it, as after a prompt. Of several ranks the first prepares the rows, and
each sends them to its device. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import cycle
from operator import is_

import numpy as np
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.step import SequenceSlice, StepPlan
from engine.runtime.attention.base import Batch
from engine.runtime.cuda.sampling_row import Draws
from engine.runtime.pool.batch import DecodeRows
from engine.runtime.sampling.draw import lowest_score
from engine.runtime.sampling.noise import as_signed
from engine.runtime.transfer import Staging, to_device


class _Field(IntEnum):
    """The numbers sent for each row: int64 or, from TEMPERATURE on, the bits of float64.

    After them come KV_SLOT and BLOCK of each further group of layers.
    """

    SLOT = 0
    ID = 1  # -1: the last id drawn for the slot
    POSITION = 2
    KV_SLOT = 3
    BLOCK_AT = 4  # index of the last block in its table
    BLOCK = 5
    SEED = 6
    TOP_K = 7
    TEMPERATURE = 8
    LOWEST = 9
    TOP_P = 10


_LARGEST_TOP_K = (1 << 31) - 1  # the kernels' limit, above any vocabulary: keeps all tokens


def longest_context(rows: DecodeRows) -> int:
    """Return the most tokens that a row attends to."""
    return int(rows.fields[_Field.POSITION].max()) + 1


class DecodeInputs:
    """Rows of a step with one token a sequence; padding rows after them have no effect."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        num_seqs, self._block_size = config.max_num_seqs, config.block_size
        self._width = -(-config.max_model_len // config.block_size)
        self._num_groups = config.num_groups
        num_fields = len(_Field) + 2 * len(config.windows)
        shape = (num_fields, num_seqs)
        # Used alternately, so that the next step need not wait for the previous copy.
        self._hosts = cycle([Staging(shape, torch.int64, device) for _ in range(2)])
        # A padding row: no context, nothing stored, a slot without a sequence.
        self._padding = np.zeros((num_fields, 1), np.int64)
        self._padding[_Field.SLOT], self._padding[_Field.POSITION], self._padding[_Field.KV_SLOT] = num_seqs, -1, -1
        self._padding[len(_Field) :: 2] = -1
        self._fields = torch.from_numpy(self._padding).repeat(1, num_seqs).to(device)
        tables = (config.num_groups, num_seqs + 1, self._width)
        self._tables = torch.zeros(tables, dtype=torch.int32, device=device)
        self._rows = torch.arange(num_seqs, device=device)
        self._query_starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        self._known: list[Sequence[Sequence[int]]] = [()] * num_seqs  # the lists that each row of the tables copies ...
        self._lengths = [0] * num_seqs  # ... and the number of its entries in the row

    def prepare(self, plan: StepPlan) -> DecodeRows:
        """Return the step's rows in the plan's order, and count their tables as sent."""
        grown = [entry for piece in plan.slices for entry in self._grow(piece)]
        rows = [self._row(piece) for piece in plan.slices]
        fields = np.empty((len(self._padding), len(rows)), np.int64)
        fields[: _Field.TEMPERATURE] = np.array([row[: _Field.TEMPERATURE] for row in rows], np.int64).T
        fields[_Field.TEMPERATURE : len(_Field)] = (
            np.array([row[_Field.TEMPERATURE :] for row in rows]).view(np.int64).T
        )
        if self._num_groups > 1:
            fields[len(_Field) :] = np.array([self._window_row(piece) for piece in plan.slices], np.int64).T
        return DecodeRows(fields, np.array(grown, np.int64))

    def send(self, rows: DecodeRows) -> None:
        """Send a step's rows to the device."""
        host, num_rows = next(self._hosts), rows.fields.shape[1]
        array = host.begin()
        array[:, :num_rows], array[:, num_rows:] = rows.fields, self._padding
        if len(rows.grown):
            try:
                places, blocks = to_device(rows.grown, torch.int64, self._fields.device).unbind(1)
                self._tables.view(-1).index_copy_(0, places, blocks.int())
            except torch.OutOfMemoryError:  # the step is planned again, with the same lists
                self._known = [()] * len(self._known)
                raise
        host.send_to(self._fields)

    def compute(self, num_rows: int, max_context: int, last_ids: Tensor) -> tuple[Batch, Draws, Tensor]:
        """Return the first `num_rows` as a batch, how they are drawn, and their slots [num_rows].

        Device operations only, which a graph can record. Attention is split for contexts of `max_context` tokens;
        longer ones are correct but slower. `last_ids` [slots + 1] int64.
        """
        fields = self._fields[:, :num_rows]
        slots, known, position = fields[_Field.SLOT], fields[_Field.ID], fields[_Field.POSITION]
        places = slots * self._width + fields[_Field.BLOCK_AT]
        self._tables[0].view(-1).index_copy_(0, places, fields[_Field.BLOCK].int())
        batch = Batch(
            ids=torch.where(known < 0, last_ids.index_select(0, slots), known),
            positions=position.clamp(min=0),
            kv_slots=fields[_Field.KV_SLOT],
            block_tables=self._tables[0].index_select(0, slots),
            query_starts=self._query_starts[: num_rows + 1],
            context_lens=(position + 1).int(),
            sample_rows=self._rows[:num_rows],
            query_lens_host=[1] * num_rows,
            context_lens_host=[max_context] * num_rows,
            block_tables_host=[()] * num_rows,
        )
        for tables, window in zip(self._tables[1:], fields[len(_Field) :].view(-1, 2, num_rows), strict=True):
            tables.view(-1).index_copy_(0, places, window[1].int())
            other = batch.of_group(window[0], tables.index_select(0, slots), batch.block_tables_host)
            batch.others = [*batch.others, other]
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

    def _row(self, piece: SequenceSlice) -> tuple[float, ...]:
        """Return the numbers of a slice, and count its table as sent."""
        slot, tokens, position, table, params = piece.slot, piece.tokens, piece.start, piece.block_table, piece.params
        at, offset = divmod(position, self._block_size)
        self._known[slot], self._lengths[slot] = (table, *piece.window_tables), at + 1
        return (
            slot,
            tokens[position] if position < len(tokens) else -1,
            position,
            table[at] * self._block_size + offset,
            at,
            table[at],
            as_signed(piece.samples[0].seed, 64),
            min(params.top_k, _LARGEST_TOP_K),
            params.temperature,
            lowest_score(params.min_p),
            params.top_p,
        )

    def _window_row(self, piece: SequenceSlice) -> list[int]:
        """Return the numbers of a slice in the further groups."""
        at, offset = divmod(piece.start, self._block_size)
        return [
            number for table in piece.window_tables for number in (table[at] * self._block_size + offset, table[at])
        ]

    def _grow(self, piece: SequenceSlice) -> Iterator[tuple[int, int]]:
        """Return the table entries to write before the step: all new ones except a table's last.

        The last known entry is written again, because a copy-on-write may have replaced it in a step without a graph.
        """
        slot, table, last = piece.slot, piece.block_table, piece.start // self._block_size
        tables, known = (table, *piece.window_tables), self._known[slot]
        is_known = len(known) == len(tables) and all(map(is_, known, tables))
        begin = self._lengths[slot] - 1 if is_known else 0
        for group, each in enumerate(tables):
            first = (group * self._tables.shape[1] + slot) * self._width
            for at in range(begin, last):
                yield first + at, max(each[at], 0)  # in place of a block that a window has passed is any other
