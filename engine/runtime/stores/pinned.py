"""Host blocks for a pool on a CUDA device: pinned memory, and a stream of its own, so that steps and copies overlap.

    out    gather on the step's stream (fast, in device memory)  ->  to the host on the side stream
    in     to the device, and scatter, on the side stream; the step that reads, or the next one, waits for that

A step is held up by gathering alone, unless it swaps out more than the staging holds. Everything on the side stream is
in order, so a host block is never read before it is written. Nothing waits for the host. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.core.errors import MemoryBudgetError
from engine.core.step import StepPlan
from engine.runtime.stores.host import HostPool, host_rows, rows_as_bytes, split_rows
from engine.runtime.transfer import to_device

STAGING_BYTES = 64 << 20  # of device memory, for each direction


class PinnedPool(HostPool):
    """Host blocks in pinned memory, copied beside the steps."""

    def __init__(self, pool: Sequence[Tensor], num_blocks: int, device: torch.device) -> None:
        self._pool, self._device = list(pool), device
        self._rows = host_rows(pool, num_blocks)
        _pin(self._rows)
        self._bytes = rows_as_bytes(self._rows)
        self._stream = torch.cuda.Stream(device)
        size = self._rows.shape[1]
        self._num_staged = min(max(STAGING_BYTES // (size * self._rows.itemsize), 1), num_blocks)
        shape = (self._num_staged, size)
        self._leaving = torch.empty(shape, dtype=self._rows.dtype, device=device)
        self._arriving = torch.empty(shape, dtype=self._rows.dtype, device=device)
        self._left = torch.cuda.Event()  # what was in `_leaving` is on the host
        self._arrived: torch.cuda.Event | None = None  # until a step has waited for it

    def begin(self, plan: StepPlan) -> None:
        """Gather and send `swap_out`; have the step wait for earlier arrivals."""
        step = torch.cuda.current_stream(self._device)
        self.settle()
        for pairs in _batches(plan.swap_out, self._num_staged):
            step.wait_event(self._left)
            gather(self._pool, self._to_device([block for block, _ in pairs]), self._leaving[: len(pairs)])
            self._stream.wait_event(step.record_event())
            with torch.cuda.stream(self._stream):
                for first, at, count in runs([host for _, host in pairs]):
                    self._rows[first : first + count].copy_(self._leaving[at : at + count], non_blocking=True)
                self._left.record(self._stream)

    def settle(self) -> None:
        """Have the step's stream wait for blocks that were copied in."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._arrived = None

    def bring_in(self, plan: StepPlan) -> None:
        """Copy in, scatter after the blocks' last readers; the step waits if it reads."""
        if not plan.swap_in:
            return
        step = torch.cuda.current_stream(self._device)
        is_free = step.record_event()
        with torch.cuda.stream(self._stream):
            for pairs in _batches(plan.swap_in, self._num_staged):
                for first, at, count in runs([host for host, _ in pairs]):
                    self._arriving[at : at + count].copy_(self._rows[first : first + count], non_blocking=True)
                self._stream.wait_event(is_free)
                scatter(self._pool, self._to_device([block for _, block in pairs]), self._arriving[: len(pairs)])
            self._arrived = self._stream.record_event()
        blocks = {block for _, block in plan.swap_in}
        read = [*(table for row in plan.rows for table in row.tables), *(move.read for move in plan.states)]
        if not all(map(blocks.isdisjoint, read)):  # no earlier row reads them
            step.wait_event(self._arrived)

    def finish_copies(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._rows.data_ptr())
        del self._pool, self._rows, self._bytes, self._leaving, self._arriving

    def _to_device(self, blocks: list[int]) -> Tensor:
        return to_device(blocks, torch.int64, self._device)


def gather(pool: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
    """Copy blocks [N] of every view of the pool into rows [N, numbers of a block]."""
    for view, part in zip(pool, split_rows(rows, pool), strict=True):
        torch.index_select(view, 0, blocks, out=part)


def scatter(pool: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
    """Copy rows [N, numbers of a block] into blocks [N] of every view of the pool."""
    for view, part in zip(pool, split_rows(rows, pool), strict=True):
        view.index_copy_(0, blocks, part)


def read_blocks(pool: Sequence[Tensor], blocks: Sequence[int], rows: Tensor) -> None:
    """Copy blocks out to rows in main memory, as many at a time as staging holds."""
    for numbers, some in _portions(blocks, rows):
        staged = torch.empty(some.shape, dtype=some.dtype, device=pool[0].device)
        gather(pool, to_device(numbers, torch.int64, staged.device), staged)
        some.copy_(staged)


def write_blocks(pool: Sequence[Tensor], blocks: Sequence[int], rows: Tensor) -> None:
    """Copy rows in main memory into blocks."""
    device = pool[0].device
    for numbers, some in _portions(blocks, rows):
        scatter(pool, to_device(numbers, torch.int64, device), some.to(device))


def _portions(blocks: Sequence[int], rows: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
    size = max(STAGING_BYTES // (rows.shape[1] * rows.itemsize), 1)
    for begin in range(0, len(blocks), size):
        yield blocks[begin : begin + size], rows[begin : begin + size]


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of adjacent blocks as (first block, index in the list, count)."""
    begin = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] != blocks[at - 1] + 1:
            yield blocks[begin], begin, at - begin
            begin = at


def _batches(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[Sequence[tuple[int, int]]]:
    for begin in range(0, len(pairs), size):
        yield pairs[begin : begin + size]


def _pin(rows: Tensor) -> None:
    """Pin memory; torch's pinned memory comes in powers of two, up to twice as much."""
    status = torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
    if status.value != 0:
        raise MemoryBudgetError(
            f"--swap-space needs {rows.nbytes / (1 << 30):.2f} GiB of pinned main memory, which the system does not give "
            f"({status}); lower it."
        )
