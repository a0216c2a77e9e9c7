"""The native library against definitions in float64, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from test_attention import empty_pools, make_batch, make_tables
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention import table
from engine.runtime.attention.cpu_native import CpuNativeAttention
from engine.runtime.attention.table import load_backend
from engine.runtime.kv_layout import AttentionSpec, from_pool, to_pool
from engine.runtime.native import ops
from engine.runtime.native.build import machine_isas
from engine.runtime.native.library import DTYPES, Isa, Library, RopeArgs, native
from tests.cpu.native_linears import ISAS, packed
from tests.patience import eventually
from tests.reference_attention import dense_attention

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place, relative, and a little for float32 sums.
ONE_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8 * 1.01, torch.float16: 2**-11 * 1.01}
ATTENTION_ERROR = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# By codes of quire_cpu.h.
ACTIVATIONS = [
    (1, F.silu),
    (2, partial(F.gelu, approximate="tanh")),
    (3, F.gelu),
    (4, lambda x: x.relu().square()),
    (5, F.gelu),
    (6, partial(F.gelu, approximate="tanh")),
]
RAGGED = [(0, 1), (3, 1), (200, 1), (31, 1), (64, 1), (0, 70), (37, 9), (130, 33)]


@pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)
def test_the_fixture_runs_tests_on_each_instruction_set_that_is_here(isa: Isa) -> None:
    if isa not in (*machine_isas(), Isa.PORTABLE, Isa.AMX):
        pytest.skip(f"this machine has no {isa.name}, so the library is not tested on it")
    assert isa in ISAS or isa is Isa.AVX512VNNI  # which is of two others


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel forgets to write is NaN."""
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype=None: torch.full(_flat(shape), torch.nan, dtype=dtype))


def _flat(shape: tuple) -> tuple:
    return tuple(shape[0]) if isinstance(shape[0], tuple | list) else shape


def check_attention(
    spec: AttentionSpec,
    steps: list,
    dtype: torch.dtype,
    block_size: int = 16,
    error: float = 0,
    *,
    is_int8: bool = False,
) -> None:
    """Fill a pool of NaN through scattered tables, history first, and compare the last step with the definition."""
    torch.manual_seed(11)
    backend = CpuNativeAttention()
    tables = make_tables(steps, block_size, is_scattered=True)
    pools = empty_pools(backend, spec, 96, block_size, torch.int8 if is_int8 else dtype)
    totals = [start + num for start, num in steps]
    queries = [torch.randn(total, spec.num_heads, spec.head_dim).to(dtype) for total in totals]
    keys, values = ([torch.randn(n, spec.num_kv_heads, spec.head_dim).to(dtype) for n in totals] for _ in range(2))

    def run(ranges: list) -> Tensor:
        live = [s for s, (_, num) in enumerate(ranges) if num]
        backend.prepare(make_batch([ranges[s] for s in live], [tables[s] for s in live], block_size))
        q, k, v = (torch.cat([xs[s][ranges[s][0] : sum(ranges[s])] for s in live]) for xs in (queries, keys, values))
        merged = torch.cat((q, k, v), 1)  # as a projection leaves them: tokens lie apart
        parts = merged.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        return backend.attend(spec, *parts, *pools)

    if any(start for start, _ in steps):
        run([(0, start) for start, _ in steps])
    out = run(steps)
    if is_int8:
        keys, values = ([from_pool(to_pool(x, torch.int8), torch.float32) for x in xs] for xs in (keys, values))
    expected = [dense_attention(spec, queries[s][i:], keys[s], values[s], i) for s, (i, _) in enumerate(steps)]
    error = error or ATTENTION_ERROR[dtype]
    torch.testing.assert_close(out, torch.cat(expected), atol=error, rtol=ONE_ROUNDING[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [2, 8, 40, 64, 80, 96, 128, 256])
def test_attention_at_every_head_size(library: Library, head_dim: int, dtype: torch.dtype) -> None:
    check_attention(AttentionSpec(6, 2, head_dim, head_dim**-0.5), RAGGED, dtype)


@pytest.mark.parametrize("heads", [(1, 1), (8, 4), (5, 1), (7, 1), (70, 1)])
def test_attention_at_every_group_size(library: Library, heads: tuple[int, int]) -> None:
    """Groups that fill, and do not fill, the rows that a kernel takes at once; one is larger than a tile of rows."""
    check_attention(AttentionSpec(*heads, 16, 0.25), RAGGED, torch.float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 32, 256])
def test_attention_at_every_block_size(library: Library, block_size: int, dtype: torch.dtype) -> None:
    steps = [(19, 1), (5, 3), (0, 9), (33, 1)] if block_size < 8 else RAGGED
    check_attention(AttentionSpec(4, 2, 24, 0.2), steps, dtype, block_size)


@pytest.mark.parametrize("dtype", TYPES)
def test_window_softcap_and_sinks_together(library: Library, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    for window in (1, 17, 128, 150):
        check_attention(AttentionSpec(4, 2, 32, 0.4, window=window, softcap=1.5, sinks=sinks), RAGGED, dtype)


def test_a_thread_that_stays_aside_and_those_that_pack_for_it_compute_alone() -> None:
    library = native()
    if library is None:
        pytest.skip("no native library and no C compiler")
    num_threads, linear = library.num_threads, packed(library, torch.randn(2048, 2048))
    x = torch.randn(64, 2048)

    def others() -> float:
        """Compute, and return the time that other threads of the process took, as a part of this one's."""
        began_s, all_began_s = time.thread_time(), time.process_time()
        for _ in range(16):
            linear(x)
        own_s = time.thread_time() - began_s
        return (time.process_time() - all_began_s) / own_s - 1

    library.use_threads(2)
    try:
        eventually(lambda: others() > 0.3)  # the team has its turn
        library.stay_aside(stays=True)
        time.sleep(0.01)  # until the other one sleeps
        with ThreadPoolExecutor(1, initializer=library.packer.begin) as packer:
            assert max(others(), packer.submit(others).result()) < 0.1
    finally:
        library.stay_aside(stays=False)
        library.use_threads(num_threads)


@pytest.mark.parametrize("dtype", TYPES)
def test_an_int8_pool(library: Library, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    for head_dim in (8, 40, 128):
        check_attention(AttentionSpec(6, 2, head_dim, head_dim**-0.5), RAGGED, dtype, is_int8=True)
    for block_size in (1, 2, 32):
        steps = [(19, 1), (5, 3), (0, 9), (33, 1)] if block_size < 8 else RAGGED
        check_attention(AttentionSpec(4, 2, 24, 0.2), steps, dtype, block_size, is_int8=True)
    for window in (17, 150):
        spec = AttentionSpec(4, 2, 32, 0.4, window=window, softcap=1.5, sinks=sinks)
        check_attention(spec, RAGGED, dtype, is_int8=True)
    library.use_threads(3)
    check_attention(AttentionSpec(6, 2, 32, 0.2), [(1201, 1), (3, 1), (90, 2)], dtype, is_int8=True)


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_rows_are_those_of_torch(library: Library, dtype: torch.dtype) -> None:
    """Numbers and scales to the bit; NaN and infinity are found again."""
    torch.manual_seed(0)
    spec, backend = AttentionSpec(1, 1, 40, 1.0), CpuNativeAttention()
    rows = (torch.randn(64, 1, 40) * 10.0 ** torch.randint(-4, 4, (64, 1, 1))).to(dtype)
    rows[5], rows[6, 0, 39], rows[7, 0, 0] = 0, torch.nan, -torch.inf
    rows[8] = rows[4] * 2e-37
    k, v = empty_pools(backend, spec, 1, 64, torch.int8)
    backend.prepare(make_batch([(0, 64)], [[0]], 64))
    backend.attend(spec, rows, rows, rows, k, v)
    expected = to_pool(rows, torch.int8)[:, 0]
    for pool, shape, order in ((k, (20, 64, 2), (1, 0, 2)), (v, (32, 40, 2), (0, 2, 1))):
        flat = pool.flatten()
        stored = flat[: 64 * 40].view(shape).permute(order).reshape(64, 40)
        scales = flat[64 * 40 :].view(torch.float32)
        assert scales[6:8].isnan().all()
        scales[6:8] = 0
        expected[6:8] = 0
        assert torch.equal(scales, expected[:, 40:].view(torch.float32)[:, 0])
        stored[6:8] = 0
        assert torch.equal(stored, expected[:, :40])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_contexts_split_over_threads_join_to_the_same(library: Library, num_threads: int) -> None:
    """One long decode among short ones is cut by keys; a window moves where the cuts fall."""
    library.use_threads(num_threads)
    for window in (None, 700):
        spec = AttentionSpec(6, 2, 32, 0.2, window=window, sinks=torch.linspace(-1, 2, 6))
        check_attention(spec, [(1201, 1), (3, 1), (90, 2)], torch.float32)


# (text, how much of it a sequence begins with, tokens of its own behind that): several texts in turns, one prefix that
# goes on from another, others shorter than a span or a chunk, and sequences that are alike but for the last token.
ALIKE = [
    (0, 512, 1), (1, 256, 1), (0, 512, 40), (2, 130, 5), (0, 512, 100), (1, 256, 1), (3, 100, 20), (0, 512, 3),
    (2, 130, 70), (0, 272, 9), (3, 100, 9), (2, 130, 5), (4, 400, 2), (0, 272, 150), (4, 400, 200), (5, 300, 30),
]  # fmt: skip


def check_sharing(spec: AttentionSpec, dtype: torch.dtype, block_size: int = 16, *, is_int8: bool = False) -> None:
    """Decode steps of ALIKE near to the definition, and to the bit what each of them is alone."""
    torch.manual_seed(12)
    backend, free = CpuNativeAttention(), iter(torch.randperm(224 * 16 // block_size).tolist())
    pools = empty_pools(backend, spec, 224 * 16 // block_size, block_size, torch.int8 if is_int8 else dtype)
    shape = (512, spec.num_kv_heads, spec.head_dim)
    stored = AttentionSpec(spec.num_kv_heads, spec.num_kv_heads, spec.head_dim, 1.0, window=1)  # with little to compute
    texts = [[torch.randn(shape).to(dtype) for _ in range(2)] for _ in range(6)]
    blocks = [[next(free) for _ in range(max(n for t, n, _ in ALIKE if t == i) // block_size)] for i in range(6)]
    queries = [torch.randn(1, spec.num_heads, spec.head_dim).to(dtype) for _ in ALIKE]
    steps, tables, keys, values = [], [], [], []

    def run(chosen: list[int]) -> Tensor:
        backend.prepare(make_batch([steps[s] for s in chosen], [tables[s] for s in chosen], block_size))
        q, k, v = (torch.cat([xs[s][-1:] for s in chosen]) for xs in (queries, keys, values))
        return backend.attend(spec, q, k, v, *pools)

    for text, shared, own in ALIKE:
        steps.append((shared + own - 1, 1))
        tables.append(blocks[text][: shared // block_size])
        tables[-1] += [next(free) for _ in range((shared + own - 1) // block_size + 1 - len(tables[-1]))]
        for xs, begin in zip((keys, values), texts[text], strict=True):
            xs.append(torch.cat((begin[:shared], torch.randn(own, *shape[1:]).to(dtype))))
        backend.prepare(make_batch([(0, shared + own)], tables[-1:], block_size))
        backend.attend(stored, torch.zeros_like(keys[-1]), keys[-1], values[-1], *pools)
    out = run([*range(len(ALIKE))])
    assert torch.equal(out, torch.cat([run([s]) for s in range(len(ALIKE))]))
    if is_int8:
        keys, values = ([from_pool(to_pool(x, torch.int8), torch.float32) for x in xs] for xs in (keys, values))
    expected = [dense_attention(spec, queries[s], keys[s], values[s], start) for s, (start, _) in enumerate(steps)]
    error = ATTENTION_ERROR[dtype]
    torch.testing.assert_close(out, torch.cat(expected), atol=error, rtol=ONE_ROUNDING[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_int8", [False, True], ids=["", "int8"])
def test_sequences_that_begin_alike(library: Library, is_int8: bool, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0, 1.0, 2.0])
    check_sharing(AttentionSpec(6, 2, 40, 0.3), dtype, is_int8=is_int8)
    library.use_threads(3)
    check_sharing(AttentionSpec(6, 2, 32, 0.4, softcap=1.5, sinks=sinks), dtype, 32, is_int8=is_int8)
    check_sharing(AttentionSpec(6, 2, 64, 0.125, window=200), dtype, is_int8=is_int8)


@pytest.mark.parametrize("heads", [(1, 1), (35, 1), (100, 1)])
def test_sequences_that_begin_alike_at_every_group_size(library: Library, heads: tuple[int, int]) -> None:
    """With 35 rows each, two sequences fit a task; with 100 not even one."""
    check_sharing(AttentionSpec(*heads, 16, 0.25), torch.float32)
    check_sharing(AttentionSpec(*heads, 16, 0.25), torch.float32, 4)


class _Malloc(ctypes.Structure):
    """The answer of glibc's mallinfo2."""

    _fields_ = [(f"other{i}", ctypes.c_size_t) for i in range(4)] + [
        (name, ctypes.c_size_t) for name in ("mapped", "unused", "cached", "used", "free", "top")
    ]


@pytest.mark.skipif(native() is None or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc")
def test_what_attention_allocates_is_freed() -> None:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Malloc
    sizes = []
    for _ in range(3):
        check_sharing(AttentionSpec(100, 1, 16, 0.25), torch.float32)
        gc.collect()
        found = ask()
        sizes.append(found.used + found.mapped)
    assert sizes[2] - sizes[1] < 50_000, "the parts of a batch's results are larger"


def test_a_large_score_does_not_overflow(library: Library) -> None:
    """Scores of some thousands; their own rounding is what the result may differ by."""
    check_attention(AttentionSpec(2, 1, 64, 40.0), [(100, 1), (0, 40)], torch.float32, error=1e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 40, 576])
def test_add_rms_norm(library: Library, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for weight_type in {dtype, torch.float32}:
        x, delta = torch.randn(5, width).to(dtype), torch.randn(5, 2 * width).to(dtype)[:, width:]
        weight = torch.randn(width).to(weight_type)
        added = (x.double() + 0.5 * delta.double()).to(dtype)
        out = ops.add_rms_norm(x, delta, weight, 1e-5, alpha=0.5)
        torch.testing.assert_close(x.double(), added.double(), rtol=ONE_ROUNDING[dtype], atol=1e-6)
        expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=ONE_ROUNDING[dtype], atol=1e-6)
        assert torch.equal(ops.add_rms_norm(x, None, weight, 1e-5), out)


@pytest.mark.parametrize("width", [1, 40, 20_001])
@pytest.mark.parametrize(("multiplier", "cap"), [(0.125, 0.0), (1.0, 30.0), (3.0, 0.5)])
def test_scale_logits(library: Library, multiplier: float, cap: float, width: int) -> None:
    """A logit that is not finite shows, and a row has the same bits alone."""
    torch.manual_seed(0)
    logits = 20 * torch.randn(5, width)
    logits[1, 0], logits[2, -1], logits[3, 0] = torch.nan, -torch.inf, 3e38
    alone, expected = logits[4:].clone(), multiplier * logits.double()
    expected = cap * (expected / cap).tanh() if cap else expected.float()
    for rows in (logits, alone):
        ops.scale_logits(rows, multiplier, cap)
    torch.testing.assert_close(logits.double(), expected.double(), rtol=1e-6, atol=3e-7 * cap, equal_nan=True)
    assert torch.equal(logits[4:], alone)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(64, 64), (80, 32), (8, 8)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_rotate_heads(library: Library, is_normed: bool, head_dim: int, rope_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qk = torch.randn(7, 6, head_dim).to(dtype)[:, :5]
    angles = torch.randn(7, rope_dim // 2) * 3
    cos = torch.cat((angles.cos(), angles.cos()), 1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), 1).to(dtype)
    norms = (torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype)) if is_normed else None
    x = qk.clone()
    if norms is not None:
        scale = torch.cat((norms[0].expand(3, -1), norms[1].expand(2, -1)))
        x = (F.rms_norm(x.double(), (head_dim,), None, 1e-6) * scale.double()).to(dtype)
    part, half = x[..., :rope_dim].double(), rope_dim // 2
    expected = x.double()
    expected[..., :rope_dim] = part * cos.double()[:, None] + part.roll(half, -1) * sin.double()[:, None]
    if norms is None:
        ops.rotate_heads(qk, cos, sin)
    else:  # in a decoder alone
        args = RopeArgs(qk.data_ptr(), cos.data_ptr(), sin.data_ptr(), dtype=DTYPES[dtype], eps=1e-6)
        args.angle_dtype = args.weight_dtype = args.dtype
        args.tokens, args.stride, args.head_dim, args.rope_dim = 7, qk.stride(0), head_dim, rope_dim
        args.num_heads, args.num_kv_heads = 3, 2
        args.q_weight, args.k_weight = norms[0].data_ptr(), norms[1].data_ptr()
        library.rope(args)
    # A normed value that falls on the other side of a rounding moves by one unit before it is turned.
    rounding = ONE_ROUNDING[dtype] * (3 if is_normed else 1)
    torch.testing.assert_close(qk.double(), expected, rtol=rounding, atol=rounding if is_normed else 1e-6)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (15, 40), (70, 576), (130, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear(library: Library, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    for has_bias, num_rows in product((False, True), (1, 3, 18)):
        torch.manual_seed(0)
        weight, x = (torch.randn(n, inputs).to(dtype) for n in (outputs, num_rows))
        bias = torch.randn(outputs).to(dtype) if has_bias else None
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        linear = packed(library, weight, bias)
        torch.testing.assert_close(linear(x).double(), expected, rtol=ONE_ROUNDING[dtype], atol=1e-4)
        unrounded = linear(x, torch.float32)
        assert unrounded.dtype is torch.float32
        torch.testing.assert_close(unrounded.double(), expected, rtol=ONE_ROUNDING[torch.float32], atol=1e-4)


@pytest.mark.parametrize(("width", "inputs"), [(1, 2), (16, 40), (70, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("code", "activation"), ACTIVATIONS)
def test_gates_and_ups(
    library: Library, code: int, activation: Callable[[Tensor], Tensor], dtype: torch.dtype, width: int, inputs: int
) -> None:
    for has_bias, num_rows in product((False, True), (1, 13)):
        torch.manual_seed(0)
        weight, x = (torch.randn(n, inputs).to(dtype) for n in (2 * width, num_rows))
        x[-1] *= 20  # an activation's flat ends
        bias = torch.randn(2 * width).to(dtype) if has_bias else None
        sums = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        linear = packed(library, weight, bias, code)
        if code > 3:  # without gates
            expected = activation(sums)
        else:
            gates, ups = sums.chunk(2, dim=1)
            expected = activation(gates) * ups
        error = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(linear(x).double(), expected, rtol=ONE_ROUNDING[dtype], atol=error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_says_the_same_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.undo()
    if native() is None:
        pytest.skip("no native library and no C compiler")
    torch.manual_seed(0)
    x, delta, weight = (torch.randn(shape).to(dtype) for shape in ((4, 32), (4, 32), (32,)))
    qk, angles = torch.randn(4, 3, 16).to(dtype), torch.randn(2, 4, 16).to(dtype)

    def outcome() -> list[Tensor]:
        residual, heads = x.clone(), qk.clone()
        normed = ops.add_rms_norm(residual, delta, weight, 1e-5)
        ops.rotate_heads(heads, angles[0], angles[1])
        logits = 20 * x.float()
        ops.scale_logits(logits, 0.5, 30.0)
        return [residual, normed, heads, logits]

    with_library = outcome()
    monkeypatch.setattr(ops, "native", lambda: None)
    for ours, torchs in zip(with_library, outcome(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=4 * ONE_ROUNDING[dtype], atol=4 * ONE_ROUNDING[dtype])


def test_without_the_library_the_backend_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "native", lambda: None)
    with pytest.raises(
        ConfigError, match="cpu_native', which is not available: there are no native kernels: --cpu-kernels is off"
    ):
        load_backend("cpu_native", torch.device("cpu"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("at", [0, 5, 63, 199])
def test_one_key_that_is_not_finite_shows_in_every_answer_that_reads_it(
    library: Library, dtype: torch.dtype, is_int8: bool, at: int
) -> None:
    """A maximum that drops NaN would give the key no weight, and an answer that is wrong without a trace of it.

    A decode over 200 keys, prompts before and behind the key, and a sequence that has nothing to do with it.
    """
    torch.manual_seed(3)
    spec, backend, block_size = AttentionSpec(4, 2, 40, 40**-0.5), CpuNativeAttention(), 16
    tables = make_tables([(200, 1), (0, 30)], block_size, is_scattered=True)
    pools = empty_pools(backend, spec, 96, block_size, torch.int8 if is_int8 else dtype)
    q, k, v = (torch.randn(200, heads, 40).to(dtype) for heads in (4, 2, 2))
    k[at, 0, 7] = torch.nan  # of the first of two heads of keys: the second pair of queries never reads it

    def attend(start: int, num: int) -> Tensor:
        backend.prepare(make_batch([(start, num)], tables[:1], block_size))
        return backend.attend(spec, *(x[start : start + num] for x in (q, k, v)), *pools)

    prompt, decode = attend(0, 199), attend(199, 1)
    found = torch.cat((prompt, decode)).isnan().any(-1)  # [200 positions, 4 heads]
    assert torch.equal(found[:, :2].all(-1), torch.arange(200) >= at)
    assert torch.equal(found[:, :2].any(-1), torch.arange(200) >= at)
    assert not found[:, 2:].any()
    backend.prepare(make_batch([(0, 30)], tables[1:], block_size))
    clean = torch.randn(30, 2, 40).to(dtype)
    assert backend.attend(spec, torch.randn(30, 4, 40).to(dtype), clean, clean, *pools).isfinite().all()
