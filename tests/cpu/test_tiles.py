"""Products on tiles of AMX: the order of their sums, and hardware beside the model that stands in for it (tile_model.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.native.build import Isa, best_isa, machine_isas
from engine.runtime.native.library import choose_kernels, native
from tests.cpu.native_linears import int8, packed
from tests.cpu.tile_model import tile_model

LEAST = 2.0**-126  # the least normal float32; what is smaller is 0 on tiles


def as_documented(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T: of 32 values even and odd ones are summed apart, and their sum is added.

    A product of two bfloat16 and its sum with a float32 are exact in float64 for numbers of like size.
    """
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], 32):
        parts = []
        for first in (begin, begin + 1):
            part = torch.zeros_like(total)
            for k in range(first, min(begin + 32, x.shape[1]), 2):
                part = (part.double() + _flushed(x[:, k : k + 1]) @ _flushed(weight[:, k : k + 1]).T).float()
            parts.append(part)
        total += parts[0] + parts[1]
    return total


def _flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < LEAST, 0, values.double())


@pytest.mark.parametrize("num_inputs", [2, 30, 32, 64, 70, 1408])
def test_sums_have_the_documented_order(num_inputs: int) -> None:
    torch.manual_seed(num_inputs)
    x, weight = torch.randn(40, num_inputs).bfloat16(), torch.randn(70, num_inputs).bfloat16()
    x[3, :2], weight[5, 1] = LEAST / 8, LEAST / 2
    expected = as_documented(x, weight)
    linear = packed(tile_model(), weight)
    assert torch.equal(linear(x, torch.float32), expected)
    for num_rows in (1, 15, 16, 17, 33):
        assert torch.equal(linear(x[:num_rows], torch.float32), expected[:num_rows])


def test_the_order_is_another_than_that_of_pairs() -> None:
    """So what names K/V has the instruction set in it."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 1024).bfloat16(), torch.randn(70, 1024).bfloat16()
    library = native()
    model = tile_model()
    assert library is not None
    assert not torch.equal(packed(library, weight)(x, torch.float32), packed(model, weight)(x, torch.float32))


def test_what_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(0)
    linear, x = packed(tile_model(), torch.randn(70, 96).bfloat16()), torch.randn(20, 96).bfloat16()
    expected = linear(x)
    x[4, 7], x[11, 90] = torch.nan, torch.inf
    found = linear(x)
    others = [row for row in range(20) if row not in (4, 11)]
    assert not found[[4, 11]].isfinite().any()
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("make", [packed, int8])
def test_the_machine_does_what_the_model_does(make: Callable[..., Callable[..., Tensor]]) -> None:
    if Isa.AMX not in machine_isas():
        pytest.skip("this machine has no AMX: its kernels are proven by a model alone")
    choose_kernels("amx")
    library = native()
    assert library is not None
    torch.manual_seed(1)
    weight = torch.randn(200, 1500).bfloat16()
    real, model = make(library, weight), make(tile_model(), weight)
    for num_rows in (1, 7, 8, 33, 200):
        x = (torch.randn(num_rows, 1500) * 10.0 ** torch.randint(-39, 30, (1, 1500))).bfloat16()
        assert torch.equal(real(x, torch.float32), model(x, torch.float32))
    choose_kernels("auto")


def test_tiles_are_taken_only_when_they_are_asked_for() -> None:
    assert best_isa() is not Isa.AMX
    if Isa.AMX in machine_isas():
        pytest.skip("needs a machine without AMX")
    with pytest.raises(ConfigError, match=r"This machine has no AMX|there are no native kernels"):
        choose_kernels("amx")
