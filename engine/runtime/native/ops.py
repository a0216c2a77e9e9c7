"""The library's operations on tensors, with torch operations as a fallback.

Results agree with float64 to one rounding of the tensor's type. CPU tensors; those whose rows are not dense, or of a
type the library does not know, go through torch. Engine thread.

Weights may stay quantised: rows of a GGUF file, or int8 made here. Then x is quantised as well, row by row, while it is packed
for a product: to bytes with a scale for every 32 inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import addressof, pointer
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.files.gguf_kinds import Kind
from engine.runtime.activation import Activation
from engine.runtime.native.arena import Arena
from engine.runtime.native.library import (
    DTYPES,
    CodesArgs,
    DequantArgs,
    EmbedArgs,
    GemmArgs,
    HeadsArgs,
    Library,
    LinearArgs,
    NormArgs,
    PackArgs,
    RopeArgs,
    RowsArgs,
    ScaledLogits,
    WeightFormat,
    native,
)
from engine.runtime.native.rows import RepackedRows, StoredRows, in_halves

_BLOCK = 32  # inputs of a block
_WORTH_A_THREAD = 1 << 20  # weights; fewer are packed sooner than another thread has the GIL again
_UNGATED = (0, *(each.value for each in Activation if not each.is_gated))
PANEL = 32  # weight rows that are interleaved, as in quire_cpu.h
FLOAT_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # of floats in a file, by GGUF's numbers
_FLOATS = {kind: dtype for dtype, kind in FLOAT_KINDS.items()}
_TYPES = {code: dtype for dtype, code in DTYPES.items()}
FLOAT_FORMATS = {torch.float32: WeightFormat.F32, torch.bfloat16: WeightFormat.BF16}


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, alpha: float = 1.0) -> Tensor:
    """Add alpha * delta to residual [T, width] in place; return its RMSNorm times weight.

    `weight` [width] is of the residual's type or float32.
    """
    library = _library_for(residual, weight, *(() if delta is None else (delta,)))
    if library is None or weight.dtype not in (residual.dtype, torch.float32):
        if delta is not None:
            residual.add_(delta, alpha=alpha)
        x = residual.float() if weight.dtype != residual.dtype else residual
        return F.rms_norm(x, weight.shape, weight, eps).to(residual.dtype)
    out = torch.empty(residual.shape, dtype=residual.dtype)
    dtype, (num_rows, width) = DTYPES[residual.dtype], residual.shape
    args = NormArgs(
        residual.data_ptr(), None, weight.data_ptr(), out.data_ptr(),
        rows=num_rows, width=width, residual_stride=residual.stride(0), out_stride=out.stride(0),
        dtype=dtype, weight_dtype=DTYPES[weight.dtype], stream_dtype=dtype, alpha=alpha, eps=eps,
    )  # fmt: skip
    if delta is not None:
        assert delta.shape == residual.shape
        args.delta, args.delta_stride = delta.data_ptr(), delta.stride(0)
    library.add_rms_norm(args)
    return out


def rotate_heads(qk: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotate every head of qk [T, heads, head_dim], in place; tokens need not be adjacent.

    cos and signed_sin [T, rope_dim] are of qk's type, as Rotary makes them; signed_sin contains the sign of the negated
    half.
    """
    dim, rope_dim = qk.shape[2], cos.shape[-1]
    library = _library_for(qk, cos, signed_sin)
    if library is None or qk.stride(1) != dim:
        part = qk[..., :rope_dim]
        turned = torch.addcmul(part * cos[:, None], part.roll(rope_dim // 2, -1), signed_sin[:, None])
        part.copy_(turned)
        return
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    num_tokens, num_heads, dtype = *qk.shape[:2], DTYPES[qk.dtype]
    library.rope(
        RopeArgs(
            qk.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(), tokens=num_tokens, stride=qk.stride(0),
            num_heads=num_heads, head_dim=dim, rope_dim=rope_dim, dtype=dtype, angle_dtype=dtype,
        )
    )  # fmt: skip


def scale_logits(logits: Tensor, multiplier: float, cap: float) -> None:
    """Multiply logits [R, V] float32, then cap them, in place: cap * tanh(x / cap); a cap of 0 is none."""
    library = _library_for(logits) if logits.is_contiguous() else None
    if library is not None:
        library.scale_logits(ScaledLogits(logits.data_ptr(), *logits.shape, multiplier, cap))
        return
    if multiplier != 1.0:
        logits.mul_(multiplier)
    if cap:
        logits.div_(cap).tanh_().mul_(cap)


# A term added to some rows of a product before bias and activation, low [R, rank] up^T: rows [R] int64, which ascend, low,
# and up, packed like the matrix that it is added to: as many rows, the same activation.
PackedAddend = tuple[Tensor, Tensor, LinearArgs]


class NativeLinear:
    """A matrix [outputs, inputs] in a packed form of the library: y = x W^T + b, with the same bits in any batch."""

    def __init__(
        self,
        library: Library,
        weight_format: WeightFormat,
        parts: Sequence[StoredRows | RepackedRows],
        num_inputs: int,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        activation: int = 0,
        arena: Arena | None = None,
    ) -> None:
        """Pack the rows of one matrix into `arena` or the default one, for x and bias of `dtype`.

        Parts may be of several types that the format holds: floats for F32 and BF16, and for INT8, which rounds them. With an activation (a code of quire_cpu.h) the weight is gates and then ups, and
        y = activation(gates) * ups.
        """
        assert bias is None or (bias.dtype is dtype and bias.is_contiguous())
        num_outputs = sum(part.num_rows for part in parts)
        num_rows = -(-num_outputs // PANEL) * PANEL
        if weight_format in FLOAT_FORMATS.values():
            num_bytes = num_rows * num_inputs * dtype.itemsize
        else:
            num_bytes = library.quant_bytes(weight_format, num_outputs, num_inputs)
        codes = (weight_format, DTYPES[dtype], activation)
        kept = library.kept if arena is None and weight_format is not WeightFormat.INT8 else None
        key = None if kept is None else kept.key((*codes, num_inputs, library.isa, library.is_portable), parts)
        found = None if kept is None or key is None else kept.find(key, num_bytes)
        self._packed = (library.weights if arena is None else arena).take(num_bytes) if found is None else found
        if kept is not None and key is not None:
            kept.add(key, self._packed)
        self._scales = torch.zeros(num_rows) if weight_format is WeightFormat.INT8 else None
        self._library, self._bias = library, bias
        addresses = [None if each is None else each.data_ptr() for each in (self._scales, bias)]
        self.args = LinearArgs(self._packed.ctypes.data, *addresses, num_outputs, num_inputs, *codes)
        if found is None:
            self._fill(parts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the panels, without scales of rows."""
        return self._packed.nbytes

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None, addends: Sequence[PackedAddend] = ()) -> Tensor:
        """Return [T, outputs] in x's type or, unrounded, float32, for contiguous x [T, inputs]."""
        linear, library = self.args, self._library
        num_rows, num_inputs = x.shape
        assert x.is_contiguous()
        assert (DTYPES[x.dtype], num_inputs) == (linear.dtype, linear.k)
        num_columns = linear.n // 2 if linear.activation not in _UNGATED else linear.n
        y = torch.empty(num_rows, num_columns, dtype=dtype or x.dtype)
        args = GemmArgs(linear, x.data_ptr(), None, y.data_ptr(), num_rows, num_inputs, num_columns, DTYPES[y.dtype])
        if addends:
            lows = [low.to(library.low_dtype(up)).contiguous() for _, low, up in addends]
            of_rows = torch.zeros(len(x), 2, dtype=torch.int64)  # addresses, in the layout of struct addend
            for (rows, _, up), low in zip(addends, lows, strict=True):
                assert (up.n, up.activation, up.k) == (linear.n, linear.activation, low.shape[1])
                of_rows[rows, 0] = addressof(up)
                of_rows[rows, 1] = low.data_ptr() + torch.arange(len(rows)) * (low.stride(0) * low.itemsize)
            args.addends = of_rows.data_ptr()
        library.gemm(args)
        return y

    def _fill(self, parts: Sequence[StoredRows | RepackedRows]) -> None:
        """Pack the parts in order; if all lie in files, the library's packer may do it later, but not for a small matrix."""
        first_row, calls = 0, []
        for part in parts:
            linear = self.args
            sizes, codes = (first_row, linear.n, linear.k, part.head_rows), (linear.format, linear.activation)
            calls.append(PackArgs(stored_args(part), linear.packed, linear.scales, *sizes, *codes))
            first_row += part.num_rows
        work = partial(_pack, self._library, calls, (self._packed, parts))
        is_large = self.args.n * self.args.k >= _WORTH_A_THREAD
        if is_large and all(part.file is not None for part in parts):
            self._library.packer.run(work)
        else:
            work()

    @property
    def has_rows(self) -> bool:
        """Return whether `rows` can read the matrix: not if it was rounded here."""
        return self._scales is None

    def rows(self, ids: Tensor) -> Tensor:
        """Return unpacked rows [T, inputs] for ids [T] int64, for an embedding."""
        out, linear = torch.empty(len(ids), self.args.k), self.args
        args = EmbedArgs(linear.packed, ids.data_ptr(), out.data_ptr(), *out.shape, linear.dtype, linear.format, 1.0)
        self._library.embed(args)
        return out.to(_TYPES[linear.dtype])


def _pack(library: Library, calls: Sequence[PackArgs], _keep: object) -> None:
    """Pack parts of a matrix, keeping the memory and the files that they name."""
    for args in calls:
        library.pack(args)


def stored_args(part: StoredRows | RepackedRows) -> RowsArgs:
    """Return the library's description of rows: their file if they have one, else their address, and their type's grid.

    It is valid while `part` lives.
    """
    if isinstance(part, RepackedRows):
        args = stored_args(part.codes)
        codes = CodesArgs(
            part.scales.data_ptr(),
            None if part.minimums is None else part.minimums.data_ptr(),
            None if part.shifts is None else part.shifts.data_ptr(),
            part.num_inputs,
            args.row_bytes,
            part.num_groups,
            part.group // _BLOCK,
            part.scale_rows,
            part.layout,
            part.shift,
        )
        args.codes = pointer(codes)  # which keeps it alive
        args.row_bytes, args.num_rows, args.kind = part.row_bytes, part.num_rows, part.kind
        return args
    grid = _grid(part.kind)
    args = RowsArgs(
        offset=part.offset,
        row_bytes=part.rows.shape[1],
        num_rows=len(part.rows),
        kind=part.kind,
        factor=part.factor,
        grid=None if grid is None else grid.ctypes.data,
    )
    if part.file is not None:
        args.file, args.step = part.file.number, part.rows.strides[0]
    else:
        assert part.rows.flags.c_contiguous
        args.rows = part.rows.ctypes.data
    return args


@cache
def _grid(kind: int) -> np.ndarray | None:
    """Return the levels from 0 on of a type's grid, four or eight for each entry; None for a type without one."""
    if kind not in _WITH_GRID:
        return None
    from gguf import quants

    holder: Any = getattr(quants, Kind(kind).name)
    holder.init_grid()
    return np.searchsorted(holder.grid_map, holder.grid.ravel()).astype(np.uint8)


def holds_floats(parts: Sequence[StoredRows], num_inputs: int, dtype: torch.dtype) -> bool:
    """Return whether a matrix of these rows can be packed as floats of `dtype`."""
    return dtype in FLOAT_FORMATS and num_inputs % 2 == 0 and all(part.kind in _FLOATS for part in parts)


def floats_of(rows: StoredRows) -> Tensor | None:
    """Return rows of floats as a tensor in their memory, or that of their file; None for others."""
    if rows.kind not in _FLOATS or not rows.rows.flags.c_contiguous:
        return None
    return torch.from_numpy(rows.rows).view(_FLOATS[rows.kind])


def rows_of(weight: Tensor) -> StoredRows:
    """Return the rows of a contiguous tensor, in its memory."""
    return StoredRows(FLOAT_KINDS[weight.dtype], weight.view(torch.uint8).numpy())


class NativeHeads:
    """A matrix for each head, in the panels of one matrix, with the same bits in any batch."""

    def __init__(self, library: Library, product: NativeLinear, num_heads: int, num_outputs: int) -> None:
        """The product's rows are the heads', each with its `num_outputs` and others up to a multiple of PANEL."""
        linear = product.args
        num_rows = linear.n // num_heads
        assert linear.n % (num_heads * PANEL) == 0
        assert num_rows - PANEL < num_outputs <= num_rows
        assert not linear.bias
        self._library, self._product, self._heads = library, product, (LinearArgs * num_heads)()
        for head, args in enumerate(self._heads):
            args.packed = linear.packed + product.num_bytes // num_heads * head
            args.n, args.k, args.format, args.dtype = num_outputs, linear.k, linear.format, linear.dtype
            if linear.scales:
                args.scales = linear.scales + head * num_rows * torch.float32.itemsize

    @property
    def address(self) -> int:
        """Return the address of the heads' descriptions, valid while this object lives."""
        return addressof(self._heads)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the products of x [T, heads, inputs] to out [T, heads, outputs]; rows of heads are dense."""
        linear = self._heads[0]
        assert x.shape == (len(out), len(self._heads), linear.k)
        assert out.shape == (len(x), len(self._heads), linear.n)
        assert x.stride(2) == out.stride(2) == 1
        assert DTYPES[x.dtype] == DTYPES[out.dtype] == linear.dtype
        args = HeadsArgs(
            addressof(self._heads), x.data_ptr(), out.data_ptr(), *x.shape[1::-1], *x.stride()[:2], *out.stride()[:2]
        )
        self._library.gemm_heads(args)


def _library_for(*tensors: Tensor) -> Library | None:
    """Return the library, if it can read all of these tensors."""
    library = native()
    is_fit = all(x.dtype in DTYPES and x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)
    return library if is_fit else None


class _Needs(NamedTuple):
    """What a row format needs to hold a type without loss: bits, finer scales, minimums.

    A matrix of one type, or of several with the same `exact` format, has that format.
    """

    bits: int
    has_halves: bool
    has_min: bool
    exact: WeightFormat | None = None


_NEEDS: dict[int, _Needs] = {
    Kind.Q4_0: _Needs(4, False, False),
    Kind.Q4_1: _Needs(4, False, True),
    Kind.Q5_0: _Needs(5, False, False),
    Kind.Q5_1: _Needs(5, False, True),
    Kind.Q8_0: _Needs(8, False, False),
    Kind.Q2_K: _Needs(2, True, True),
    Kind.Q3_K: _Needs(3, True, False),
    Kind.Q4_K: _Needs(4, False, True, WeightFormat.Q4_SUPER),
    Kind.Q5_K: _Needs(5, False, True, WeightFormat.Q5_SUPER),
    Kind.Q6_K: _Needs(6, True, False),
    Kind.IQ4_NL: _Needs(8, False, False, WeightFormat.IQ4),
    Kind.IQ4_XS: _Needs(8, False, False, WeightFormat.IQ4),
    Kind.IQ3_XXS: _Needs(8, False, False, WeightFormat.IQ3_XXS),
    Kind.IQ3_S: _Needs(8, False, False, WeightFormat.IQ3_S),
    Kind.IQ2_XXS: _Needs(8, False, False, WeightFormat.IQ2),
    Kind.IQ2_XS: _Needs(8, True, False, WeightFormat.IQ2),
    Kind.IQ2_S: _Needs(8, True, False, WeightFormat.IQ2),
    Kind.IQ1_S: _Needs(8, False, False, WeightFormat.IQ1_S),
    Kind.IQ1_M: _Needs(8, True, False, WeightFormat.IQ1_M),
    Kind.TQ1_0: _Needs(2, False, False),
    Kind.TQ2_0: _Needs(2, False, False),
    Kind.MXFP4: _Needs(8, False, False, WeightFormat.MXFP4),
    Kind.NVFP4: _Needs(8, True, False, WeightFormat.NVFP4),
    Kind.Q1_0: _Needs(8, False, False, WeightFormat.Q1),
    Kind.Q2_0: _Needs(2, False, False),
}
_WITH_GRID = (Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ1_S, Kind.IQ1_M)
_FORMATS = {  # what each row format that holds several types has, smallest first
    WeightFormat.Q2: _Needs(2, False, False),
    WeightFormat.Q2_HALF_MIN: _Needs(2, True, True),
    WeightFormat.Q3_HALF: _Needs(3, True, False),
    WeightFormat.Q4: _Needs(4, False, False),
    WeightFormat.Q4_MIN: _Needs(4, False, True),
    WeightFormat.Q5: _Needs(5, False, False),
    WeightFormat.Q5_MIN: _Needs(5, False, True),
    WeightFormat.Q6_HALF: _Needs(6, True, False),
    WeightFormat.Q6_HALF_MIN: _Needs(6, True, True),
    WeightFormat.Q8: _Needs(8, False, False),
    WeightFormat.Q8_HALF: _Needs(8, True, False),
    WeightFormat.Q8_HALF_MIN: _Needs(8, True, True),
}


def is_served_quantised(kinds: Iterable[int]) -> bool:
    """Return whether a matrix with parts of these GGUF types is multiplied as stored.

    The exponents of MXFP4 have no other row format, so its parts do not mix with those of other types.
    """
    exact = {_NEEDS[kind].exact if kind in _NEEDS else None for kind in kinds}
    return all(kind in _NEEDS for kind in kinds) and (WeightFormat.MXFP4 not in exact or len(exact) == 1)


def format_for(kinds: Sequence[int]) -> WeightFormat:
    """Return the smallest row format that holds all these types without loss."""
    needs = [_NEEDS[kind] for kind in kinds]
    exact = needs[0].exact
    if exact is not None and all(need.exact is exact for need in needs):
        return exact
    wanted = [max(column) for column in zip(*(need[:3] for need in needs), strict=True)]
    return next(name for name, has in _FORMATS.items() if all(a >= b for a, b in zip(has, wanted, strict=False)))


def dequantise(library: Library, stored: StoredRows, out: Tensor) -> None:
    """Write rows as floats to `out` [rows, inputs]: contiguous, on the CPU, of one of DTYPES."""
    if stored.head_rows:
        stored = StoredRows(stored.kind, in_halves(stored.rows, stored.head_rows), factor=stored.factor)
    assert out.is_contiguous()
    assert len(out) == len(stored.rows)
    library.dequantise(DequantArgs(stored_args(stored), out.data_ptr(), out.shape[1], DTYPES[out.dtype]))
