"""Binds the C library: structures, entry points, and the choice of instruction set.

ctypes releases the GIL during a call. This module does not check shapes; the callers, which hold the tensors, do. The
library has its own team of threads (team.c). Engine thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from struct import Struct
from typing import Any

import torch

from engine.core.errors import ComputeError, ConfigError, ModelLoadError
from engine.runtime.native.arena import Arena
from engine.runtime.native.build import find_library
from engine.runtime.native.packer import Packer

_log = logging.getLogger(__name__)


class GroupError(RuntimeError):
    """Another rank of the model did not take part in a call in time, or ended."""


class Isa(IntEnum):
    """Instruction sets the kernels are compiled for, in rising order."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512BF16 = 3


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def _fields(**groups: type) -> Sequence[tuple[str, type]]:
    """Return a structure's fields, in the header's order, from names joined by two underscores."""
    return [(name, kind) for names, kind in groups.items() for name in names.split("__")]


class Pool(Structure):
    """One layer's K and V, or latents."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(
        k__v=c_void_p,
        head_stride__block_stride__num_kv_heads__head_dim__block_size__value_dim=c_int64,
        dtype__is_int8=c_int32,
    )


class StoreArgs(Structure):
    """New K and V rows, and their slots."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("pool", Pool),
        *_fields(k__v=c_void_p, k_stride__v_stride__num_tokens=c_int64, slots=c_void_p),
    ]


class AttendArgs(Structure):
    """A flat batch over one layer's pool."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("pool", Pool),
        *_fields(
            q__out=c_void_p,
            q_stride__num_heads__num_slices__table_stride=c_int64,
            query_starts__context_lens__block_tables__sinks=c_void_p,
            window=c_int64,
            scale__softcap=c_float,
        ),
    ]


class WeightFormat(IntEnum):
    """How a weight matrix is held."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    Q4 = 3
    Q4_MIN = 4
    Q8 = 5
    Q8_HALF = 6
    Q8_HALF_MIN = 7
    Q2_HALF_MIN = 8
    Q3_HALF = 9
    Q5 = 10
    Q5_MIN = 11
    Q6_HALF = 12
    Q6_HALF_MIN = 13
    IQ4 = 14
    IQ3_XXS = 15
    IQ3_S = 16
    MXFP4 = 17
    Q4_SUPER = 18
    Q5_SUPER = 19


class LinearArgs(Structure):
    """A packed weight and its bias; `activation` is 0 unless the weight is gates and ups."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(packed__scales__bias=c_void_p, n__k=c_int64, format__dtype__activation=c_int32)


class CodesArgs(Structure):
    """Codes in a weight file, of which rows are made."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(
        scales__minimums__shifts=c_void_p,
        k__row_bytes__num_groups__group_blocks__scale_rows=c_int64,
        layout__bits__shift=c_int32,
    )


class RowsArgs(Structure):
    """Rows of a weight file: their address, or an open file and an offset."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        *_fields(rows__grid=c_void_p),
        ("codes", POINTER(CodesArgs)),
        *_fields(offset__row_bytes__num_rows__step=c_int64, kind__file=c_int32),
    ]


class PackArgs(Structure):
    """Rows of weights to be packed."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("stored", RowsArgs),
        *_fields(packed__scales=c_void_p, first_row__n__k__head_rows=c_int64, format__activation=c_int32),
        *_fields(first_block__num_blocks=c_int64),
    ]


class DequantArgs(Structure):
    """Quantised rows to be written as floats."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [("stored", RowsArgs), *_fields(out=c_void_p, k=c_int64, dtype=c_int32)]


class GemmArgs(Structure):
    """y = x w^T + bias."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("w", LinearArgs),
        *_fields(x__rows__y=c_void_p, m__x_stride__y_stride=c_int64, y_dtype=c_int32, addends=c_void_p),
    ]


class HeadsArgs(Structure):
    """Each head's product with its matrix."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(heads__x__y=c_void_p, num_heads__m__x_stride__x_step__y_stride__y_step=c_int64)


class NormArgs(Structure):
    """residual += alpha * delta; out = norm(residual) * weight."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(
        residual__delta__weight__out__packs=c_void_p,
        rows__width__residual_stride__delta_stride__out_stride=c_int64,
        dtype__weight_dtype__stream_dtype=c_int32,
        alpha__eps=c_float,
    )


class RopeArgs(Structure):
    """Head norms and rotation, in place."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(
        qk__cos__signed_sin__q_weight__k_weight=c_void_p,
        tokens__stride__num_heads__num_kv_heads__head_dim__rope_dim=c_int64,
        dtype__weight_dtype__angle_dtype=c_int32,
        eps=c_float,
    )


PLAIN = -1  # the format of rows that are not packed


class EmbedArgs(Structure):
    """out = scale * table[ids]; `format` is the WeightFormat of panels, or PLAIN."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(table__ids__out=c_void_p, rows__width=c_int64, dtype__format=c_int32, scale=c_float)


class NormWeight(Structure):
    """A norm's weight, or none."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(weight=c_void_p, dtype=c_int32)


class RotaryArgs(Structure):
    """Frequencies of one rotary embedding."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(inverse=c_void_p, dim=c_int64, magnitude=c_float)


class RouterArgs(Structure):
    """How rows choose experts."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("gate", LinearArgs),
        *_fields(
            correction=c_void_p,
            num_experts__num_chosen__num_groups__num_chosen_groups=c_int64,
            scoring__group_scoring__is_normalised=c_int32,
            scale=c_float,
        ),
    ]


class MixtureArgs(Structure):
    """A mixture of experts."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("router", RouterArgs),
        ("shared_gate", LinearArgs),
        *_fields(
            gate_up__down=c_void_p,
            gate_up_formats__down_formats=c_uint32,
            has_shared=c_int32,
            clamp_alpha__clamp_limit=c_float,
        ),
    ]


class MixtureCall(Structure):
    """The rows of a mixture's call."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(moe__x__y__chosen__weights=c_void_p, rows=c_int64)


class LatentArgs(Structure):
    """A layer's matrices of latents."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("queries", LinearArgs),
        *_fields(keys__values=c_void_p, rank__nope_dim__rope_dim=c_int64, is_interleaved=c_int32, eps=c_float),
    ]


class LayerArgs(Structure):
    """One layer of a decoder and its pool."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        *((name, LinearArgs) for name in ("qkv", "o", "gate_up", "down")),
        *_fields(latent__moe__sinks=c_void_p),
        *_fields(before_attention__after_attention__before_mlp__after_mlp__q__k=NormWeight),
        ("pool", Pool),
        *_fields(store__attend=c_void_p, window__rotary=c_int64),
    ]


class DecoderArgs(Structure):
    """A whole decoder."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        *_fields(layers__rotaries__embedding=c_void_p, norm=NormWeight),
        *_fields(num_layers__num_rotaries__hidden__intermediate__num_heads__num_kv_heads__head_dim=c_int64),
        *_fields(dtype__qk_norm__embedding_format=c_int32),
        *_fields(eps__embedding_scale__residual_scale__attention_scale__softcap__qkv_clip=c_float),
        *_fields(group=c_void_p, first_id__num_ids=c_int64),
    ]


class LowRankArgs(Structure):
    """Two thin matrices, the second an addend's `up`; without the first, no term."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(down__up=LinearArgs)


class AdapterLayerArgs(Structure):
    """The terms that an adapter adds to a layer's products."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(qkv__o__gate_up__down__q_b=LowRankArgs)


class AdaptersArgs(Structure):
    """The adapters of a step, and the adapter of each row."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(layers__of_rows=c_void_p, num=c_int64)


class ForwardArgs(Structure):
    """A step of a decoder."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(
        decoder__ids__positions__rows__hidden=c_void_p,
        num_tokens__num_rows=c_int64,
        adapters=AdaptersArgs,
        streams__stream_layers=c_void_p,
        num_streams=c_int64,
    )


class GroupArgs(Structure):
    """One process's view of the ranks that share memory."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(shared=c_void_p, timeout_ms=c_int64, rank__size__spins=c_int32, calls=c_uint32)


# How one row is drawn: top_p, temperature, lowest_score, top_k, seed, position. Packed instead of a Structure: there is
# one for each token of a step, and packing takes a tenth of the time.
DRAW = Struct("dffiQQ")


class Draw(Structure):
    """What DRAW packs."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = _fields(top_p=c_double, temperature__lowest_score=c_float, top_k=c_int32, seed__position=c_uint64)


class SampleArgs(Structure):
    """ids = one token for each row of logits; the logits are overwritten."""

    __slots__ = ()  # so that setting a name that is no field fails
    _fields_ = [
        ("logits", c_void_p),
        ("draws", c_char_p),  # a DRAW for each row
        *_fields(ids__is_finite=c_void_p, rows__vocab_size=c_int64),
    ]


MIRRORS: Mapping[str, type[Structure]] = {
    "pool": Pool,
    "store_args": StoreArgs,
    "attend_args": AttendArgs,
    "linear": LinearArgs,
    "packed_codes": CodesArgs,
    "stored_rows": RowsArgs,
    "quant_source": PackArgs,
    "dequant_args": DequantArgs,
    "gemm_args": GemmArgs,
    "heads_args": HeadsArgs,
    "norm_args": NormArgs,
    "rope_args": RopeArgs,
    "embed_args": EmbedArgs,
    "norm": NormWeight,
    "rotary": RotaryArgs,
    "router": RouterArgs,
    "moe": MixtureArgs,
    "moe_args": MixtureCall,
    "latent": LatentArgs,
    "layer": LayerArgs,
    "decoder": DecoderArgs,
    "low_rank": LowRankArgs,
    "adapter_layer": AdapterLayerArgs,
    "adapters": AdaptersArgs,
    "forward_args": ForwardArgs,
    "group": GroupArgs,
    "draw": Draw,
    "sample_args": SampleArgs,
}


def check_layout(functions: ctypes.CDLL, mirrors: Mapping[str, type[Structure]] = MIRRORS) -> None:
    """Raise ConfigError unless every mirror has the fields of its structure, in their places (layout.c)."""
    numbers = POINTER(c_int32)()
    function = functions.quire_layout
    function.restype = c_char_p
    structures = function(byref(numbers)).decode().split(";")[:-1]
    if wrong := mirrors.keys() ^ {text.partition(":")[0] for text in structures}:
        raise _wrong_layout(f"only one of both has struct {min(wrong)}")
    at = 0
    for text in structures:
        name, _, listed = text.partition(":")
        mirror, fields = (
            mirrors[name],
            [field.rpartition("[PLACE_")[2].rstrip("]").lower() for field in listed.split(", ")],
        )
        if wrong := {field for field, *_ in mirror._fields_} ^ set(fields):
            raise _wrong_layout(f"only one of both has the field {min(wrong)} of struct {name}")
        for index, field in enumerate(fields):
            theirs = (numbers[at + 1 + 2 * index], numbers[at + 2 + 2 * index])
            ours = getattr(mirror, field)
            if (ours.offset, ours.size) != theirs:
                raise _wrong_layout(
                    f"field {field} of struct {name} has {ours.size} bytes at {ours.offset}, and {theirs[1]} at {theirs[0]} in C"
                )
        if ctypes.sizeof(mirror) != numbers[at]:
            raise _wrong_layout(f"struct {name} has {ctypes.sizeof(mirror)} bytes, and {numbers[at]} in C")
        at += 1 + 2 * len(fields)
    if DRAW.size != ctypes.sizeof(Draw):
        raise _wrong_layout(f"struct draw has {ctypes.sizeof(Draw)} bytes, and {DRAW.size} as it is packed")


def _wrong_layout(why: str) -> ConfigError:
    return ConfigError(f"The native kernels and engine/runtime/native/library.py differ: {why}; install Quire again.")


class Library:
    """The loaded kernels; each method raises ComputeError if memory runs out."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be loaded here, ConfigError for one of other structures."""
        functions = ctypes.CDLL(path)
        check_layout(functions)
        self._set_threads = _declare(functions.quire_set_threads, None, c_int32)
        self._use_isa = _declare(functions.quire_use_isa, c_int32, c_int32)
        # Keeps freed memory in the process from now on, up to 256 MiB, for the next step.
        self.keep_memory = _declare(functions.quire_keep_memory, None)
        # The bytes of a packed matrix in a quantised format: format, rows, columns.
        self.quant_bytes = _declare(functions.quire_quant_bytes, c_int64, c_int32, c_int64, c_int64)
        self._low_dtype = _declare(functions.quire_low_dtype, c_int32, POINTER(LinearArgs))
        self.store = _entry(functions.quire_store, StoreArgs)
        self.attend = _entry(functions.quire_attend, AttendArgs)
        self.gemm = _entry(functions.quire_gemm, GemmArgs)
        self.gemm_heads = _entry(functions.quire_gemm_heads, HeadsArgs)
        self.pack = _entry(functions.quire_pack, PackArgs)
        # Writes rows that are made of codes to an address.
        self.repack = _declare(functions.quire_repack, c_int32, POINTER(RowsArgs), c_void_p)
        self.dequantise = _entry(functions.quire_dequantise, DequantArgs)
        self.add_rms_norm = _entry(functions.quire_add_rms_norm, NormArgs)
        self.rope = _entry(functions.quire_rope, RopeArgs)
        self.embed = _entry(functions.quire_embed, EmbedArgs)
        self.forward = _entry(functions.quire_forward, ForwardArgs)
        self.mixture = _entry(functions.quire_moe, MixtureCall)
        self.sample = _entry(functions.quire_sample, SampleArgs)
        ranks = POINTER(GroupArgs)
        self.group_bytes = _declare(functions.quire_group_bytes, c_int64, c_int32)
        self.group_abort = _declare(functions.quire_group_abort, None, ranks)
        self.group_sum = _checked(functions.quire_group_sum, ranks, c_void_p, c_int64)
        self.group_gather = _checked(functions.quire_group_gather, ranks, c_void_p, c_void_p, c_int64, c_int64, c_int64)
        self.group_broadcast = _checked(functions.quire_group_broadcast, ranks, c_void_p, c_int64)
        self.best_isa = Isa(functions.quire_best_isa())
        self.weights = Arena()
        self.packer = Packer()
        self.isa = Isa.PORTABLE
        self.use_isa(self.best_isa)
        self.num_threads = 1
        self.use_threads(torch.get_num_threads())

    def use_isa(self, isa: Isa) -> None:
        """Choose the kernels; raises ValueError for what this machine does not have."""
        if self._use_isa(isa) != 0:
            raise ValueError(f"This machine has no {isa.name}; its best is {self.best_isa.name}.")
        self.isa = isa

    def use_threads(self, num_threads: int) -> None:
        """Set how many threads a call may use, the calling one included."""
        self._set_threads(num_threads)
        self.num_threads = num_threads

    def low_dtype(self, up: LinearArgs) -> torch.dtype:
        """Return the type of the factors that `up` is multiplied with."""
        return next(dtype for dtype, code in DTYPES.items() if code == self._low_dtype(up))


def _declare(function: ctypes._NamedFuncPointer, result: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    return function


def _entry(function: ctypes._NamedFuncPointer, args: type[Structure]) -> Callable[[Structure], None]:
    return _checked(function, POINTER(args))  # by which ctypes passes a structure by reference


def _checked(function: ctypes._NamedFuncPointer, *arguments: Any) -> Callable[..., None]:
    _declare(function, c_int32, *arguments)
    function.errcheck = _check  # type: ignore[assignment] # typeshed wants a result of the C type
    return function


_CANNOT_READ, _NO_GROUP = 4, 5  # as in quire_cpu.h


def _check(status: int, *_: object) -> None:
    if status == _CANNOT_READ:
        raise ModelLoadError("A weight file became shorter or unreadable while it was being loaded; start again.")
    if status == _NO_GROUP:
        raise GroupError("A rank of the model did not take part in a step.")
    if status != 0:
        raise ComputeError("A native kernel found no memory for its scratch space; lower --max-num-batched-tokens.")


_switch = {"is_on": True}


def native() -> Library | None:
    """Return the library, None if it is missing, switched off or unusable."""
    return _load() if _switch["is_on"] else None


def choose_kernels(setting: str) -> None:
    """Set the kernels that `native` returns, from --cpu-kernels.

    Raises ConfigError for an instruction set that this machine does not have.
    """
    _switch["is_on"] = setting != "off"
    library = native()
    if setting in ("auto", "off"):
        if library is not None:
            library.use_isa(library.best_isa)
        return
    if library is None:
        raise ConfigError(
            f"--cpu-kernels is {setting!r}, but there are no native kernels for this machine and no C compiler to make "
            "them; install one (cc, gcc or clang), or leave the setting out."
        )
    try:
        library.use_isa(Isa[setting.upper()])
    except ValueError as error:
        raise ConfigError(f"--cpu-kernels is {setting!r}. {error}") from None


@cache
def _load() -> Library | None:
    path = find_library()
    if path is None:
        return None
    try:
        library = Library(str(path))
    except (OSError, AttributeError) as error:
        _log.debug("no native kernels from %s: %s", path, error)
        return None
    _log.debug("native kernels for %s from %s", library.isa.name, path)
    return library
