"""The fused kernels against float64, over shapes that fill no block, with rows apart and outputs full of NaN before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.cuda.activation import act_mul
from engine.runtime.cuda.available import has_triton
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.store import PoolView, view_pool
from engine.runtime.kv_layout import PEAKS, SCALE_BYTES, movable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
NEEDS_FP8 = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9),
    reason="this card has no fp8: it needs compute capability 8.9",
)


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
    check(act_mul(gate_up, Activation.SILU), F.silu(gate) * up)
    check(act_mul(gate_up, Activation.GELU), F.gelu(gate) * up)
    check(act_mul(gate_up, Activation.GELU_TANH), F.gelu(gate, approximate="tanh") * up)


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
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rotate_and_store(
    num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, rope_dim: int | None, dtype: torch.dtype
) -> None:
    """With and without norms; what is not stored to stays as it was."""
    for norm_dtype in (None, torch.float32 if num_tokens == 5 else dtype):
        case = Rotated(num_tokens, num_heads, num_kv_heads, dim, rope_dim, dtype, norm_dtype)
        pool = view_pool(*(torch.full((5, num_kv_heads, 4, dim), NAN, dtype=dtype, device=DEVICE) for _ in "kv"))
        q = case.store(pool)

        k_rows, v_rows = (x.transpose(1, 2).flatten(0, 1) for x in (pool.k, pool.v))
        assert torch.equal(v_rows[case.stored], case.v.to(dtype))
        for found, exact in ((q, case.q), (k_rows[case.stored], case.k)):
            assert found.dtype == dtype
            error = (found.double() - exact).abs()
            allowed = case.roundings * torch.finfo(dtype).eps * exact.abs() + case.loose * (1 + exact.abs()) + 4e-6
            assert bool((error <= allowed).all())
        assert k_rows[case.untouched].isnan().all()
        assert v_rows[case.untouched].isnan().all()


class Rotated:
    """Random queries, keys and values on their way to slots of which one is nobody's; and what float64 makes of them."""

    def __init__(
        self,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        rope_dim: int | None,
        dtype: torch.dtype,
        norm_dtype: torch.dtype | None,
    ) -> None:
        self.qkv = random(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype, spread=5)
        self.qkv = apart(self.qkv) if num_tokens else self.qkv
        self.angles = None
        if rope_dim is not None:
            angle = random(num_tokens, rope_dim // 2, spread=9).repeat(1, 2)
            sign = torch.ones(rope_dim, device=DEVICE)
            sign[: rope_dim // 2] = -1
            self.angles = (angle.cos().to(dtype), (angle.sin() * sign).to(dtype))
        self.norms = None
        if norm_dtype is not None:
            self.norms = (random(dim, dtype=norm_dtype), random(dim, dtype=norm_dtype))
        self.slots = torch.randperm(20, device=DEVICE)[:num_tokens]
        self.slots[num_tokens // 2 : num_tokens // 2 + 1] = -1  # a row that pads a graph
        self._heads = num_heads, num_kv_heads
        # Where a norm's result lies between two numbers of the type, float64 may round it to the other one.
        self.roundings = 0.5 if self.norms is None else 4.0
        self.loose = 0.0 if self.norms is None else 4 * torch.finfo(dtype).eps

    def store(self, pool: PoolView) -> Tensor:
        """Call the kernel, then compute what it should have stored."""
        before = self.qkv.clone()
        q = rotate_and_store(self.qkv, self.angles, self.norms, 1e-6, pool, self.slots)
        torch.testing.assert_close(self.qkv, before, rtol=0, atol=0, equal_nan=True)
        num_heads, num_kv_heads = self._heads
        dim = self.qkv.shape[2]
        qk, v = self.qkv[:, : num_heads + num_kv_heads].double(), self.qkv[:, num_heads + num_kv_heads :].double()
        if self.norms is not None:
            weights = (self.norms[0].expand(num_heads, dim), self.norms[1].expand(num_kv_heads, dim))
            qk = (F.rms_norm(qk, (dim,), None, 1e-6) * torch.cat(weights).double()).to(self.qkv.dtype).double()
        if self.angles is not None:
            qk = reference_rotation(qk, *self.angles)
        is_stored = self.slots >= 0
        self.q, self.k, self.v = qk[:, :num_heads], qk[is_stored, num_heads:], v[is_stored]
        self.stored = self.slots[is_stored]
        self.untouched = torch.ones(20, dtype=torch.bool, device=DEVICE)
        self.untouched[self.stored] = False
        return q


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for a row with an infinity
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", [pytest.param(torch.int8, id="int8"), pytest.param(torch.float8_e4m3fn, id="fp8", marks=NEEDS_FP8)]
)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "rope_dim", "has_norm"),
    [(3, 1, 64, 64, True), (4, 2, 80, 32, False), (1, 5, 128, 128, True), (2, 2, 12, None, False)],
)
def test_rotate_and_store_in_a_narrow_pool(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    rope_dim: int | None,
    has_norm: bool,
    kind: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Within one rounding to numbers up to the row's largest; rows that are broken are told, and zero stays zero."""
    case = Rotated(6, num_heads, num_kv_heads, dim, rope_dim, dtype, dtype if has_norm else None)
    case.qkv[1, num_heads:] = 0
    case.qkv[2, -1, 3], case.qkv[4, num_heads, 5] = NAN, torch.inf
    shape = (5, num_kv_heads, 4, dim + SCALE_BYTES)
    pool = view_pool(*(torch.full(shape, -1, dtype=torch.int8, device=DEVICE).view(kind) for _ in "kv"))
    q = case.store(pool)

    plain = view_pool(*(torch.zeros(5, num_kv_heads, 4, dim, dtype=dtype, device=DEVICE) for _ in "kv"))
    torch.testing.assert_close(q, case.store(plain), rtol=0, atol=0, equal_nan=True)
    for rows, scales, exact in ((pool.k, pool.k_scales, case.k), (pool.v, pool.v_scales, case.v)):
        assert scales is not None
        numbers, factors = numbers_and_scales(rows, scales, dim)
        found = (numbers[case.stored].to(torch.float32) * factors[case.stored]).double()
        peaks = exact.abs().amax(-1, keepdim=True)
        is_whole = peaks.isfinite()
        assert torch.equal(found.isnan().any(-1), ~is_whole[..., 0])
        # Half a step of int8; half of the last of e4m3's four digits, or of the smallest steps it has.
        steps = exact.abs() * 2.0**-4 if kind.is_floating_point else peaks * 0
        steps = torch.maximum(steps, peaks / PEAKS[kind] * (2.0**-10 if kind.is_floating_point else 0.5))
        lost = (case.roundings * torch.finfo(dtype).eps + case.loose) * peaks + case.loose + 4e-6
        assert bool(((found - exact).abs() <= 1.001 * steps + 1.1 * lost)[is_whole.expand(exact.shape)].all())
        largest = numbers[case.stored].float().abs().amax(-1, keepdim=True)
        assert bool((largest[is_whole & (peaks > 0)] == PEAKS[kind]).all())
        assert bool((found[(peaks == 0).expand(found.shape)] == 0).all())
        assert bool((movable(numbers)[case.untouched] == -1).all())
        assert bool((factors.contiguous().view(torch.int32)[case.untouched] == -1).all())


def numbers_and_scales(rows: Tensor, scales: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Of a narrow pool by slot: [slots, heads, dim] and [slots, heads, 1]. A head's block is numbers, then scales."""
    blocks, heads, block_size = rows.shape[:3]
    numbers = rows.flatten(2)[..., : block_size * dim].view(blocks, heads, block_size, dim)
    factors = scales.flatten(2)[..., block_size * dim // 4 :]
    return numbers.transpose(1, 2).flatten(0, 1), factors.transpose(1, 2).flatten(0, 1)[..., None]
