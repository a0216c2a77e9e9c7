"""The base class of schemes, which is also the plain one, and the matrix that a scheme turns into a product.

A scheme says which tensors a checkpoint has for a part of a matrix, how they become a product on this device, and
whether it is available here. A merged matrix (queries, keys and values; gates and ups) has a bundle of tensors for each
part, with its scales and block edges. Used once, on the thread that builds the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.activation import Activation, code_of
from engine.runtime.native.library import Library, WeightFormat, native
from engine.runtime.native.ops import FLOAT_FORMATS, PANEL, NativeHeads, NativeLinear, holds_floats
from engine.runtime.native.rows import RepackedRows, StoredRows
from engine.runtime.schemes.linear import DenseHeads, HeadProducts, Product, pack
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.cut import Span
from engine.runtime.weights.stored.storage import Storage


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
        return "the native kernels are missing or switched off; see --cpu-kernels, or install a C compiler"
    return None


FOREIGN = "transformers' code runs this model, which multiplies its weights itself"
