"""A plan becomes tensors: what the model and the attention are told about a step."""

from __future__ import annotations

import torch

from engine.core.step import Sample, SequenceSlice, StepPlan
from engine.core.types import SamplingParams
from engine.runtime.pool.batch import BatchBuilder
from tests.cpu.model_driver import CPU, settings

PARAMS = SamplingParams(max_tokens=1)


def piece(slot: int, tokens: list[int], start: int, num: int, table: list[int], num_samples: int = 1) -> SequenceSlice:
    samples = tuple(Sample(slot + i, 0) for i in range(num_samples))
    return SequenceSlice(slot, tokens, 1, start, num, table, samples, PARAMS, -1, slot)


def plan(*pieces: SequenceSlice) -> StepPlan:
    return StepPlan(0, list(pieces), [], sum(p.num_tokens for p in pieces), sum(len(p.samples) for p in pieces))


MIXED = plan(
    piece(0, [10, 11, 12, 13, 14, 15, 16], 2, 4, [7, 3, 9], num_samples=0),  # a chunk; two more ids are known
    piece(3, [20, 21, 22, 23], 4, 1, [5, 8], num_samples=1),  # decodes an id that only the device knows
    piece(1, [30], 0, 1, [2], num_samples=3),  # a prompt that forks
    piece(6, [40, 41], 0, 3, [4, 6], num_samples=1),  # a chunk whose last id only the device knows
)


def test_every_tensor_of_a_mixed_step() -> None:
    last_ids = torch.arange(100, 108)
    batch = BatchBuilder(settings(), CPU).build(MIXED, last_ids)
    assert batch.ids.tolist() == [12, 13, 14, 15, 103, 30, 40, 41, 106]
    assert batch.positions.tolist() == [2, 3, 4, 5, 4, 0, 0, 1, 2]
    assert batch.kv_slots.tolist() == [30, 31, 12, 13, 32, 8, 16, 17, 18]
    assert batch.block_tables.tolist() == [[7, 3], [5, 8], [2, 0], [4, 0]]
    assert batch.query_starts.tolist() == [0, 4, 5, 6, 9]
    assert batch.context_lens.tolist() == [6, 5, 1, 3]
    assert batch.sample_rows.tolist() == [4, 5, 5, 5, 8]
    assert batch.query_lens_host == [4, 1, 1, 3]
    assert batch.context_lens_host == [6, 5, 1, 3]
    assert {t.dtype for t in (batch.ids, batch.positions, batch.kv_slots, batch.sample_rows)} == {torch.int64}
    assert {t.dtype for t in (batch.block_tables, batch.query_starts, batch.context_lens)} == {torch.int32}


def test_a_step_does_not_disturb_the_one_before_it() -> None:
    """With overlap, the first step's tensors may still be read when the second's are written."""
    builder, last_ids = BatchBuilder(settings(), CPU), torch.zeros(8, dtype=torch.int64)
    first = builder.build(MIXED, last_ids)
    before = first.ids.clone(), first.kv_slots.clone(), first.block_tables.clone()
    builder.build(plan(piece(5, list(range(60)), 0, 60, list(range(20, 35)))), last_ids)
    assert all(torch.equal(a, b) for a, b in zip(before, (first.ids, first.kv_slots, first.block_tables), strict=True))


def test_the_largest_step_fits_its_buffers() -> None:
    config = settings(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)
    table = list(range(5))
    pieces = [piece(slot, [1] * 19, 16, 4, table) for slot in range(4)]
    batch = BatchBuilder(config, CPU).build(plan(*pieces), torch.full((4,), 9))
    assert batch.ids.tolist() == [1, 1, 1, 9] * 4


def test_block_tables_are_kept_and_follow_every_change() -> None:
    """A row is told what its table has gained; a copied last block and a slot's next sequence are noticed."""
    builder, last_ids = BatchBuilder(settings(), CPU), torch.zeros(8, dtype=torch.int64)
    first, second = [7, 3], [5]

    def tables(*pieces: SequenceSlice) -> list[list[int]]:
        batch = builder.build(plan(*pieces), last_ids)
        return [
            row[: -(-context // 4)]
            for row, context in zip(batch.block_tables.tolist(), batch.context_lens_host, strict=True)
        ]

    assert tables(piece(0, [1] * 8, 0, 8, first), piece(2, [1] * 3, 0, 3, second)) == [[7, 3], [5]]
    first.append(9)
    assert tables(piece(0, [1] * 9, 8, 1, first), piece(2, [1] * 4, 3, 1, second)) == [[7, 3, 9], [5]]
    first[2], second[0] = 11, 6  # copied before a write
    second.append(4)
    assert tables(piece(2, [1] * 5, 4, 1, second), piece(0, [1] * 10, 9, 1, first)) == [[6, 4], [7, 3, 11]]
    first += [1, 2]
    assert tables(piece(0, [1] * 20, 10, 10, first)) == [[7, 3, 11, 1, 2]]
    assert tables(piece(0, [1] * 9, 8, 1, [8, 8, 8])) == [[8, 8, 8]]  # another sequence took the slot
    assert tables(piece(2, [1] * 6, 5, 1, second)) == [[6, 4]]  # after a step without it
