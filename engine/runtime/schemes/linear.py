"""The one matrix product of every model: y = x W^T + b.

All linears go through `Linear`. How its weight is stored and multiplied is the business of a Product, which a scheme
makes (engine/runtime/schemes/). `pack` makes the one of a weight of floats. On a CPU that is the native library's, if it
has the type: each sum has one order, so a row's result has the same bits in any batch, and a seeded request gives the same
text alone and in a full batch. Otherwise it is F.linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.activation import Activation, code_of
from engine.runtime.native.arena import Arena
from engine.runtime.native.library import LinearArgs, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear, rows_of
from engine.runtime.parallel.group import Group
from engine.runtime.schemes.activations import act_mul

Product = Callable[[Tensor], Tensor]  # [T, inputs] -> [T, outputs], without the activation if it is not native
HeadProducts = Callable[[Tensor, Tensor], None]  # x [T, heads, inputs], out [T, heads, outputs]


class Addend(NamedTuple):
    """A term added to some rows of a product before its activation: low [R, rank] up^T.

    rows [R] int64 ascend. `up` is packed for the same activation but does not apply it.
    """

    rows: Tensor
    low: Tensor
    up: Linear


class Linear:
    """A product and its activation.

    With an activation the weight is gates and then as many ups, and y = activation(gates x) * ups x; squared ReLU has no gates.
    """

    __slots__ = ("activation", "product")

    def __init__(self, product: Product, activation: Activation | None = None) -> None:
        """A native product must have been packed for the same activation."""
        self.product = product
        self.activation = activation

    def __call__(self, x: Tensor, addends: Sequence[Addend] = ()) -> Tensor:
        """Return [T, outputs] of x [T, inputs], half as many outputs with gates.

        No row is in two addends.
        """
        if isinstance(self.product, NativeLinear):
            packed = [(rows, low, up.args) for rows, low, up in addends if up.args is not None]
            assert len(packed) == len(addends), "a matrix with addends is packed"
            return self.product(x, addends=packed)
        y = self.product(x)
        for rows, low, up in addends:
            y.index_add_(0, rows, up.product(low))
        return y if self.activation is None else act_mul(y, self.activation)

    def in_float32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product in float32, in `out` if given.

        The sums are not rounded in between if the native library computes it, or CUDA from weights of 16 bits.
        """
        if isinstance(self.product, NativeLinear):
            y = self.product(x, torch.float32)
        elif isinstance(self.product, Dense) and not self.activation and _has_float32_products(x.device, x.dtype):
            return self.product.in_float32(x, out)
        else:
            y = self(x).float()
        return y if out is None else out.copy_(y)

    @property
    def weight(self) -> NativeLinear | Tensor | None:
        """Return the matrix if its rows can be looked up, as an embedding does: packed, or as floats."""
        if isinstance(self.product, NativeLinear):
            return self.product if self.product.has_rows else None
        return self.product.weight if isinstance(self.product, Dense) else None

    @property
    def args(self) -> LinearArgs | None:
        """Return the native library's description of the matrix, None if it does not multiply it."""
        return self.product.args if isinstance(self.product, NativeLinear) else None


class Embedding:
    """A matrix [vocabulary, hidden] whose rows are looked up; perhaps that of a head."""

    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight: NativeLinear | Tensor = torch.empty(0)  # until it is loaded

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows [T, hidden] in the model's type for ids [T] int64."""
        return F.embedding(ids, self.weight) if isinstance(self.weight, Tensor) else self.weight.rows(ids)

    @property
    def described(self) -> Tensor | LinearArgs:
        """Return the matrix as the native decoder takes it."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight.args


class ShardedEmbedding(Embedding):
    """Some rows of an embedding, and the ranks that have the others."""

    __slots__ = ("_first", "_group", "_num")

    def __init__(self, group: Group, first: int, num: int) -> None:
        super().__init__()
        self._group, self._first, self._num = group, first, num

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows [T, hidden] for ids [T] int64; all ranks call it."""
        local = ids - self._first
        is_here = (local >= 0) & (local < self._num)
        x = super().__call__(local.where(is_here, 0)).masked_fill_(~is_here[:, None], 0)
        self._group.all_reduce(x)
        return x


class Dense:
    """A weight of floats [outputs, inputs], multiplied by torch."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def in_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return sums in float32, where the device makes them of 16-bit numbers."""
        y = torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        if self.bias is not None:
            y += self.bias
        return y


class DenseHeads:
    """A matrix of floats for each head, multiplied by torch."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [heads, outputs, inputs]."""
        self._weight = weight.contiguous().mT

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the products of x [T, heads, inputs] to out [T, heads, outputs]."""
        out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))


def pack(
    weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None, arena: Arena | None = None
) -> Product:
    """Return the product with a weight of floats, reordered for this machine if that helps.

    The native library's packed weight goes to `arena`, if given.
    """
    library = native()
    kind, num_inputs = FLOAT_FORMATS.get(weight.dtype), weight.shape[1]
    is_fit = weight.device.type == "cpu" and weight.is_contiguous() and num_inputs % 2 == 0
    if library is None or kind is None or not is_fit:
        return Dense(weight, bias)
    return NativeLinear(library, kind, [rows_of(weight)], num_inputs, weight.dtype, bias, code_of(activation), arena)


@cache
def _has_float32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch computes float32 products of 16-bit numbers (on CUDA)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        x = torch.zeros((16, 16), dtype=dtype, device=device)
        torch.mm(x, x, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # an older torch, or a build or a device without
        return False
    return True
