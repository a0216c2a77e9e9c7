"""Measures how fast this machine multiplies by each kind of weight, and keeps the figures in the cache folder.

One kind takes half a second. The native library's own products are timed, over more weights than the caches hold; of one row
they show the memory's bandwidth, of many the arithmetic.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.errors import ConfigError
from engine.core.types import Progress, ReportProgress
from engine.files.gguf_kinds import Kind
from engine.runtime.execution.device import load_kernels
from engine.runtime.native.build import why_no_kernels
from engine.runtime.native.library import WeightFormat, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear, format_for
from engine.runtime.native.rows import StoredRows
from engine.system.cache_folder import cache_folder, keep
from engine.system.host_limits import processor_name, usable_cpus
from engine.system.regular_file import read_json
from engine.system.version import VERSION

AT = (1, 2, 4, 8, 16, 32, 128)  # rows of a product
BYTES: Mapping[str, float] = {kind.name: kind.num_bytes / kind.block for kind in Kind} | {"INT8": 1.0}  # of a weight
HELD: Mapping[str, float] = {kind.name: kind.packed / kind.block for kind in Kind} | {"INT8": 1.0}  # packed in memory
_SHAPE = 16_384, 2048
_SMALL = 2048  # rows of weights in a product whose time is arithmetic's: no longer than a busy machine leaves it alone
_LEAST_BYTES = 96 << 20  # three times the last cache of the machines it was tried on
_NUM_PASSES = 20
_UNDISTURBED = 0.1  # of the products, the shortest: other work can only lengthen them
_BUSY = 0.1  # of the time waited for a processor
_FEW_ROWS = 8  # up to which a product waits for memory

Rates = Mapping[str, tuple[float, ...]]  # seconds of a weight by its kind, for each number of rows


def product_rates(kinds: Iterable[str], report: ReportProgress, *, anew: bool = False) -> Rates:
    """Return the rates of some kinds, those that are not in the cache measured, or all. Raises ConfigError."""
    path, machine = cache_folder() / "rates.json", _machine()
    try:
        known = {} if anew else read_json(path)[machine]
        found = {kind: tuple(map(float, known[kind])) for kind in kinds if len(known.get(kind, ())) == len(AT)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known, found = {}, {}
    missing = sorted(set(kinds) - found.keys())
    if missing:
        load_kernels("auto", report)
        begun_s, waited_s = time.perf_counter(), _waited_s()
        measured = {kind: _measure(kind) for kind in missing}
        if _waited_s() - waited_s > _BUSY * (time.perf_counter() - begun_s):
            report(Progress("rates", "other work took the processors meanwhile; measure again without it (--measure)"))
        found |= measured
        keep(path, json.dumps({machine: {**known, **measured}}))
    return found


def seconds(rates: Rates, kind: str, num_rows: float) -> float:
    """Return the seconds of a weight in a product of some rows: linear between those measured, and beyond."""
    return float(np.interp(num_rows, AT, rates[kind])) * max(num_rows / AT[-1], 1)


def _machine() -> str:
    return f"{processor_name()}, {usable_cpus()} processors, quire {VERSION}"


def _format(kind: str) -> tuple[WeightFormat, Kind]:
    """Return how a kind is packed, and the kind of the rows that it is packed from."""
    number = Kind["F32" if kind == "INT8" else kind]
    if kind == "INT8":
        return WeightFormat.INT8, number
    return (FLOAT_FORMATS[_dtype(number)] if kind in ("F32", "BF16") else format_for([number])), number


def _dtype(kind: Kind) -> torch.dtype:
    return torch.float32 if kind is Kind.F32 else torch.bfloat16


def _measure(kind: str) -> tuple[float, ...]:
    library = native()
    if library is None:
        raise ConfigError(f"Native kernels are measured, and {why_no_kernels()}.")
    library.use_threads(min(library.num_threads, usable_cpus()))
    torch.set_num_threads(1)  # which would spin beside the library's
    chosen, number = _format(kind)
    dtype = _dtype(number)
    num = max(2, math.ceil(_LEAST_BYTES / (math.prod(_SHAPE) * BYTES[kind])))

    def matrix(num_rows: int) -> NativeLinear:
        rows = StoredRows(number, np.zeros((num_rows, _SHAPE[1] // number.block * number.num_bytes), np.uint8))
        return NativeLinear(library, chosen, [rows], _SHAPE[1], dtype)

    many, small = [matrix(_SHAPE[0]) for _ in range(num)], [matrix(_SMALL)]
    sets = [many if at <= _FEW_ROWS else small if at == AT[-1] else many[:1] for at in AT]
    inputs = [torch.ones(at, _SHAPE[1], dtype=dtype) for at in AT]
    # In turns over all numbers of rows: so a moment of other work falls on none of them alone.
    passes = [list(map(_time, sets, inputs)) for _ in range(_NUM_PASSES)]
    num_weights = [_SHAPE[1] * (_SMALL if each is small else _SHAPE[0]) for each in sets]
    return tuple(
        float(np.quantile(np.concatenate(took), _UNDISTURBED)) / num
        for took, num in zip(zip(*passes, strict=True), num_weights, strict=True)
    )


def _time(matrices: list[NativeLinear], x: torch.Tensor) -> NDArray[np.float64]:
    """Return the seconds of each product."""
    times = [time.perf_counter()]
    for matrix in matrices:
        matrix(x)
        times.append(time.perf_counter())
    return np.diff(times)


def _waited_s() -> float:
    """Return the seconds that this process's threads were ready and had no processor; 0 where Linux does not say."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e9
