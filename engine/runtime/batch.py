"""A StepPlan becomes tensors: the only place that makes a step's index tensors.

One pass writes everything into two host buffers (pinned for a GPU), which travel in one copy each. The buffers come in
pairs, used in turns, since with overlap a step's copy may still be under way while the next step is written. An id that
is not known yet, drawn by the step before, is fetched on the device from `last_ids[seat]`. Engine thread.
"""

from __future__ import annotations

from itertools import cycle
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.plan import StepPlan
from engine.runtime.attention.base import Batch


class _Packed:
    """A host buffer that pieces are appended to and that goes to the device as one."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._device = device
        self._used = 0

    def reset(self) -> None:
        self._used = 0

    def take(self, num: int) -> tuple[np.ndarray, slice]:
        """Room for `num` numbers, and where they will be in the device's copy."""
        place = slice(self._used, self._used + num)
        self._used += num
        return self._array[place], place

    def to_device(self) -> Tensor:
        return self._host[: self._used].to(self._device, non_blocking=True)


class _Buffers(NamedTuple):
    longs: _Packed
    ints: _Packed


class BatchBuilder:
    """Makes Batches for one pool of blocks, on one device."""

    def __init__(self, config: SchedulerConfig, device: torch.device) -> None:
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        widest = -(-config.max_model_len // config.block_size)
        self._block_size = config.block_size
        # ids, positions, slots; sampled rows; rows and seats of ids to carry over
        pair = [
            _Buffers(
                _Packed(3 * tokens + 3 * seqs, torch.int64, device),
                _Packed(2 * seqs + 1 + seqs * widest, torch.int32, device),
            )
            for _ in range(2)
        ]
        self._turns = cycle(pair)

    def build(self, plan: StepPlan, last_ids: Tensor) -> Batch:
        """Tensors for one step. `last_ids` [max_num_seqs] int64 holds each seat's last drawn id, on the device."""
        longs, ints = next(self._turns)
        longs.reset()
        ints.reset()
        slices = plan.slices
        lens = np.array([piece.num_tokens for piece in slices])
        starts = np.array([piece.start for piece in slices])
        contexts = starts + lens
        ends = np.cumsum(lens)
        begins = ends - lens

        ids_np, ids_at = longs.take(plan.num_tokens)
        positions_np, positions_at = longs.take(plan.num_tokens)
        slots_np, slots_at = longs.take(plan.num_tokens)
        rows_np, rows_at = longs.take(plan.num_samples)
        carried = _fill_ids(plan, ids_np, ends)
        carry_np, carry_at = longs.take(2 * len(carried))
        carry_np[:] = [row for row, _ in carried] + [seat for _, seat in carried]

        num_blocks = -(-contexts // self._block_size)
        tables_np, tables_at = ints.take(len(slices) * int(num_blocks.max()))
        tables_np = tables_np.reshape(len(slices), -1)
        tables_np[:] = 0
        for row, (piece, num) in enumerate(zip(slices, num_blocks.tolist(), strict=True)):
            tables_np[row, :num] = piece.block_table[:num]
        begins_np, begins_at = ints.take(len(slices) + 1)
        begins_np[0], begins_np[1:] = 0, ends
        contexts_np, contexts_at = ints.take(len(slices))
        contexts_np[:] = contexts

        owners = np.repeat(np.arange(len(slices)), lens)
        positions_np[:] = np.arange(plan.num_tokens) + (starts - begins)[owners]
        blocks = tables_np[owners, positions_np // self._block_size]
        slots_np[:] = blocks.astype(np.int64) * self._block_size + positions_np % self._block_size
        rows_np[:] = np.repeat(ends - 1, [len(piece.samples) for piece in slices])

        on_device, small = longs.to_device(), ints.to_device()
        ids = on_device[ids_at]
        if carried:
            rows, seats = on_device[carry_at].view(2, -1).unbind(0)
            ids.index_copy_(0, rows, last_ids.index_select(0, seats))
        return Batch(
            ids=ids,
            positions=on_device[positions_at],
            slots=on_device[slots_at],
            block_tables=small[tables_at].view(len(slices), -1),
            query_starts=small[begins_at],
            context_lens=small[contexts_at],
            sample_rows=on_device[rows_at],
            query_lens_host=lens.tolist(),
            context_lens_host=contexts.tolist(),
            block_tables_host=[piece.block_table for piece in slices],
        )


def _fill_ids(plan: StepPlan, ids: np.ndarray, ends: np.ndarray) -> list[tuple[int, int]]:
    """Write the known ids; returns (row, seat) of those that the step before has drawn."""
    flat: list[int] = []
    carried = []
    for piece, end in zip(plan.slices, ends.tolist(), strict=True):
        stop = piece.start + piece.num_tokens
        flat += piece.tokens[piece.start : stop]
        if len(piece.tokens) < stop:
            flat.append(0)
            carried.append((end - 1, piece.seat))
    ids[:] = flat
    return carried
