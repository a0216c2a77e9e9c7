"""Binds the C library: structures, whose fields the sources say; entry points; and the choice of instruction set.

ctypes releases the GIL during a call. This module does not check shapes; the callers, which hold the tensors, do. The
library has its own team of threads (team.c). Engine thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, c_char, c_char_p, c_double, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache, partial
from struct import Struct
from typing import Any

import torch

from engine.core.errors import ConfigError
from engine.runtime.native.arena import Arena
from engine.runtime.native.build import (
    PORTABLE_BITS,
    Isa,
    OnCompiled,
    best_isa,
    find_library,
    machine_isas,
    why_no_kernels,
)
from engine.runtime.native.functions import checked, declare, entry
from engine.runtime.native.packed_file import PackedFile
from engine.runtime.native.packer import Packer
from engine.runtime.native.structs import check_layout, mirror, structure

_log = logging.getLogger(__name__)


DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@mirror("pool")
class Pool(Structure):
    """One layer's K and V, or latents."""


@mirror("store_args")
class StoreArgs(Structure):
    """New K and V rows, and their slots."""


@mirror("attend_args")
class AttendArgs(Structure):
    """A flat batch over one layer's pool."""


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
    NVFP4 = 18
    IQ2 = 19
    IQ1_M = 20
    Q1 = 21
    IQ1_S = 22
    Q2 = 23
    Q4_SUPER = 24
    Q5_SUPER = 25


@mirror("linear")
class LinearArgs(Structure):
    """A packed weight and its bias; `activation` is 0 unless the weight is gates and ups."""


CodesArgs = structure("packed_codes")  # codes in a weight file, of which rows are made


@mirror("stored_rows", codes=POINTER(CodesArgs))
class RowsArgs(Structure):
    """Rows of a weight file: their address, or an open file and an offset."""


@mirror("quant_source")
class PackArgs(Structure):
    """Rows of weights to be packed."""


DequantArgs = structure("dequant_args")  # quantised rows to be written as floats
GemmArgs = structure("gemm_args")  # y = x w^T + bias
HeadsArgs = structure("heads_args")  # each head's product with its matrix
NormArgs = structure("norm_args")  # residual += alpha * delta; out = norm(residual) * weight
RopeArgs = structure("rope_args")  # head norms and rotation, in place


PLAIN = -1  # the format of rows that are not packed

EmbedArgs = structure("embed_args")  # out = scale * table[ids]; `format` is the WeightFormat of panels, or PLAIN


@mirror("norm")
class NormWeight(Structure):
    """A norm's weight, or none."""


RotaryArgs = structure("rotary")  # frequencies of one rotary embedding
StepStatesArgs = structure("step_states")  # the slots of recurrent state in a step


@mirror("router")
class RouterArgs(Structure):
    """How rows choose experts."""


MixtureArgs = structure("moe")  # a mixture of experts
MixtureCall = structure("moe_args")  # the rows of a mixture's call


@mirror("scores")
class ScoresArgs(Structure):
    """How the heads of a mixer attend."""


@mirror("part")
class PartArgs(Structure):
    """A mixer or a feed-forward."""


@mirror("layer")
class LayerArgs(Structure):
    """One layer of a decoder and its pool."""


@mirror("decoder")
class DecoderArgs(Structure):
    """A whole decoder."""


@mirror("low_rank")
class LowRankArgs(Structure):
    """Two thin matrices, the second an addend's `up`; without the first, no term."""


@mirror("adapters")
class AdaptersArgs(Structure):
    """The adapters of a step, and the adapter of each row."""


ForwardArgs = structure("forward_args")  # a step of a decoder
GroupArgs = structure("group")  # one process's view of the ranks that share memory
ScaledLogits = structure("scaled_logits")  # x = cap * tanh(multiplier * x / cap)
Draw = structure("draw")  # how one row is drawn


# Packs a Draw. There is one for each token of a step, and packing takes a tenth of the time of a Structure.
DRAW = Struct("".join(kind._type_ for _, kind in Draw._fields_))  # type: ignore[misc,union-attr]

# ids = one token for each row of logits; the logits are overwritten.
SampleArgs = structure("sample_args", draws=c_char_p)
StepGroup = structure("step_group")  # what layers of one block table read in a step
StepArgs = structure("step_args")  # a step that is drawn from the logits as they are


class Library:
    """The loaded kernels; each method raises ComputeError if memory runs out."""

    def __init__(self, path: str, isa: Isa, *, is_portable: bool = False) -> None:
        """Raises OSError if the file cannot be loaded here, ConfigError for one of other structures."""
        self.isa, self.is_portable = isa, is_portable  # the latter: its bits are those of all instruction sets
        # Stored codes are multiplied as they are by default. The portable kernels take twice float32's time for 32 rows of bytes.
        self.prefers_codes = isa > Isa.PORTABLE or is_portable
        self._functions = functions = ctypes.CDLL(path)
        self._kinds: dict[str, int] = {}
        check_layout(functions)
        self._set_threads = declare(functions.quire_set_threads, None, c_int32)
        self._stay_aside = declare(functions.quire_stay_aside, None, c_int32)
        self._pause = declare(functions.quire_pause, None, POINTER(c_double), _PAUSE)
        # Keeps freed memory in the process from now on, up to 256 MiB, for the next step.
        self.keep_memory = declare(functions.quire_keep_memory, None)
        # The bytes of a packed matrix in a quantised format: format, rows, columns.
        self.quant_bytes = declare(functions.quire_quant_bytes, c_int64, c_int32, c_int64, c_int64)
        self._low_dtype = declare(functions.quire_low_dtype, c_int32, POINTER(LinearArgs))
        self.store = entry(functions.quire_store, StoreArgs)
        self.attend = entry(functions.quire_attend, AttendArgs)
        self.gemm = entry(functions.quire_gemm, GemmArgs)
        self.gemm_heads = entry(functions.quire_gemm_heads, HeadsArgs)
        self.pack = entry(functions.quire_pack, PackArgs)
        self.dequantise = entry(functions.quire_dequantise, DequantArgs)
        self.add_rms_norm = entry(functions.quire_add_rms_norm, NormArgs)
        self.rope = entry(functions.quire_rope, RopeArgs)
        self.embed = entry(functions.quire_embed, EmbedArgs)
        self.forward = entry(functions.quire_forward, ForwardArgs)
        self.mixture = entry(functions.quire_moe, MixtureCall)
        self.scale_logits = entry(functions.quire_scale_logits, ScaledLogits)
        self.sample = entry(functions.quire_sample, SampleArgs)
        self.step = entry(functions.quire_step, StepArgs)
        ranks = POINTER(GroupArgs)
        self.group_bytes = declare(functions.quire_group_bytes, c_int64, c_int32)
        self.group_abort = declare(functions.quire_group_abort, None, ranks)
        self.group_sum = checked(functions.quire_group_sum, ranks, c_void_p, c_int64)
        self.group_gather = checked(functions.quire_group_gather, ranks, c_void_p, c_void_p, c_int64, c_int64, c_int64)
        self.group_broadcast = checked(functions.quire_group_broadcast, ranks, c_void_p, c_int64)
        self.weights = Arena()
        self.packer = Packer()
        self.kept: PackedFile | None = None  # while a model is loaded that has one
        self.num_threads = 1
        self.use_threads(torch.get_num_threads())

    def use_threads(self, num_threads: int) -> None:
        """Set how many threads a call may use, the calling one included."""
        self._set_threads(num_threads)
        self.num_threads = num_threads

    def stay_aside(self, *, stays: bool) -> None:
        """Have this thread, and those that pack for it, compute alone, because the team is busy with steps; or not."""
        self._stay_aside(stays)
        self.packer.begin = partial(self._stay_aside, stays)

    def pause(self, at: c_double, wait: Callable[[], int]) -> Any:
        """Have this thread's calls pause once the monotonic clock has come to `at`, as long as what is returned lives.

        `wait` returns when they may go on; if it returns true, they and all later ones compute nothing.
        """
        called = _PAUSE(wait)
        self._pause(at, called)
        return called

    def kind(self, name: str) -> int:
        """Return the address of a kind of part. Raises ConfigError if its structure is another here."""
        if name not in self._kinds:
            check_layout(self._functions)  # which has mirrors now that were not there when the library was loaded
            self._kinds[name] = addressof(c_char.in_dll(self._functions, f"kind_{name}"))
        return self._kinds[name]

    def low_dtype(self, up: LinearArgs) -> torch.dtype:
        """Return the type of the factors that `up` is multiplied with."""
        return next(dtype for dtype, code in DTYPES.items() if code == self._low_dtype(up))


_PAUSE = CFUNCTYPE(c_int32)
_chosen: tuple[str, bool] = "auto", False
_loaded: dict[tuple[Isa, bool], Library | None] = {}


@cache
def native() -> Library | None:
    """Return the library, None if it is missing, switched off or unusable."""
    setting, is_portable = _chosen
    return _load(_isa_of(setting), is_portable)


def choose_kernels(setting: str, on_compiled: OnCompiled = lambda *_: None, *, is_portable: bool = False) -> None:
    """Set the kernels that `native` returns, from --cpu-kernels and --portable-bits, compiled if need be.

    Raises ConfigError for an instruction set that this machine does not have.
    """
    global _chosen  # noqa: PLW0603 - one setting of the process
    isa = _isa_of(setting)
    if isa is not None and isa not in (machine_isas() or [isa]):
        raise ConfigError(
            f"--cpu-kernels is {setting!r}. This machine, or its system, has no {isa.name}; its best is {machine_isas()[-1].name}."
        )
    if _load(isa, is_portable, on_compiled) is None and (is_portable or setting not in ("auto", "off")):
        raise ConfigError(
            f"--cpu-kernels is {setting!r}{', with --portable-bits' * is_portable}, but {why_no_kernels()}, or leave the setting out."
        )
    _chosen = setting, is_portable
    native.cache_clear()


def _isa_of(setting: str) -> Isa | None:
    if setting in ("auto", "off"):
        return best_isa() if setting == "auto" else None
    return Isa[setting.upper()]


def _load(isa: Isa | None, is_portable: bool = False, on_compiled: OnCompiled = lambda *_: None) -> Library | None:
    if isa is None:
        return None
    if (isa, is_portable) not in _loaded:
        _loaded[isa, is_portable] = _open(isa, is_portable, on_compiled)
    return _loaded[isa, is_portable]


def _open(isa: Isa, is_portable: bool, on_compiled: OnCompiled) -> Library | None:
    path = find_library(isa.name.lower() + PORTABLE_BITS * is_portable, on_compiled)
    if path is None:
        return None
    try:
        library = Library(str(path), isa, is_portable=is_portable)
    except (OSError, AttributeError) as error:
        _log.warning("The CPU kernels are not used: %s", error)
        return None
    _log.debug("native kernels for %s from %s", isa.name, path)
    return library
