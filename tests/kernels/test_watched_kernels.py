"""What Triton's interpreter allows and a device does not is refused: each mistake is made here on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.fake_order import OrderError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a device refuses nothing: it computes something else"
)


@triton.jit
def _all_to_one(x, y):
    tl.store(y, tl.load(x + tl.program_id(0)))


@triton.jit
def _in_a_row(x, y):
    """Each program goes on from the one before."""
    i = tl.program_id(0)
    tl.store(x + i + 1, tl.load(x + i) + 1)


@triton.jit
def _before_it_is_overwritten(x, y):
    """The last program stores what the others have read."""
    i = tl.program_id(0)
    tl.store(y + i, tl.load(x))
    if i == tl.num_programs(0) - 1:
        tl.store(x, 1.0)


@triton.jit
def _reverse(x, y, has_barrier: tl.constexpr):
    """Threads read what others of the program have stored."""
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at))
    if has_barrier:
        tl.debug_barrier()
    tl.store(x + at, tl.load(y + 15 - at))


@triton.jit
def _shift(x, y, has_barrier: tl.constexpr):
    """Threads store what others of the program have yet to read."""
    at = tl.arange(0, 16)
    moved = tl.load(x + at)
    if has_barrier:
        tl.debug_barrier()
    tl.store(x + at + 1, moved)


@triton.jit
def _twice(x, y):
    tl.store(y + tl.arange(0, 16) // 2, tl.load(x + tl.arange(0, 16)))


@triton.jit
def _beyond(x, y):
    tl.store(y + tl.arange(0, 16), tl.load(x + 8 + tl.arange(0, 16)))


@triton.jit
def _in_place(x, y):
    at = tl.arange(0, 16)
    tl.store(x + at, tl.load(x + at) * 2)


@triton.jit
def _count(x, y):
    tl.atomic_add(y, tl.load(x + tl.program_id(0)))


@triton.jit
def _unmasked(x, y):
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at, mask=at < 8))


@triton.jit
def _promise(x, y, offset):
    at = tl.multiple_of(offset, 16) + tl.arange(0, 4)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def _small_product(x, y):
    a = tl.load(x + tl.arange(0, 4)[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(y, tl.sum(tl.dot(a, a)))


def run(kernel: Any, num_programs: int = 1, *values: int, **constants: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.arange(17.0), torch.zeros(17)
    kernel[(num_programs,)](x, y, *values, **constants)
    return x, y


@pytest.mark.parametrize(
    ("kernel", "num_programs", "constants", "why"),
    [
        (_all_to_one, 3, {}, "stores where another program does"),
        (_in_a_row, 3, {}, "loads what another program stores"),
        (_before_it_is_overwritten, 3, {}, "stores what another program loads"),
        (_reverse, 1, {"has_barrier": False}, "loads what another thread may have yet to store"),
        (_shift, 1, {"has_barrier": False}, "stores what another thread may have yet to load"),
        (_twice, 1, {}, "stores two numbers in the same place"),
        (_beyond, 1, {}, "goes beyond its tensors"),
    ],
)
def test_what_an_order_alone_makes_right_is_refused(
    kernel: Any, num_programs: int, constants: dict[str, bool], why: str
) -> None:
    with pytest.raises(OrderError, match=rf"{kernel.fn.__name__} at tests/kernels/test_watched_kernels\.py:\d+ {why}"):
        run(kernel, num_programs, **constants)


def test_what_is_in_order_is_not() -> None:
    assert run(_reverse, has_barrier=True)[0].tolist() == [*range(15, -1, -1), 16]
    assert run(_shift, has_barrier=True)[0].tolist() == [0, *range(16)]
    assert run(_in_place)[0].tolist() == [*range(0, 32, 2), 16]
    assert run(_count, 5)[1][0] == 10
    assert run(_all_to_one, 1)[1][0] == 0


def test_what_a_mask_leaves_out_is_garbage() -> None:
    _, y = run(_unmasked)
    assert y[:8].tolist() == [*range(8)]
    assert bool(y[8:16].isnan().all())


def test_a_promise_is_held() -> None:
    run(_promise, 1, 0)
    with pytest.raises(InterpreterError, match=r"\[4\] are no multiples of 16"):
        run(_promise, 1, 4)


def test_a_product_is_as_large_as_tensor_cores_take() -> None:
    with pytest.raises(InterpreterError, match="K >= 16"):
        run(_small_product)
