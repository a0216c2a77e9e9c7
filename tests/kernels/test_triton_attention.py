"""The Triton attention backend against the definition in float64: fresh random inputs, and NaN wherever nothing is stored."""

from __future__ import annotations

import mmap
import queue
import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.types import Request, SamplingParams, StepEvents
from engine.loop import Engine
from engine.runtime.attention import table
from engine.runtime.attention.backend import Batch, Rotation
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.attention_decode import MAX_SPLITS, Splits, attend_decodes, choose_splits
from engine.runtime.cuda.attention_tuning import Cut, DecodeTile, choose_tuning
from engine.runtime.cuda.store import store_kv, view_pool
from engine.runtime.kv_layout import PEAKS, SMALLEST_PEAK, AttentionSpec, from_pool, movable, pool_shape, to_pool
from engine.runtime.pool import pool_size
from engine.runtime.pool.groups import one_group
from tests.cpu.test_models_families import CASES, write_tiny
from tests.gpu.test_engine_cuda import build
from tests.patience import PATIENCE_S
from tests.reference_attention import ReferenceAttention, dense_attention, reference_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAPABILITY = torch.cuda.get_device_capability() if DEVICE.type == "cuda" else (0, 0)
# The interpreter computes with NumPy, which speaks up where infinities and NaN are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NEEDS_FP8 = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9),
    reason="this card has no fp8: it needs compute capability 8.9",
)
HALVES = (torch.bfloat16, torch.float16)
HEAD_DIMS, GROUPS, BLOCK_SIZES = (64, 80, 96, 128, 256, 512), (1, 3, 4, 7, 8), (8, 16, 64)
NARROW = [pytest.param(torch.int8, id="int8"), pytest.param(torch.float8_e4m3fn, id="fp8", marks=NEEDS_FP8)]
# Of a float32 result, in units of its last place: products on a device are three of TF32, which keep 21 bits.
FLOAT32_ULPS = 64 if DEVICE.type == "cpu" else 1024


@dataclass
class Case:
    """Sequences in a pool of scattered blocks, the last tokens of each being new; everything random from one seed."""

    spec: AttentionSpec
    steps: list[tuple[int, int]]  # (tokens already computed, tokens of this step)
    block_size: int
    dtype: torch.dtype
    seed: int
    pool_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        spec, generator = self.spec, torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, self.dtype)

        contexts = [start + num for start, num in self.steps]
        self.q = draw(sum(num for _, num in self.steps), spec.num_heads, spec.head_dim)
        self.keys, self.values = (
            [draw(context, spec.num_kv_heads, spec.head_dim) for context in contexts] for _ in range(2)
        )
        widths = [-(-context // self.block_size) for context in contexts]
        num_blocks = sum(widths) + 3
        blocks = random.Random(self.seed).sample(range(num_blocks), sum(widths))
        self.tables = [[blocks.pop() for _ in range(width)] for width in widths]
        shape = pool_shape(spec, num_blocks, self.block_size)
        self.k_pool, self.v_pool = (empty_pool(shape, self.pool_dtype or self.dtype) for _ in range(2))

    def slots(self, s: int, first: int) -> list[int]:
        """Of the positions of sequence `s` from `first` on."""
        start, num = self.steps[s]
        size = self.block_size
        return [self.tables[s][p // size] * size + p % size for p in range(first, start + num)]

    def store_all(self, *, is_new_too: bool) -> None:
        """Histories into the pool, and with `is_new_too` this step's tokens as well."""
        for s, (start, num) in enumerate(self.steps):
            stop = start + num if is_new_too else start
            if stop:
                slots = torch.tensor(self.slots(s, 0)[:stop], device=DEVICE)
                store_plainly(self.k_pool, slots, self.keys[s][:stop])
                store_plainly(self.v_pool, slots, self.values[s][:stop])

    def new(self) -> tuple[Tensor, Tensor]:
        """This step's keys and values."""
        k, v = (
            torch.cat([x[start:] for x, (start, _) in zip(xs, self.steps, strict=True)])
            for xs in (self.keys, self.values)
        )
        return k, v

    def batch(self) -> Batch:
        lens = [num for _, num in self.steps]
        contexts = [start + num for start, num in self.steps]
        widest = max(map(len, self.tables))
        # What stands behind a table's end has no meaning: a block that is not there would be found out.
        tables = [blocks + [1 << 30] * (widest - len(blocks)) for blocks in self.tables]
        slots = [slot for s, (start, _) in enumerate(self.steps) for slot in self.slots(s, start)]
        ints = {"dtype": torch.int32, "device": DEVICE}
        return Batch(
            ids=torch.zeros(sum(lens), dtype=torch.int64, device=DEVICE),
            positions=torch.cat([torch.arange(start, start + num) for start, num in self.steps]).to(DEVICE),
            kv_slots=torch.tensor(slots, device=DEVICE),
            block_tables=torch.tensor(tables, **ints),
            query_starts=torch.tensor([sum(lens[:s]) for s in range(len(lens) + 1)], **ints),
            context_lens=torch.tensor(contexts, **ints),
            sample_rows=torch.tensor([], dtype=torch.int64, device=DEVICE),
            query_lens_host=lens,
            context_lens_host=contexts,
            block_tables_host=self.tables,
        )

    def check(self, out: Tensor) -> None:
        """Within a few roundings of the definition in float64, taken over what the pool holds."""
        assert out.dtype == self.dtype
        row = 0
        for s, (start, num) in enumerate(self.steps):
            keys, values = (
                from_pool(to_pool(x, self.pool_dtype or self.dtype), torch.float32)
                for x in (self.keys[s], self.values[s])
            )
            queries = self.q[row : row + num].double()
            exact = dense_attention(self.spec, queries, keys.double(), values.double(), start)
            # Weights are rounded once and so is the result, each by half a unit at most.
            ulps = 1.5 if self.dtype in HALVES else FLOAT32_ULPS
            bound = ulps * torch.finfo(self.dtype).eps * values.double().abs().max()
            error = (out[row : row + num].double() - exact).abs().max()
            assert error <= bound, f"slice {s}: {error:.2e} > {bound:.2e}"  # NaN is not at most anything
            row += num


def store_plainly(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """As store_kv, which has tests of its own and takes the interpreter milliseconds a row."""
    size, dim = pool.shape[2], rows.shape[2]
    block, place = slots // size, slots % size
    runs, stored = movable(pool).flatten(2), movable(to_pool(rows, pool.dtype))  # runs: of one head in one block
    runs[..., : size * dim].unflatten(2, (size, dim))[block, :, place] = stored[..., :dim]
    runs[..., size * dim :].unflatten(2, (size, stored.shape[2] - dim))[block, :, place] = stored[..., dim:]


def empty_pool(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN all over; bytes of 255 are NaN as the float32 scales of a narrow pool, and as e4m3 too."""
    if dtype in PEAKS:
        return torch.full((*shape[:-1], shape[-1] + 4), -1, dtype=torch.int8, device=DEVICE).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def make_spec(head_dim: int, group: int, **changes: object) -> AttentionSpec:
    kv_heads = 2 if group in (1, 3) else 1
    sinks = changes.pop("has_sinks", False)
    return AttentionSpec(
        kv_heads * group,
        kv_heads,
        head_dim,
        head_dim**-0.5,
        sinks=torch.linspace(-2.0, 3.0, kv_heads * group, device=DEVICE) if sinks else None,
        **changes,  # type: ignore[arg-type]  # mixed value types
    )


VARIANTS: list[dict[str, object]] = [
    {},
    {"window": 24},
    {"softcap": 1.5},
    {"has_sinks": True},
    {"window": 1},
    {"window": 65, "softcap": 3.0, "has_sinks": True},
]
# Every head_dim with every group; block sizes, variants and types go round beside them.
GRID = [
    pytest.param(
        dim,
        group,
        BLOCK_SIZES[i % 3],
        VARIANTS[(i + i // 6) % 6],
        (torch.float32, torch.bfloat16, torch.float16)[(i + i // 3) % 3],
        i,
        id=f"{dim}-group{group}-block{BLOCK_SIZES[i % 3]}-{(i + i // 6) % 6}",
    )
    for i, (dim, group) in enumerate((dim, group) for group in GROUPS for dim in HEAD_DIMS)
]


@pytest.mark.parametrize(("dim", "group", "block_size", "variant", "dtype", "seed"), GRID)
def test_decodes(dim: int, group: int, block_size: int, variant: dict, dtype: torch.dtype, seed: int) -> None:
    """Ragged contexts in one to several splits, some with nothing for the later ones, and a slice that stands for none."""
    contexts = [(1, block_size)[seed % 2], 65 + seed, 100 + seed]
    case = Case(make_spec(dim, group, **variant), [(n - 1, 1) for n in contexts], block_size, dtype, seed)
    case.store_all(is_new_too=True)
    batch, out = case.batch(), torch.full_like(case.q, torch.nan)
    pad = {"dtype": torch.int32, "device": DEVICE}
    tensors = {
        "slices": torch.arange(4, **pad),
        "query_starts": torch.arange(5, **pad),
        "context_lens": torch.cat([batch.context_lens, torch.zeros(1, **pad)]),
        "block_tables": torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:1], 1 << 30)]),
    }
    q, out = (torch.cat([x, x[:1]]) for x in (case.q, out))
    splits = (Splits(1, 1), Splits(3, 32), Splits(2, 64))[(seed + seed // 5) % 3]
    tile = choose_tuning(dim, dtype.itemsize, CAPABILITY).decode
    pool = view_pool(case.k_pool, case.v_pool)
    attend_decodes(case.spec, q, out, pool, **tensors, num=4, splits=splits, tile=tile)
    case.check(out[:3])
    assert (out[3] == 0).all()


def test_more_splits_than_are_merged_at_once() -> None:
    case = Case(make_spec(160, 3, has_sinks=True), [(300, 1), (17, 1)], 16, torch.float32, seed=5)
    case.store_all(is_new_too=True)
    batch, out = case.batch(), torch.full_like(case.q, torch.nan)
    index = batch.query_starts, batch.query_starts, batch.context_lens, batch.block_tables
    pool = view_pool(case.k_pool, case.v_pool)
    tile = choose_tuning(160, 4, CAPABILITY).decode
    splits = Splits(20, 1)  # of 16 keys: 19 and 2 are live
    attend_decodes(case.spec, case.q, out, pool, *index, num=2, splits=splits, tile=tile)
    case.check(out)


@pytest.mark.parametrize("pool_dtype", NARROW)
def test_values_that_are_all_zero(pool_dtype: torch.dtype) -> None:
    """The inverse of their scale, added up over a context, is more than float32 holds."""
    case = Case(make_spec(64, 3), [(299, 1)], 16, torch.bfloat16, seed=5, pool_dtype=pool_dtype)
    case.values = [torch.zeros_like(x) for x in case.values]
    case.store_all(is_new_too=True)
    batch, out = case.batch(), torch.full_like(case.q, torch.nan)
    index = batch.query_starts, batch.query_starts, batch.context_lens, batch.block_tables
    pool = view_pool(case.k_pool, case.v_pool)
    attend_decodes(case.spec, case.q, out, pool, *index, num=1, splits=Splits(2, 64), tile=DecodeTile(64, 4, 3))
    assert (out == 0).all()


def test_splits_fill_the_device_and_bound_the_longest() -> None:
    cut = Cut(programs_per_sm=2, min_keys=128, max_keys=8192)
    assert choose_splits(8, 100, 132, cut).num == 1  # too short to be cut
    assert choose_splits(8, 8192, 132, cut) == Splits(33, 128)
    assert choose_splits(2048, 8192, 132, cut).num == 1  # as many programs as the device wants
    assert choose_splits(2048, 32_768, 132, cut) == Splits(4, 8192)
    assert choose_splits(1, 1 << 20, 132, cut).num == MAX_SPLITS
    assert choose_splits(64, 4097, 132, cut) == choose_splits(64, 8192, 132, cut)


MIXED = [(0, 9), (20, 1), (33, 5), (64, 1), (0, 1), (15, 1)]  # the scheduler's order, not ours


@pytest.mark.parametrize("pool_dtype", [pytest.param(None, id="same"), *NARROW])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("steps", [MIXED, MIXED[1:2] + MIXED[3:]], ids=["mixed", "decodes"])
def test_a_step_through_the_backend(steps: list, block_size: int, pool_dtype: torch.dtype | None) -> None:
    """Stored and attended, from rows of one merged projection, as models hand them over; twice, as two layers would."""
    step_through(make_spec(64, 3, window=30, has_sinks=True), steps, block_size, torch.bfloat16, pool_dtype)


@pytest.mark.parametrize("pool_dtype", NARROW)
@pytest.mark.parametrize(
    ("dim", "variant", "dtype"),
    [(80, {"softcap": 3.0}, torch.float32), (128, {}, torch.bfloat16), (64, {"window": 20}, torch.float16)],
)
def test_a_narrow_pool_of_any_model(dim: int, variant: dict, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Keys beyond what e4m3 reaches, values below what it tells apart, for a model of any type."""
    step_through(make_spec(dim, 3, **variant), MIXED, 16, dtype, pool_dtype, key_size=700.0, value_size=1e-4)


@pytest.mark.parametrize("pool_dtype", NARROW)
@pytest.mark.parametrize(("key_size", "value_size"), [(1e-7, 1e6), (1e12, 1e-12)])
def test_a_narrow_pool_holds_numbers_that_float16_cannot(
    key_size: float, value_size: float, pool_dtype: torch.dtype
) -> None:
    """Products are of float16: queries, the inverse of keys here, and values lie beyond its range; some values are 0."""
    spec = make_spec(64, 4)
    step_through(spec, MIXED[1:5], 16, torch.bfloat16, pool_dtype, key_size, value_size, has_empty_values=True)


def step_through(
    spec: AttentionSpec,
    steps: list,
    block_size: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None,
    key_size: float = 1.0,
    value_size: float = 1.0,
    *,
    has_empty_values: bool = False,
) -> None:
    case = Case(spec, steps, block_size, dtype, seed=block_size, pool_dtype=pool_dtype)
    case.q, case.keys = case.q / key_size, [x * key_size for x in case.keys]
    case.values = [x * value_size for x in case.values]
    if has_empty_values:
        for values in case.values:
            values[::2] = 0
    case.store_all(is_new_too=False)
    merged = torch.cat([case.q, *case.new()], dim=1)
    q, k, v = merged.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    backend = TritonPagedAttention()
    backend.prepare(case.batch())
    for _ in range(2):
        case.check(backend.attend(spec, q, k, v, case.k_pool, case.v_pool))


@pytest.mark.parametrize("pool_dtype", [pytest.param(None, id="same"), *NARROW])
def test_blocks_may_be_any_number_apart(pool_dtype: torch.dtype | None) -> None:
    """As where layers of other sizes share them: between two blocks of a layer is what others keep."""
    case = Case(make_spec(64, 3, window=30), MIXED, 16, torch.bfloat16, seed=8, pool_dtype=pool_dtype)
    whole = torch.stack([movable(pool) for pool in (case.k_pool, case.v_pool, case.k_pool)], 1)
    before = whole.clone()
    case.k_pool, case.v_pool, _ = whole.view(case.k_pool.dtype).unbind(1)
    case.store_all(is_new_too=False)
    backend = TritonPagedAttention()
    backend.prepare(case.batch())
    case.check(backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool))
    assert whole[:, 2].isnan().all() if pool_dtype is None else torch.equal(whole[:, 2], before[:, 2])


def far_apart(pool: Tensor) -> Tensor:
    """The same blocks 2^29 numbers apart, so that some begin where 32 bits do not reach; what lies between has no memory."""
    num = len(pool) << 29
    if DEVICE.type == "cuda":
        whole = torch.empty_strided((num,), (1,), dtype=pool.dtype, device=DEVICE)
    else:
        with TemporaryFile() as file:
            file.truncate(num * pool.itemsize)
            whole = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8).view(pool.dtype)
    far = whole.as_strided(pool.shape, (1 << 29, *pool.stride()[1:]))
    movable(far).copy_(movable(pool))
    return far


@pytest.mark.parametrize("pool_dtype", [pytest.param(None, id="same"), *NARROW])
def test_blocks_may_lie_beyond_what_32_bits_count(pool_dtype: torch.dtype | None) -> None:
    """As in any pool of more than four gigabytes; in stores, decodes and prompts alike."""
    case = Case(make_spec(64, 4), [(20, 1), (7, 30), (33, 1)], 16, torch.bfloat16, seed=9, pool_dtype=pool_dtype)
    assert max(map(max, case.tables)) > 4
    case.k_pool, case.v_pool = far_apart(case.k_pool), far_apart(case.v_pool)
    case.store_all(is_new_too=False)
    backend = TritonPagedAttention()
    backend.prepare(case.batch())
    case.check(backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool))
    projected = torch.cat([case.q, *case.new()], 1)
    case.check(backend.rotate_and_attend(case.spec, projected, Rotation(None, 0.0, None), case.k_pool, case.v_pool))


def test_it_errs_no_more_than_the_reference_backend_does() -> None:
    """Whose only error is the rounding of its result to the queries' type; ours has the weights' as well."""
    case = Case(make_spec(128, 4), MIXED, 16, torch.bfloat16, seed=11)
    case.store_all(is_new_too=False)
    backend, reference = TritonPagedAttention(), ReferenceAttention()
    backend.prepare(case.batch())
    out = backend.attend(case.spec, case.q, *case.new(), case.k_pool, case.v_pool)
    reference.prepare(case.batch())
    pools = [case.k_pool.clone(), case.v_pool.clone()]
    expected = reference.attend(case.spec, case.q, *case.new(), *pools)
    wide = Case(make_spec(128, 4), MIXED, 16, torch.float64, seed=11)
    wide.q, wide.keys, wide.values = (
        case.q.double(), [x.double() for x in case.keys], [x.double() for x in case.values]
    )  # fmt: skip
    reference.prepare(wide.batch())
    pools = [pool.double() for pool in pools]
    exact = reference.attend(wide.spec, wide.q, *wide.new(), *pools)
    ours, theirs = ((x.double() - exact).abs().max() for x in (out, expected))
    assert 0 < ours <= 3 * theirs


@pytest.mark.parametrize("pool_dtype", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_narrow_pool_are_within_half_a_step(dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    spec = make_spec(80, 1)
    rows = (torch.randn(50, 2, 80) * 10.0 ** torch.randint(-4, 4, (50, 2, 1))).to(DEVICE, dtype)
    rows[7, 1] = 0
    rows[8] = torch.where(rows[6] > 0, 2e-37, -1e-37)  # the interpreter reads subnormal bfloat16 wrongly
    rows[9, 0, 3], rows[11, 0, 70] = torch.nan, torch.inf
    pools = [empty_pool(pool_shape(spec, 5, 16), pool_dtype) for _ in range(2)]
    store_kv(rows, rows.flip(0), view_pool(*pools), torch.arange(50, device=DEVICE))
    for pool, expected in ((pools[0], rows), (pools[1], rows.flip(0))):
        runs = pool.flatten(2)  # of one head in one block: the numbers of all rows, then their scales
        numbers = runs[..., : 16 * 80].unflatten(2, (16, 80)).float()
        scales = runs[..., 16 * 80 :].contiguous().view(torch.float32)
        read = (numbers * scales[..., None]).transpose(1, 2).flatten(0, 1)[:50]
        whole = expected.float().isfinite().all(-1)
        steps = expected.float().abs().amax(-1, keepdim=True).clamp(min=SMALLEST_PEAK) / PEAKS[pool_dtype]
        if pool_dtype == torch.float8_e4m3fn:  # three digits behind the point, but for what is small
            steps = (expected.float().abs() / 8).maximum(steps * 2.0**-9)
        assert ((read - expected.float()).abs() <= steps * 0.5001)[whole].all()
        assert read[~whole].isnan().all()
        assert scales.transpose(1, 2).flatten(0, 1)[50:].isnan().all()  # untouched


def test_a_slot_below_zero_stores_nothing() -> None:
    spec = make_spec(64, 1)
    k_pool, v_pool = (empty_pool(pool_shape(spec, 2, 8), torch.float32) for _ in range(2))
    k, v = torch.randn(2, 3, 2, 64, device=DEVICE).unbind(0)
    store_kv(k, v, view_pool(k_pool, v_pool), torch.tensor([-1, 11, -1], device=DEVICE))
    for pool, rows in ((k_pool, k), (v_pool, v)):
        assert torch.equal(pool[1, :, 3], rows[1])
        assert pool.isnan().sum() == pool.numel() - rows[1].numel()


class Replayed:
    """A step of four prepared once, as for a captured graph, and what its tensors are made to say afterwards."""

    def __init__(self) -> None:
        spec = make_spec(64, 4)
        prepared = Case(spec, [(3, 1), (9, 1), (0, 1), (30, 1)], 16, torch.float32, seed=1)
        self.case = Case(spec, [(150, 1), (2, 1), (40, 1)], 16, torch.float32, seed=2)
        self.case.store_all(is_new_too=False)
        self.batch = prepared.batch()
        wide = torch.zeros((4, 10), dtype=torch.int32, device=DEVICE)
        self.batch.block_tables = wide
        for s, blocks in enumerate(prepared.tables):
            wide[s, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.backend, self.pools = TritonPagedAttention(), (prepared.k_pool, prepared.v_pool)
        self.backend.prepare(self.batch)
        self.q, self.k, self.v = prepared.q, *prepared.new()

    def attend(self) -> Tensor:
        return self.backend.attend(self.case.spec, self.q, self.k, self.v, *self.pools)

    def refill(self) -> None:
        """Three slices of other lengths, and one that stands for nothing."""
        batch = self.case.batch()
        self.batch.kv_slots.copy_(torch.cat([batch.kv_slots, torch.full_like(batch.kv_slots[:1], -1)]))
        self.batch.context_lens.copy_(torch.cat([batch.context_lens, torch.zeros_like(batch.context_lens[:1])]))
        self.batch.block_tables[:3] = batch.block_tables
        for tensor, rows in zip((self.q, self.k, self.v), (self.case.q, *self.case.new()), strict=True):
            tensor.fill_(torch.nan)[:3] = rows

    def check(self, out: Tensor) -> None:
        self.case.check(out[:3])
        assert (out[3] == 0).all()


def test_a_prepared_step_goes_by_what_its_tensors_say() -> None:
    step = Replayed()
    step.pools = step.case.k_pool, step.case.v_pool
    num_empty = step.case.k_pool.isnan().sum()
    step.refill()
    step.check(step.attend())
    assert num_empty - step.case.k_pool.isnan().sum() == step.k[:3].numel()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_a_captured_step_can_be_replayed() -> None:
    step = Replayed()
    step.attend()  # compiles, and stores in the first pool
    step.pools = step.case.k_pool, step.case.v_pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.attend()
    step.refill()
    graph.replay()
    step.check(out)


def test_a_head_that_is_too_wide_is_refused() -> None:
    with pytest.raises(ConfigError, match="a head_dim of at most 512, and the model's is 576; use 'torch'"):
        TritonPagedAttention().check(make_spec(576, 1), torch.bfloat16)
    with pytest.raises(ConfigError, match="serves bfloat16, float16, float32, and --dtype makes K and V float64"):
        TritonPagedAttention().check(make_spec(64, 1), torch.float64)


def test_triton_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(table, "has_triton", lambda device: True)
    assert isinstance(table.load_backend("auto", cuda), TritonPagedAttention)
    monkeypatch.setattr(table, "has_triton", lambda device: False)
    assert not isinstance(table.load_backend("auto", cuda), TritonPagedAttention)
    with pytest.raises(ConfigError, match="needs the package triton and a recent CUDA device"):
        table.load_backend("triton", cuda)


def greedy(engine: Engine) -> dict[str, list[int]]:
    """What prompts of different lengths, in chunks and all at once, are continued with."""
    events: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engine.start(events.put)
    said: dict[str, list[int]] = {str(length): [] for length in (3, 8, 18)}
    for name in said:
        prompt = tuple((7 * int(name) + j) % 128 for j in range(int(name)))
        params = SamplingParams(max_tokens=4, temperature=0.0)
        engine.submit(Request(request_id=name, prompt=prompt, params=params, arrival_s=engine.clock()))
    num_open = len(said)
    while num_open:
        for event in events.get(timeout=PATIENCE_S):
            assert event.error is None
            said[event.request_id] += event.token_ids
            num_open -= event.finish_reason is not None
    engine.stop(0.0)
    return said


@NEEDS_FP8
def test_over_fp8_an_engine_says_what_it_says_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pool_size, "require_fp8", lambda device: None
    )  # which refuses CPUs, not knowing the interpreter
    write_tiny(CASES["qwen3"], tmp_path)
    with reference_attention():
        expected = greedy(build(tmp_path, DEVICE.type, attention_backend="torch", kv_cache_dtype="fp8"))
    tried = build(tmp_path, DEVICE.type, attention_backend="triton", kv_cache_dtype="fp8", max_num_batched_tokens=12)
    assert greedy(tried) == expected


def test_a_card_without_fp8_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9 or newer, and A card has 8\.0; choose int8"):
        pool_size.require_fp8(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    pool_size.require_fp8(torch.device("cuda"))
    with pytest.raises(ConfigError, match="--kv-cache-dtype is 'fp8'; choose one of auto, int8 on a CPU"):
        pool_size.require_fp8(torch.device("cpu"))


def test_fp8_weighs_what_int8_weighs() -> None:
    specs = [make_spec(64, 4), make_spec(128, 1)]
    assert pool_size.resolve_kv_dtype("fp8", torch.bfloat16, specs) is torch.float8_e4m3fn
    assert 16 * one_group(specs, torch.float8_e4m3fn).cuts[-1] == 2 * 16 * (64 + 4 + 2 * (128 + 4))
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype is 'fp8', .* multiple of 4, and the model's is 10"):
        pool_size.resolve_kv_dtype("fp8", torch.bfloat16, [make_spec(10, 1)])


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "smollm3", "gemma4", "gemma4-shared"])
def test_an_engine_says_what_it_says_with_the_reference(name: str, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    with reference_attention():
        expected = greedy(build(tmp_path, "cpu", attention_backend="torch"))
    tried = build(tmp_path, DEVICE.type, attention_backend="triton", max_num_batched_tokens=12)
    assert greedy(tried) == expected
