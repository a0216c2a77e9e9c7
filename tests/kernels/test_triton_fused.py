"""The fused kernels against float64, over shapes that fill no block, with rows apart and outputs full of NaN before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.attention.pool import from_pool, to_pool
from engine.runtime.cuda.activation import gelu_mul, gelu_tanh_mul, silu_mul
from engine.runtime.cuda.available import has_triton
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.rope_store import rotate_and_store

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other random numbers every time, printed for a failure; memory that is handed out holds NaN."""
    print(f"torch.manual_seed({torch.seed() % 2**32})")
    torch.manual_seed(torch.initial_seed() % 2**32)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))


def random(*shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * spread).to(dtype)


def apart(x: Tensor) -> Tensor:
    """The same values as rows of a wider matrix, NaN between them."""
    wide = torch.full((x.shape[0], x[0].numel() + 7), NAN, dtype=x.dtype, device=x.device)
    view = wide[:, : x[0].numel()].unflatten(1, x.shape[1:])
    return view.copy_(x)


def check(found: Tensor, exact: Tensor) -> None:
    """Within one rounding to the result's type, and what float32 sums are off by."""
    assert found.dtype != torch.float64
    error = (found.double() - exact).abs()
    allowed = torch.finfo(found.dtype).eps / 2 * exact.abs() + 3e-6 * (1 + exact.abs())
    assert bool((error <= allowed).all()), f"off by {(error - allowed).max().item():.2e} more than allowed"


def test_this_machine_has_triton() -> None:
    assert has_triton(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 64, 576, 1000, 4097])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_add_rms_norm(num_rows: int, width: int, dtype: torch.dtype) -> None:
    for has_delta, weight_dtype, alpha in ((True, dtype, 1.0), (True, torch.float32, 0.22), (False, dtype, 1.0)):
        x, delta = random(num_rows, width, dtype=dtype, spread=3), random(num_rows, width, dtype=dtype)
        if num_rows:
            x, delta = apart(x), apart(delta)
        weight = random(width, dtype=weight_dtype)
        stream = x.double() + alpha * delta.double() if has_delta else x.double()
        out = add_rms_norm(x, delta if has_delta else None, weight, 1e-5, alpha)
        check(x, stream)
        assert out.is_contiguous()
        check(out, F.rms_norm(x.double(), (width,), weight.double(), 1e-5))


def test_the_norm_of_large_numbers_is_finite() -> None:
    x = torch.full((2, 700), 3e4, dtype=torch.float16, device=DEVICE)
    check(add_rms_norm(x, None, torch.ones(700, device=DEVICE), 1e-6), torch.ones(2, 700, device=DEVICE).double())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, for a sigmoid that is 0
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [3, 100, 1536, 1030])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_activations(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(num_rows, 2 * width, dtype=dtype, spread=4)
    if num_rows:
        gate_up = apart(gate_up)
        gate_up[0, 0], gate_up[-1, width - 1] = 60.0, -60.0  # where an exponential overflows, or nearly
    gate, up = gate_up.double().chunk(2, 1)
    check(silu_mul(gate_up), F.silu(gate) * up)
    check(gelu_mul(gate_up), F.gelu(gate) * up)
    check(gelu_tanh_mul(gate_up), F.gelu(gate, approximate="tanh") * up)


def reference_rotation(qk: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    dim = cos.shape[1]
    part = qk[..., :dim]
    turned = part * cos.double()[:, None] + part.roll(dim // 2, -1) * signed_sin.double()[:, None]
    return torch.cat((turned, qk[..., dim:]), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "rope_dim"),
    [(3, 1, 64, 64), (4, 2, 80, 32), (1, 1, 96, 96), (8, 2, 128, 128), (7, 1, 256, 64), (2, 2, 6, 6), (5, 1, 64, None)],
)
@pytest.mark.parametrize(("num_tokens", "layout"), [(0, "tokens"), (1, "tokens"), (5, "heads")])
def test_rotate_and_store(
    num_tokens: int,
    layout: str,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    rope_dim: int | None,
    dtype: torch.dtype,
) -> None:
    """With and without norms; the pool is in the order of tokens or of heads, and what is not stored to stays as it was."""
    num_blocks, block_size = 5, 4
    shape = (num_blocks, block_size, num_kv_heads, dim)
    for norm_dtype in (None, torch.float32 if layout == "heads" else dtype):
        qkv = random(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
        qkv = apart(qkv) if num_tokens else qkv
        before = qkv.clone()
        angles = None
        if rope_dim is not None:
            angle = random(num_tokens, rope_dim // 2, spread=9).repeat(1, 2)
            sign = torch.ones(rope_dim, device=DEVICE)
            sign[: rope_dim // 2] = -1
            angles = (angle.cos().to(dtype), (angle.sin() * sign).to(dtype))
        norms = None
        if norm_dtype is not None:
            norms = (random(dim, dtype=norm_dtype), random(dim, dtype=norm_dtype))
        k_pool = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        v_pool = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        if layout == "heads":
            k_pool, v_pool = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (k_pool, v_pool))
        slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:num_tokens]
        slots[num_tokens // 2 : num_tokens // 2 + 1] = -1  # a row that pads a graph

        q = rotate_and_store(qkv, angles, norms, 1e-6, k_pool, v_pool, slots)

        assert torch.equal(qkv, before)
        num_turned = num_heads + num_kv_heads
        qk, v = qkv[:, :num_turned].double(), qkv[:, num_turned:]
        if norms is not None:
            scale = torch.cat((norms[0].expand(num_heads, dim), norms[1].expand(num_kv_heads, dim)))
            qk = (F.rms_norm(qk, (dim,), None, 1e-6) * scale.double()).to(dtype).double()
        if angles is not None:
            qk = reference_rotation(qk, *angles)
        # Where a norm's result lies between two numbers of the type, float64 may round it to the other one.
        roundings = 0.5 if norms is None else 4.0
        loose = 0.0 if norms is None else 4 * torch.finfo(dtype).eps
        stored = slots >= 0
        k_rows, v_rows = k_pool.flatten(0, 1), v_pool.flatten(0, 1)
        assert torch.equal(v_rows[slots[stored]], v[stored])
        for found, exact in ((q, qk[:, :num_heads]), (k_rows[slots[stored]], qk[stored, num_heads:])):
            assert found.dtype == dtype
            error = (found.double() - exact).abs()
            allowed = roundings * torch.finfo(dtype).eps * exact.abs() + loose * (1 + exact.abs()) + 4e-6
            assert bool((error <= allowed).all())
        untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
        untouched[slots[stored]] = False
        assert k_rows[untouched].isnan().all()
        assert v_rows[untouched].isnan().all()


@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")  # numpy's, for a row of zeros ...
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # ... and for one with an infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(3, 1, 64), (4, 2, 80), (1, 5, 128)])
def test_rotate_and_store_in_int8(num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """As attention/pool.py stores what lies in a pool of the model's type; rows that broke stay broken."""
    num_tokens, shape = 6, (4, 3, num_kv_heads, dim)
    qkv = apart(random(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype, spread=5))
    qkv[1, num_heads:] = 0
    qkv[2, -1, 3], qkv[3, num_heads, 5] = NAN, torch.inf
    angle = random(num_tokens, dim // 2).repeat(1, 2)
    angles, slots = (angle.cos().to(dtype), angle.sin().to(dtype)), torch.randperm(12, device=DEVICE)[:num_tokens]
    slots[5] = -1
    plain = [torch.zeros(shape, dtype=dtype, device=DEVICE) for _ in range(2)]
    expected_q = rotate_and_store(qkv, angles, None, 0.0, *plain, slots)
    # Numbers of a head's block, then their scales, as one row of a wider matrix would have them.
    runs = torch.full((2, 4, num_kv_heads, 3 * (dim + 4)), 77, dtype=torch.int8, device=DEVICE)
    before = runs.clone()
    pools = [run[..., : 3 * dim].unflatten(-1, (3, dim)).transpose(1, 2) for run in runs]
    scales = [run.view(torch.float32)[..., 3 * dim // 4 :].transpose(1, 2) for run in runs]
    q = rotate_and_store(qkv, angles, None, 0.0, *pools, slots, (scales[0], scales[1]))

    assert torch.equal(q, expected_q)
    stored = slots[slots >= 0]
    for pool, scale, exact in zip(pools, scales, plain, strict=True):
        rows = to_pool(exact.reshape(12, num_kv_heads, dim)[stored], torch.int8)
        numbers, peaks = rows[..., :dim], rows[..., dim:].contiguous().view(torch.float32)[..., 0]
        found, found_peaks = (x.reshape(12, num_kv_heads, -1)[stored] for x in (pool, scale[..., None]))
        torch.testing.assert_close(found_peaks[..., 0], peaks, rtol=1e-6, atol=0, equal_nan=True)
        is_whole = peaks.isfinite()
        off = (found.int() - numbers.int())[is_whole].abs()
        assert off.max() <= 1  # where rounding met a tie
        assert off.float().mean() < 0.01
        again = from_pool(torch.cat((found, found_peaks.contiguous().view(torch.int8)), -1), torch.float32)
        assert torch.equal(again.isnan().any(-1), ~is_whole)
    for run, old in zip(runs, before, strict=True):
        untouched = torch.ones(12, dtype=torch.bool)
        untouched[stored.cpu()] = False
        places = run[..., : 3 * dim].unflatten(-1, (3, dim)).transpose(1, 2).reshape(12, -1)
        assert torch.equal(places[untouched], old[..., : 3 * dim].reshape(12, -1)[untouched])
