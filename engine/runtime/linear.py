"""The one matrix product of every model: y = x W^T + b.

All linears go through `Linear`, so other ways to store or multiply a weight are added here, and models do not change.
On a CPU the weight is packed once, for the first of these that applies:

- the native library's product with quantised weights: rows of a GGUF file as stored, or int8 on request.
- the native library's product. Each sum has one order, so a row's result has the same bits in any batch, and a seeded
  request gives the same text alone and in a full batch.
- oneDNN's layout, through private operators of torch, which are tried on a small matrix first: 23 ms a step of the
  default model instead of 35.
- F.linear, if none of these works.

On CUDA it is F.linear, or where the weight is made as float8_e4m3fn the product of cuda/fp8_linear.py, for which rows
are quantised as they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.native.arena import Arena
from engine.runtime.native.library import LinearArgs, native
from engine.runtime.native.ops import NativeLinear, PackedAddend, PackedLinear
from engine.runtime.native.quantised import QuantisedLinear, QuantisedRows
from engine.runtime.ops import act_mul
from engine.runtime.weights.checkpoint import StoredTensor

if TYPE_CHECKING:
    from engine.runtime.cuda.fp8_linear import Fp8Linear

Kernel = Callable[[Tensor], Tensor]
FP8_MULTIPLE = 16  # multiple required of both dimensions of a weight
FP8_FIRST_CAPABILITY = (9, 0)  # compute capability; the first with a product that scales every row
_CODES = {None: 0, Activation.SILU: 1, Activation.GELU_TANH: 2, Activation.GELU: 3}  # as in quire_cpu.h


class Quantization(Enum):
    """How weights of linears are stored, by the names of --quantization."""

    NONE = "none"
    GGUF = "gguf"  # as stored in the file
    INT8 = "int8"
    FP8 = "fp8"


class Addend(NamedTuple):
    """A term added to some rows of a product before its activation: low [R, rank] up^T.

    rows [R] int64 ascend. `up` is packed for the same activation but does not apply it.
    """

    rows: Tensor
    low: Tensor
    up: Linear


class Linear:
    """A weight [outputs, inputs] and an optional bias, uninitialised until filled.

    A part of the weight may be `keep`t in its file's format instead; the unwritten part of `weight` then takes no
    memory. A weight of float8_e4m3fn must be kept, because copying would lose the scales. With an activation the weight
    is gates and then as many ups, and y = activation(gates x) * ups x.
    """

    __slots__ = ("_activation", "_fp8", "_kept", "_kernel", "_quantization", "bias", "shape", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: Quantization = Quantization.NONE,
        activation: Activation | None = None,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = (weight.shape[0], weight.shape[1])  # known for a packed weight too
        self._quantization = quantization
        self._activation = activation
        self._kept: dict[int, StoredTensor] = {}
        self._kernel: Kernel = self._plain
        self._fp8: Fp8Linear | None = None
        if weight.dtype == torch.float8_e4m3fn:
            from engine.runtime.cuda.fp8_linear import Fp8Linear  # imports Triton, which a CPU-only machine may lack

            self._kernel = self._fp8 = Fp8Linear(weight, bias)

    def __call__(self, x: Tensor, addends: Sequence[Addend] = ()) -> Tensor:
        """Return [T, outputs] of x [T, inputs], half as many outputs with an activation.

        No row is in two addends.
        """
        if isinstance(self._kernel, NativeLinear):
            packed = [PackedAddend(rows, low, up.args) for rows, low, up in addends if up.args is not None]
            assert len(packed) == len(addends), "a matrix with addends is packed"
            return self._kernel(x, addends=packed)
        y = self._kernel(x)
        for rows, low, up in addends:
            y.index_add_(0, rows, up._kernel(low))  # noqa: SLF001 - its product, without the activation
        return y if self._activation is None else act_mul(y, self._activation)

    def in_float32(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the product in float32, in `out` if given.

        The sums are not rounded in between if the native library computes it, or CUDA from weights of 16 bits."""
        if isinstance(self._kernel, NativeLinear):
            y = self._kernel(x, torch.float32)
        elif self._kernel == self._plain and self._activation is None and _has_float32_products(x.device, x.dtype):
            y = torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
            if self.bias is not None:
                y += self.bias
            return y
        else:
            y = self(x).float()
        return y if out is None else out.copy_(y)

    @property
    def rows(self) -> Callable[[Tensor], Tensor] | None:
        """Return unpacked rows [T, inputs] of the weight for ids [T], where that is possible."""
        return self._kernel.rows if isinstance(self._kernel, PackedLinear) else None

    def keep(self, first_row: int, stored: StoredTensor) -> None:
        """Keep rows from `first_row` on quantised, as in `stored`; fp8 quantises them now."""
        if self._fp8 is not None:
            self._fp8.load(first_row, stored.shape[0], stored.copy_to)
        else:
            self._kept[first_row] = stored

    def pack(self, arena: Arena | None = None) -> None:
        """Reorder the loaded weight for this machine if that helps; then `weight` is empty.

        The native library's packed weight goes to `arena`, if given.
        """
        if self.weight.device.type != "cpu" or self._fp8 is not None:
            return
        library, code = native(), _CODES[self._activation]
        quantised = self._quantised()
        if library and quantised:
            self._kernel = QuantisedLinear.from_gguf(
                library, quantised, self.weight.shape[1], self.weight.dtype, self.bias, code
            )
        elif library and self._quantization is Quantization.INT8:
            self._kernel = QuantisedLinear.int8(library, self.weight, self.bias, code)
        elif library and PackedLinear.fits(self.weight):
            self._kernel = PackedLinear(library, self.weight, self.bias, code, arena)
        elif _prepacking_works(self.weight.dtype):
            packed, bias = torch.ops.mkldnn._reorder_linear_weight(self.weight, None), self.bias  # noqa: SLF001 - probed
            self._kernel = lambda x: _prepacked_linear(x, packed, bias)
        else:
            return
        self.weight = self.weight.new_empty(0)

    @property
    def args(self) -> LinearArgs | None:
        """Return the native library's description of the packed matrix, if it multiplies it."""
        return self._kernel.args if isinstance(self._kernel, NativeLinear) else None

    @property
    def activation(self) -> Activation | None:
        """Return the activation of the product."""
        return self._activation

    @property
    def is_native(self) -> bool:
        """Return whether the native library multiplies the weight."""
        return isinstance(self._kernel, NativeLinear)

    def _quantised(self) -> list[QuantisedRows]:
        """Return the kept parts if they are the whole weight; else write them to `weight`."""
        kept, self._kept = sorted(self._kept.items()), {}
        if sum(stored.shape[0] for _, stored in kept) == self.weight.shape[0]:
            return [stored.quantised() for _, stored in kept if stored.quantised is not None]
        for first_row, stored in kept:
            stored.copy_to(self.weight[first_row : first_row + stored.shape[0]])
        return []

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


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


def _prepacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001 - probed


@cache
def _prepacking_works(dtype: torch.dtype) -> bool:
    """Return whether the private operators exist here and agree with F.linear."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(3, 64, generator=generator).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001 - probed
        found = _prepacked_linear(x, packed, None)
    except (AttributeError, RuntimeError, NotImplementedError):  # no such operator, or not for this type or machine
        return False
    return torch.allclose(found.float(), F.linear(x, weight).float(), rtol=1e-2, atol=1e-2)
