"""Prompt attention against the definition in float64: tiles cut along the context, and steps of prompts and decodes mixed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.attention_prefill import WorkTensors, attend_prefills, choose_tile, list_work
from engine.runtime.cuda.attention_tuning import Cut, PromptTile, choose_tuning
from engine.runtime.cuda.store import view_pool
from engine.runtime.kv_layout import AttentionSpec
from tests.kernels.test_triton_attention import CAPABILITY, DEVICE, GRID, HEAD_DIMS, VARIANTS, Case, make_spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities that are meant
UNCUT, FINE, FINEST = Cut(1, 1 << 20, 1 << 20), Cut(64, 32, 64), Cut(1024, 16, 16)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """torch.empty gives NaN, so that whoever reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(case: Case, tile: PromptTile, cut: Cut, num_sms: int = 1) -> int:
    """All slices of a case as prompts; how many parts that took."""
    case.store_all(is_new_too=True)
    batch, out = case.batch(), torch.full_like(case.q, torch.nan)
    lens = batch.query_lens_host, batch.context_lens_host
    work = list_work(range(len(case.steps)), *lens, case.spec, tile, cut, num_sms)
    ints = {"dtype": torch.int32, "device": DEVICE}
    tensors = WorkTensors(torch.tensor(work.pieces, **ints), torch.tensor(work.cut_tiles, **ints), work.num_parts)
    index = batch.query_starts, batch.context_lens, batch.block_tables
    attend_prefills(case.spec, case.q, out, view_pool(case.k_pool, case.v_pool), tensors, *index, tile=tile)
    case.check(out)
    return work.num_parts


@pytest.mark.parametrize(("dim", "group", "block_size", "variant", "dtype", "seed"), GRID[::3])
def test_prompts(dim: int, group: int, block_size: int, variant: dict, dtype: torch.dtype, seed: int) -> None:
    """Chunks at the beginning, behind a cached context, and across a block's end; of several tiles and of part of one."""
    steps = [(0, 2 + 2 * seed % 24), (block_size - 1, 3), (62 + seed, 5)]
    case = Case(make_spec(dim, group, **variant), steps, block_size, dtype, seed)
    tile = choose_tuning(dim, dtype.itemsize, CAPABILITY).long
    assert attend(case, tile, UNCUT) == 0


@pytest.mark.parametrize(("dim", "group", "block_size", "variant", "dtype", "seed"), GRID[1::4])
def test_cut_prompts(dim: int, group: int, block_size: int, variant: dict, dtype: torch.dtype, seed: int) -> None:
    """Few new tokens behind long contexts: tiles of one to many parts, and with a window parts that some rows do not see."""
    steps = [(330 + seed, 2), (110, 4 + seed % 5), (0, 3)]
    case = Case(make_spec(dim, group, **variant), steps, block_size, dtype, seed)
    num_parts = attend(case, choose_tuning(dim, dtype.itemsize, CAPABILITY).short, FINE)
    assert num_parts >= (2 if "window" not in variant else 0)


def test_a_window_that_ends_inside_a_tile_leaves_parts_that_rows_do_not_see() -> None:
    """To the last row, more parts in front are empty than are merged at once."""
    spec = AttentionSpec(1, 1, 64, 0.125, window=8, sinks=torch.ones(1, device=DEVICE))
    case = Case(spec, [(60, 300)], 16, torch.float32, seed=3)
    assert attend(case, PromptTile(512, 16, 4, 1), FINEST) == 20


def test_more_parts_than_are_merged_at_once() -> None:
    case = Case(make_spec(64, 2), [(400, 3)], 16, torch.float32, seed=4)
    assert attend(case, PromptTile(16, 16, 4, 1), FINEST) > 16


def sampled() -> Iterator[object]:
    """Of all head_dims, groups, block sizes, variants and types, as many as take a few seconds."""
    draw = random.Random(20)
    for i in range(10):
        dim, group = HEAD_DIMS[i % 6], (2, 5, 6, 12, 16)[(i + i // 6) % 5]
        block_size = (8, 32, 128, 256)[i % 4]
        variant, dtype = draw.choice(VARIANTS), (torch.bfloat16, torch.float32, torch.float16)[i % 3]
        yield pytest.param(dim, group, block_size, variant, dtype, i, id=f"{dim}-group{group}-block{block_size}")


@pytest.mark.parametrize(("dim", "group", "block_size", "variant", "dtype", "seed"), list(sampled()))
def test_mixed_steps(dim: int, group: int, block_size: int, variant: dict, dtype: torch.dtype, seed: int) -> None:
    """Through the backend, everything cut: a first chunk, decodes, and a few tokens behind contexts."""
    steps = [(0, 5), (150 + seed, 1), (130, 4), (0, 1), (block_size - 1, 2)]
    case = Case(make_spec(dim, group, **variant), steps, block_size, dtype, seed)
    case.store_all(is_new_too=False)
    tuning = choose_tuning(dim, dtype.itemsize, CAPABILITY)._replace(decode_cut=FINE, prompt_cut=FINE)
    backend = TritonPagedAttention(tuning)
    backend.prepare(case.batch())
    case.check(backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cut", [UNCUT, Cut(2, 64, 128)])
def test_work_covers_what_every_row_sees_once_and_begins_with_the_longest(window: int | None, cut: Cut) -> None:
    query_lens, context_lens = [50, 1, 7, 200], [50, 9, 1000, 300]
    spec, tile = make_spec(64, 3, window=window), PromptTile(64, 32, 4, 3)
    work = list_work([0, 2, 3], query_lens, context_lens, spec, tile, cut, num_sms=132)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for s, row, begin, end, _ in work.pieces:
        covered.setdefault((s, row), []).append((begin, end))
    rows = sorted((s, r) for s, row in covered for r in range(row, min(row + 64, query_lens[s] * 3)))
    assert rows == [(s, r) for s in (0, 2, 3) for r in range(query_lens[s] * 3)]
    for (s, row), parts in covered.items():
        parts.sort()
        assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
        assert all(begin % tile.keys == 0 for begin, _ in parts)
        first_at, last_row = context_lens[s] - query_lens[s] + row // 3, min(row + 63, query_lens[s] * 3 - 1)
        assert parts[-1][1] == context_lens[s] - query_lens[s] + last_row // 3 + 1
        seen = max(first_at - window + 1, 0) if window else 0
        assert seen - tile.keys < parts[0][0] <= seen
    lengths = [end - begin for _, _, begin, end, _ in work.pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(part for *_, part in work.pieces if part >= 0) == list(range(work.num_parts))
    assert [first for _, _, first, _ in work.cut_tiles] == sorted(first for _, _, first, _ in work.cut_tiles)
    assert sum(num for *_, num in work.cut_tiles) == work.num_parts
    assert (work.num_parts > 0) == (cut is not UNCUT)


def test_prompts_are_cut_only_where_the_device_would_idle() -> None:
    """On 132 multiprocessors, 32 heads over 8: a turn of a chat is, a long prompt is not."""
    spec, tuning = AttentionSpec(32, 8, 128, 128**-0.5), choose_tuning(128, 2, (9, 0))

    def num_parts(*steps: tuple[int, int]) -> int:
        lens = [num for _, num in steps]
        tile = choose_tile(tuning, max(lens), 4)
        contexts = [start + num for start, num in steps]
        return list_work(range(len(steps)), lens, contexts, spec, tile, tuning.prompt_cut, 132).num_parts

    assert choose_tile(tuning, 16, 4) == tuning.short
    assert choose_tile(tuning, 17, 4) == tuning.long
    assert num_parts((8192, 16)) == 17  # of 512 keys, as few as parts may have, and a last one of 16
    assert num_parts((100, 16)) == 0
    assert num_parts((0, 8192)) == num_parts((0, 1024)) == 0
    assert num_parts(*[(8192, 4)] * 64) == 0
    assert num_parts((0, 8192), (131_072, 16)) == 4  # which would go on long after all others
