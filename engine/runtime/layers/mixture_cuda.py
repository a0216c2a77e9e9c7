"""A layer's experts on CUDA: loaded matrices in stacks, and the kernels for steps of any size. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.runtime.activation import Activation, Clamp
from engine.runtime.cuda.experts import choose_tile, combine, down, gate_and_up
from engine.runtime.cuda.fp8_linear import Fp8Linear
from engine.runtime.cuda.packed import Rows
from engine.runtime.cuda.packed_linear import PackedProduct
from engine.runtime.cuda.routing import sort_by_expert
from engine.runtime.kv_layout import movable
from engine.runtime.schemes.linear import Dense, Linear, Product


class CudaExperts:
    """The experts of one layer, without their router."""

    def __init__(self, gate_up: Rows, down: Rows, activation: Activation | Clamp) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        chosen: Tensor,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the chosen experts, and of a shared one, [T, hidden] in x's type.

        `weights` float32 and `chosen` int32 [T, num_chosen]; `shared` [T, hidden] float32 is multiplied by the sigmoid of
        `shared_gate` [T, 1] float32, if given.
        """
        num_experts, num_pairs = len(self._down.numbers), chosen.numel()
        first = choose_tile(num_pairs, self._gate_up, x.itemsize, is_gated=self._activation.is_gated)
        second = choose_tile(num_pairs, self._down, x.itemsize, is_gated=False)
        assert first.rows == second.rows
        order = sort_by_expert(chosen, num_experts, first.rows)
        inner = gate_and_up(x, self._gate_up, order, chosen.shape[1], self._activation, first)
        parts = down(inner, self._down, order, second)
        return combine(parts, order, weights, x.dtype, shared, shared_gate)


def stack_experts(
    gate_up: Sequence[Linear], down: Sequence[Linear], activation: Activation | Clamp
) -> CudaExperts | None:
    """Return loaded experts as stacks, of which their matrices become views; None if no kernel has their types."""
    stacks = [_stack(linears) for linears in (gate_up, down)]
    if stacks[0] is None or stacks[1] is None:
        return None
    return CudaExperts(stacks[0], stacks[1], activation)


def _stack(linears: Sequence[Linear]) -> Rows | None:
    """Return matrices of one shape and kind as a stack, and leave each a view of its part."""
    rows = [_rows_of(linear.product) for linear in linears]
    held = [each for each in rows if each is not None]
    if len(held) < len(rows) or len({_kind_of(each) for each in held}) > 1:
        return None
    stacked = Rows._make(_join(values) for values in zip(*held, strict=True))
    for at, linear in enumerate(linears):
        _replace(linear.product, Rows._make(x[at] if isinstance(x, Tensor) else x for x in stacked))
    return stacked


def _rows_of(product: Product) -> Rows | None:
    """Return the rows of a product that a kernel multiplies by."""
    if isinstance(product, Dense):
        return Rows(product.weight, product.bias)
    if isinstance(product, Fp8Linear):
        return Rows(product.weight, product.bias, "fp8", product.scales[:, None], group=product.weight.shape[1])
    return product.rows if isinstance(product, PackedProduct) else None


def _kind_of(rows: Rows) -> tuple[object, ...]:
    """Return all that stacked rows must have in common."""
    return tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in rows)


def _join(values: Sequence[Any]) -> Any:
    """Stack tensors; return anything else as it is, which all have in common."""
    first = values[0]
    return torch.stack([movable(value) for value in values]).view(first.dtype) if isinstance(first, Tensor) else first


def _replace(product: Product, rows: Rows) -> None:
    """Give a product other memory with its numbers."""
    if isinstance(product, Dense):
        product.weight, product.bias = rows.numbers, rows.bias
    elif isinstance(product, Fp8Linear):
        assert rows.scales is not None
        product.weight, product.bias, product.scales = rows.numbers, rows.bias, rows.scales[:, 0]
    elif isinstance(product, PackedProduct):
        product.rows = rows
