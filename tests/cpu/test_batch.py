"""A plan becomes tensors: what the model and the attention are told about a step."""

from __future__ import annotations

import torch

from engine.core.config import SchedulerConfig
from engine.core.rows import SequenceSlice
from engine.core.step import RowStart, Sample, StepPlan
from engine.core.types import SamplingParams
from engine.runtime.attention.backend import Batch
from engine.runtime.pool.batch import BatchBuilder
from engine.runtime.pool.row_tables import RowTables
from tests.cpu.model_driver import CPU, settings

PARAMS = SamplingParams(max_tokens=1)


def piece(slot: int, tokens: list[int], start: int, num: int, num_samples: int = 1) -> SequenceSlice:
    samples = tuple(Sample(slot + i, 0) for i in range(num_samples))
    return SequenceSlice(slot, slot, 1, PARAMS, tokens, samples, start, num)


def begins(**tables: tuple[int, ...]) -> StepPlan:
    """A plan in which rows begin with these tables."""
    rows = [RowStart(int(name[1:]), 0, 1, PARAMS, 0, (), (table,)) for name, table in tables.items()]
    return StepPlan(0, rows=tuple(rows))


class Builder:
    """A BatchBuilder that follows plans."""

    def __init__(self, config: SchedulerConfig | None = None) -> None:
        self.tables = RowTables(config or settings())
        self._batches = BatchBuilder(config or settings(), CPU, self.tables)

    def build(self, plan: StepPlan, pieces: list[SequenceSlice], last_ids: torch.Tensor | None = None) -> Batch:
        self.tables.follow(plan)
        return self._batches.build(pieces, torch.zeros(8, dtype=torch.int64) if last_ids is None else last_ids)


ROWS = begins(s0=(7, 3, 9), s3=(5, 8), s1=(2,), s6=(4, 6))
MIXED = [
    piece(0, [10, 11, 12, 13, 14, 15, 16], 2, 4, num_samples=0),  # a chunk; two more ids are known
    piece(3, [20, 21, 22, 23], 4, 1, num_samples=1),  # decodes an id that only the device knows
    piece(1, [30], 0, 1, num_samples=3),  # a prompt that forks
    piece(6, [40, 41], 0, 3, num_samples=1),  # a chunk whose last id only the device knows
]


def test_every_tensor_of_a_mixed_step() -> None:
    last_ids = torch.arange(100, 108)
    batch = Builder().build(ROWS, MIXED, last_ids)
    assert batch.ids.tolist() == [12, 13, 14, 15, 103, 30, 40, 41, 106]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 0, 0, 1, 2]
    assert batch.kv_slots.tolist() == [30, 31, 12, 13, 32, 8, 16, 17, 18]
    assert batch.block_tables.tolist() == [[7, 3], [5, 8], [2, 0], [4, 6]]
    assert batch.query_starts.tolist() == [0, 4, 5, 6, 9]
    assert batch.context_lens.tolist() == [6, 5, 1, 3]
    assert batch.sample_rows.tolist() == [4, 5, 5, 5, 8]
    assert batch.query_lens_host == [4, 1, 1, 3]
    assert batch.context_lens_host == [6, 5, 1, 3]
    assert {t.dtype for t in (batch.ids, batch.positions, batch.kv_slots, batch.sample_rows)} == {torch.int64}
    assert {t.dtype for t in (batch.block_tables, batch.query_starts, batch.context_lens)} == {torch.int32}


def test_a_step_does_not_disturb_the_one_before_it() -> None:
    """With overlap, the first step's tensors may still be read when the second's are written."""
    builder = Builder()
    first = builder.build(ROWS, MIXED)
    before = first.ids.clone(), first.kv_slots.clone(), first.block_tables.clone()
    builder.build(begins(s5=tuple(range(20, 35))), [piece(5, list(range(60)), 0, 60)])
    assert all(torch.equal(a, b) for a, b in zip(before, (first.ids, first.kv_slots, first.block_tables), strict=True))


def test_the_largest_step_fits_its_buffers() -> None:
    config = settings(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)
    pieces = [piece(slot, [1] * 19, 16, 4) for slot in range(4)]
    batch = Builder(config).build(StepPlan(0), pieces, torch.full((4,), 9))
    assert batch.ids.tolist() == [1, 1, 1, 9] * 4


def test_block_tables_are_kept_and_follow_every_change() -> None:
    """A row gains entries, and a copied last block replaces another; a row that begins again forgets what it had."""
    builder = Builder()

    def tables(plan: StepPlan, **contexts: int) -> list[list[int]]:
        pieces = [piece(int(name[1:]), [1] * context, context - 1, 1) for name, context in contexts.items()]
        batch = builder.build(plan, pieces)
        return [
            row[: -(-context // 4)]
            for row, context in zip(batch.block_tables.tolist(), batch.context_lens_host, strict=True)
        ]

    def gains(*entries: tuple[int, int, int]) -> StepPlan:
        return StepPlan(0, entries=tuple((slot, 0, at, block) for slot, at, block in entries))

    assert tables(begins(s0=(7, 3), s2=(5,)), s0=8, s2=3) == [[7, 3], [5]]
    assert tables(gains((0, 2, 9)), s0=9, s2=4) == [[7, 3, 9], [5]]
    assert tables(gains((0, 2, 11), (2, 0, 6), (2, 1, 4)), s2=5, s0=10) == [[6, 4], [7, 3, 11]]
    assert tables(gains((0, 3, 1), (0, 4, 2)), s0=20) == [[7, 3, 11, 1, 2]]
    assert tables(begins(s0=(8, 8, 8)), s0=9) == [[8, 8, 8]]  # another sequence took the slot
    assert tables(StepPlan(0), s2=6) == [[6, 4]]  # after a step without it


def test_entries_before_a_window_are_any_blocks() -> None:
    """Kernels may read them."""
    builder = Builder()
    builder.build(begins(s0=(-1, -1, 4)), [piece(0, [1] * 9, 8, 1)])
    assert builder.tables.rows[0, 0, :3].tolist() == [0, 0, 4]
