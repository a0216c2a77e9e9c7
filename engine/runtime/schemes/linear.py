"""The one matrix product of every model, y = x W^T + b, and the base class of schemes.

All linears go through `Linear`. How its weight is stored and multiplied is the business of a Product, which a scheme
makes (engine/runtime/schemes/). `pack` makes the one of a weight of floats. On a CPU that is the native library's, if it
has the type: each sum has one order, so a row's result has the same bits in any batch, and a seeded request gives the same
text alone and in a full batch. Otherwise it is F.linear.

A scheme says which tensors a checkpoint has for a part of a matrix, how they become a product on this device, and
whether it is available here. A merged matrix (queries, keys and values; gates and ups) has a bundle of tensors for each
part, with its scales and block edges. The base class is also the plain scheme. Schemes are used once, on the thread that
builds the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.runtime.activation import Activation, code_of
from engine.runtime.cuda.available import uses_triton
from engine.runtime.native.arena import Arena
from engine.runtime.native.build import why_no_kernels
from engine.runtime.native.library import DTYPES, PLAIN, Library, LinearArgs, WeightFormat, native
from engine.runtime.native.ops import FLOAT_FORMATS, PANEL, NativeHeads, NativeLinear, holds_floats, rows_of
from engine.runtime.native.rows import RepackedRows, StoredRows
from engine.runtime.parallel.group import Group
from engine.runtime.weights.checkpoint import Span, StoredTensor
from engine.runtime.weights.stored.storage import Storage

_TORCH_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x."""
    return _TORCH_ACTIVATIONS[activation](x)


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * width], gates first -> activation(gates) * ups, [T, width]; without gates the width stays."""
    if not activation.is_gated:
        return gate_up.relu().square_() if activation is Activation.RELU2 else F.gelu(gate_up)
    if uses_triton(gate_up):
        from engine.runtime.cuda import activation as kernel

        return kernel.act_mul(gate_up, activation)
    gates, ups = gate_up.chunk(2, dim=1)
    return _TORCH_ACTIVATIONS[activation](gates).mul_(ups)


def clamped_mul(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gpt-oss's activation of [T, 2 * width], gates first; the gate has no lower bound."""
    gates, ups = gate_up.float().chunk(2, dim=-1)
    gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
    return ((ups + 1) * gates * (gates * alpha).sigmoid()).to(gate_up.dtype)


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

    def __init__(self) -> None:
        self.weight: NativeLinear | Tensor = torch.empty(0)  # until it is loaded

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows [T, hidden] in the model's type for ids [T] int64."""
        return F.embedding(ids, self.weight) if isinstance(self.weight, Tensor) else self.weight.rows(ids)

    @property
    def described(self) -> LinearArgs:
        """Return the matrix as the native decoder takes it."""
        if isinstance(self.weight, Tensor):
            return LinearArgs(self.weight.data_ptr(), format=PLAIN, dtype=DTYPES[self.weight.dtype])
        return self.weight.args


class ShardedEmbedding(Embedding):
    """Some rows of an embedding, and the ranks that have the others."""

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


class Bundle(NamedTuple):
    """One part of a matrix as it is stored: weight, plain or packed, and scales, zeros, order of inputs.

    `tensors` has the endings of `Scheme.shapes`.
    """

    name: str  # of the module in the checkpoint, as "model.layers.3.self_attn.q_proj"
    first_row: int
    num_rows: int
    tensors: Mapping[str, StoredTensor]
    span: Span = Span()  # of the module in the checkpoint, which other ranks share


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A matrix [outputs, inputs] to multiply by, merged of parts row by row."""

    bundles: Sequence[Bundle]  # in the order of their rows; none: the weight is `dense`
    shape: tuple[int, int]
    dtype: torch.dtype  # of inputs, outputs and bias
    device: torch.device
    bias: Tensor | None = None
    activation: Activation | None = None  # with one the rows are gates, then as many ups
    is_head: bool = False
    dense: Tensor | None = None  # the weight in `dtype`, if it is there already


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What decides which schemes are available."""

    has_gguf_rows: bool  # the weights come from a GGUF file
    is_dtype_named: bool  # by --dtype
    device: torch.device
    dtype: torch.dtype
    is_own: bool  # Quire's decoder runs the model
    library: Library | None  # of native kernels
    storage: Storage = field(default_factory=Storage)  # of the checkpoint's matrices


class Scheme:
    """Weights as floats, copied or dequantised, and multiplied in the model's type."""

    is_native = False  # the native library multiplies, which adds adapters' terms in float32 and bfloat16 only

    def __init__(self, storage: Storage | None = None) -> None:
        """`storage` says how the checkpoint stores its matrices; plain if left out."""
        self.storage = storage or Storage()

    @classmethod
    def is_default(cls, here: Circumstances) -> bool:  # noqa: ARG003 - for others
        """Return whether --quantization auto means this scheme."""
        return False

    @classmethod
    def refusal(cls, here: Circumstances) -> str | None:  # noqa: ARG003 - for others
        """Return why it is not available, after "--quantization is ..., but"; None if it is."""
        return None

    def shapes(self, name: str, num_rows: int, num_inputs: int) -> Mapping[str, tuple[int, ...]]:
        """Return the tensors that store a part of a matrix: the endings of their names, and shapes.

        `name` is the module's, as lists of exceptions have it.
        """
        return self.storage.shapes(name, num_rows, num_inputs)

    def dequantise(self, bundle: Bundle, rows: Tensor) -> None:
        """Write a part's weights to rows [rows, inputs] in the model's type."""
        self.storage.dequantise(bundle.name, bundle.tensors, rows)

    def dense(self, matrix: Matrix) -> Tensor:
        """Return a matrix's weight [outputs, inputs] in the model's type."""
        if matrix.dense is not None:
            return matrix.dense
        weight = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
        for bundle in matrix.bundles:
            self.dequantise(bundle, weight.narrow(0, bundle.first_row, bundle.num_rows))
        return weight

    def product(self, matrix: Matrix) -> Product:
        """Return the product with a matrix; this one dequantises it.

        Rows of floats are packed as they are read, without a tensor in between.
        """
        library, stored = native(), stored_rows(matrix)
        if library and stored is not None and holds_floats(stored, matrix.shape[1], matrix.dtype):
            return native_product(library, FLOAT_FORMATS[matrix.dtype], stored, matrix)
        return pack(self.dense(matrix), matrix.bias, matrix.activation)

    def embedding(self, matrix: Matrix) -> NativeLinear | Tensor:
        """Return a matrix whose rows are looked up: packed, or a weight in the model's type."""
        return self.dense(matrix)

    def heads(self, matrix: Matrix, num_heads: int) -> HeadProducts:
        """Return the products of heads with matrices of their own, which are the rows of one.

        The native library's have the same bits in any batch. Its panels are cut between heads, so heads whose rows are
        no multiple of a panel are dequantised and padded.
        """
        library, (num_rows, num_inputs) = native(), matrix.shape
        num_outputs = num_rows // num_heads
        if library is not None and matrix.device.type == "cpu":
            whole = matrix
            if num_outputs % PANEL:
                weight = F.pad(self.dense(matrix).unflatten(0, (num_heads, -1)), (0, 0, 0, -num_outputs % PANEL))
                weight = weight.flatten(0, 1)
                whole = replace(matrix, bundles=(), shape=(len(weight), num_inputs), dense=weight)
            product = self.product(whole)
            if isinstance(product, NativeLinear):
                return NativeHeads(library, product, num_heads, num_outputs)
        return DenseHeads(self.dense(matrix).unflatten(0, (num_heads, -1)))

    def summary(self) -> str:
        """Return a line for the log after loading; "" for none."""
        return ""


def native_product(
    library: Library, weight_format: WeightFormat, parts: Sequence[StoredRows | RepackedRows], matrix: Matrix
) -> NativeLinear:
    """Return the native library's product with a matrix of these rows."""
    activation = code_of(matrix.activation)
    return NativeLinear(library, weight_format, parts, matrix.shape[1], matrix.dtype, matrix.bias, activation)


def stored_rows(matrix: Matrix) -> list[StoredRows] | None:
    """Return the rows of a matrix on the CPU as the files have them, part by part; None if one lies otherwise."""
    found = [bundle.tensors[".weight"].rows for bundle in matrix.bundles if set(bundle.tensors) == {".weight"}]
    readers = [read for read in found if read is not None]
    if matrix.device.type != "cpu" or not readers or len(readers) < len(matrix.bundles):
        return None
    return [read() for read in readers]


def native_refusal(here: Circumstances) -> str | None:
    """Return why the native library cannot multiply the weights, as `Scheme.refusal` does."""
    if here.device.type != "cpu":
        return f"quantised weights are for a CPU, and the device is {here.device}; choose fp8"
    if not here.is_own:
        return FOREIGN
    if here.library is None:
        return why_no_kernels()
    return None


FOREIGN = "transformers' code runs this model, which multiplies its weights itself"
