"""Grouped products for CUDA: rows that belong to several matrices of one shape, in one product.

torch's grouped product needs rows sorted by matrix. Every shape depends on the number of rows alone, and nothing is
read back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.linear import Dense, Linear
from engine.runtime.ops import act_mul

_ALIGNMENT = 16  # bytes, of rows of x and of the matrices
_FIRST_CAPABILITY = (8, 0)


class Groups(NamedTuple):
    """An order of rows by matrix: `places` sorts them, `owners` has their matrices, `ends` where each matrix's end."""

    places: Tensor  # [R] int64
    owners: Tensor  # [R] int64, ascending
    ends: Tensor  # [matrices] int32


def sort_by_owner(owners: Tensor, num_matrices: int) -> Groups:
    """Return the order of rows whose matrices are `owners` [R] int64."""
    owners, places = owners.sort(stable=True)
    every = torch.arange(num_matrices, device=owners.device)
    return Groups(places, owners, torch.searchsorted(owners, every, right=True, out_int32=True))


class Stack:
    """Matrices of one shape as one tensor [matrices, outputs, inputs]."""

    __slots__ = ("_activation", "_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """Return y [R, outputs] of sorted x [R, inputs]; half as many outputs with an activation."""
        y = F.grouped_mm(x, self._weight.transpose(1, 2), offs=groups.ends)
        if self._bias is not None:
            y += self._bias.index_select(0, groups.owners)
        return y if self._activation is None else act_mul(y, self._activation)


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has a grouped product for this device and type."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def stack(linears: Sequence[Linear]) -> Stack | None:
    """Return loaded matrices of one shape as a stack; each becomes a view of it. None if a scheme packed them."""
    products = [linear.product for linear in linears if isinstance(linear.product, Dense)]
    if len(products) < len(linears):
        return None
    first = products[0].weight
    if any(side * first.itemsize % _ALIGNMENT for side in first.shape):
        return None
    weight = torch.stack([product.weight for product in products])
    biases = [product.bias for product in products if product.bias is not None]
    for linear, product, view in zip(linears, products, weight, strict=True):
        linear.product = Dense(view, product.bias)
    return Stack(weight, torch.stack(biases) if biases else None, linears[0].activation)
