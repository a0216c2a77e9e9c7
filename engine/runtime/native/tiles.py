"""What AMX's tiles are worth on this machine, measured at the first start that may use them.

Sums of bfloat16 must have the order that was measured on a Xeon, and products of quantised weights the bits that they have
without tiles. Where they do not, or tiles win with no format, the log says so. Engine thread.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import partial
from timeit import repeat

import torch
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.native.build import NEVER, Isa, OnCompiled, machine_isas, tile_facts, tile_file, tiles_win
from engine.runtime.native.library import DTYPES, GemmArgs, Library, LinearArgs, WeightFormat, choose_kernels, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear, rows_of
from engine.system.cache_folder import keep
from engine.system.host_limits import processor_name

_LEAST_NORMAL = 2.0**-126  # of float32; what is smaller is 0 on tiles
_NUM_OUTPUTS, _NUM_INPUTS = 128, 1024
_ROWS = (128, 64, 32, 16, 8)
_REPEATS = 7
_WIN = 0.95  # of the other time: what is closer varies from one measurement to the next
_log = logging.getLogger(__name__)


def prove_tiles(on_compiled: OnCompiled = lambda *_: None, *, is_asked: bool) -> None:
    """Measure from how many rows tiles win here, if no start has, and warn if they never do, but were asked for."""
    if Isa.AMX not in machine_isas():
        return
    if processor_name() not in tile_facts():
        with suppress(ConfigError):  # there is no compiler, or one that does not know tiles
            choose_kernels("amx", on_compiled)
            if (library := native()) is not None:
                tile_facts()[processor_name()] = measure_tiles(library)
                keep(tile_file(), json.dumps(tile_facts()))
    if is_asked and processor_name() in tile_facts() and not tiles_win():
        _log.warning("AMX is of no use here: its sums differ from those expected, or are slower than AVX-512's")


def measure_tiles(library: Library) -> list[int]:
    """Return the rows from which tiles win, by WeightFormat, and have products take them; NEVER if any sum is not as expected."""
    num_threads = library.num_threads
    library.use_threads(1)
    try:
        least = [_least_rows(library, weight_format) for weight_format in WeightFormat]
    finally:
        library.use_threads(num_threads)
    if not all(least) or not _has_order(library):
        least = [NEVER] * len(least)
    for weight_format, rows in zip(WeightFormat, least, strict=True):
        library.use_tiles(weight_format, rows)
    return least


def _least_rows(library: Library, weight_format: WeightFormat) -> int:
    """Return the rows from which tiles win with random weights, 0 if they compute something else."""
    if weight_format in (*FLOAT_FORMATS.values(), WeightFormat.INT8):
        return NEVER  # tiles are taken for any number
    random, least = torch.Generator().manual_seed(0), NEVER
    packed, scales = random_weights(library, weight_format, _NUM_OUTPUTS, _NUM_INPUTS)
    addresses = packed.data_ptr(), scales.data_ptr(), None
    linear = LinearArgs(*addresses, _NUM_OUTPUTS, _NUM_INPUTS, weight_format, DTYPES[torch.bfloat16], 0)
    for num in _ROWS:
        x = torch.randn(num, _NUM_INPUTS, generator=random).bfloat16()
        results, times = [torch.empty(num, _NUM_OUTPUTS) for _ in range(2)], []
        for y, from_row in zip(results, (1, NEVER), strict=True):
            library.use_tiles(weight_format, from_row)
            args = GemmArgs(linear, x.data_ptr(), None, y.data_ptr(), num, _NUM_INPUTS, _NUM_OUTPUTS)
            times.append(min(repeat(partial(library.gemm, args), number=1, repeat=_REPEATS)))
        if not torch.equal(*results):
            return 0
        if times[0] >= _WIN * times[1]:
            break
        least = num
    return least


def random_weights(
    library: Library, weight_format: WeightFormat, num_outputs: int, num_inputs: int
) -> tuple[Tensor, Tensor]:
    """Return packed codes whose scales are finite, and the scales of rows."""
    random, num_bytes = torch.Generator().manual_seed(0), library.quant_bytes(weight_format, num_outputs, num_inputs)
    packed = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=random) & 0x3B
    return packed, torch.ones(num_outputs)


def _has_order(library: Library) -> bool:
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
