"""Whether AMX's tiles sum as expected on this machine, found at the first start that may use them.

Sums of bfloat16 must have the order that was measured on a Xeon, in which vectors sum a single row. Where they have another,
the log says so. Engine thread.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.native.build import Isa, OnCompiled, machine_isas, tile_facts, tile_file, tiles_fit
from engine.runtime.native.library import Library, WeightFormat, choose_kernels, native
from engine.runtime.native.ops import NativeLinear, rows_of
from engine.system.cache_folder import keep
from engine.system.host_limits import processor_name

_LEAST_NORMAL = 2.0**-126  # of float32; what is smaller is 0 on tiles
_log = logging.getLogger(__name__)


def prove_tiles(on_compiled: OnCompiled = lambda *_: None, *, is_asked: bool) -> None:
    """Look at the sums of tiles, if no start has, and warn if they are not as expected, but were asked for."""
    if Isa.AMX not in machine_isas():
        return
    if processor_name() not in tile_facts():
        with suppress(ConfigError):  # there is no compiler, or one that does not know tiles
            choose_kernels("amx", on_compiled)
            if (library := native()) is not None:
                tile_facts()[processor_name()] = has_order(library)
                keep(tile_file(), json.dumps(tile_facts()))
    if is_asked and processor_name() in tile_facts() and not tiles_fit():
        _log.warning("AMX is of no use here: its sums differ from those expected")


def has_order(library: Library) -> bool:
    """Return whether products of bfloat16 are summed as `sum_as_tiles` sums them."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(num, 70, generator=random).bfloat16() for num in (40, 33))
    x[3, :2], weight[5, 1] = _LEAST_NORMAL / 8, _LEAST_NORMAL / 2
    linear = NativeLinear(library, WeightFormat.BF16, [rows_of(weight)], 70, torch.bfloat16)
    return torch.equal(linear(x, torch.float32), sum_as_tiles(x, weight))


def sum_as_tiles(x: Tensor, weight: Tensor) -> Tensor:
    """Return x w^T as tiles sum it: of 32 values even and odd ones are summed apart, and their sum is added.

    A product of two bfloat16 and its sum with a float32 are exact in float64 for numbers of like size.
    """
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], 32):
        parts = []
        for first in (begin, begin + 1):
            part = torch.zeros_like(total)
            for k in range(first, min(begin + 32, x.shape[1]), 2):
                part = (part.double() + _flushed(x[:, k : k + 1]) @ _flushed(weight[:, k : k + 1]).T).float()
            parts.append(part)
        total += parts[0] + parts[1]
    return total


def _flushed(values: Tensor) -> Tensor:
    return torch.where(values.abs() < _LEAST_NORMAL, 0, values.double())
