"""The head's products in float32: what CUDA is asked for, on a machine without it, and the buffer that graphs hand in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.runtime.schemes import linear
from engine.runtime.schemes.linear import Dense, Linear
from tests.cpu.test_models_families import CASES, load, write_tiny


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device whose torch.mm makes float32 of 16 bits, and how often it was asked."""
    asked: list[str] = []

    def multiply(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        asked.append(str(x.dtype))
        y = x.to(out_dtype) @ weight.to(out_dtype)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(linear.torch, "mm", multiply)
    monkeypatch.setattr(linear, "_has_float32_products", lambda device, dtype: dtype == torch.bfloat16)
    return asked


@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sums_are_not_rounded_to_the_weights_type(products: list[str], has_bias: bool, has_out: bool) -> None:
    weight, x = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((48, 32), (3, 32)))
    bias = torch.randn(48, dtype=torch.bfloat16) if has_bias else None
    out = torch.empty(3, 48) if has_out else None
    found = Linear(Dense(weight, bias)).in_float32(x, out)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert found.dtype == torch.float32
    assert (found.double() - exact).abs().max() < 1e-5, "bfloat16 is off by 1e-2"
    assert products == ["torch.bfloat16"]
    assert out is None or found is out


def test_a_model_leaves_its_logits_where_it_is_told(tmp_path: Path) -> None:
    write_tiny(CASES["granite"], tmp_path)  # whose logits are divided afterwards
    model = load(tmp_path)
    hidden, out = torch.randn(3, model.config.hidden_size), torch.empty(3, model.vocab_size)
    assert model.logits(hidden, out) is out
    assert torch.equal(out, model.logits(hidden))


def test_other_weights_are_multiplied_as_ever(products: list[str]) -> None:
    weight, x, out = torch.randn(48, 32), torch.randn(3, 32), torch.empty(3, 48)
    found = Linear(Dense(weight)).in_float32(x, out)
    assert found is out
    torch.testing.assert_close(found, x @ weight.t())
    assert not products


@pytest.mark.parametrize("error", [TypeError("mm() got an unexpected keyword argument"), RuntimeError("not supported")])
def test_a_torch_without_such_products_goes_without(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    zeros, probe = torch.zeros, linear._has_float32_products.__wrapped__
    monkeypatch.setattr(linear.torch, "zeros", lambda shape, dtype, device: zeros(shape, dtype=dtype))
    monkeypatch.setattr(linear.torch, "mm", lambda *_, **__: None)
    assert probe(torch.device("cuda", 0), torch.bfloat16)
    assert not probe(torch.device("cuda", 0), torch.float32)
    assert not probe(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(linear.torch, "mm", fail)
    assert not probe(torch.device("cuda", 0), torch.bfloat16)
