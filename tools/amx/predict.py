"""Predicts how long products on tiles take on a Xeon (Sapphire Rapids), which no machine has measured.

    PYTHONPATH=. python tools/amx/predict.py

The library runs with tiles that are a clock and two caches (tile_model.h). Vectors that unpack codes and scale sums are counted
in the compiler's output, by the ports that they need. Both take as long as what is used most.
"""
# ruff: noqa: SLF001 - it compiles the library in another way

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections import Counter
from math import ceil
from pathlib import Path
from unittest.mock import patch

import torch

from engine.runtime.native import build
from engine.runtime.native.build import Isa
from engine.runtime.native.library import DTYPES, GemmArgs, Library, LinearArgs, WeightFormat
from engine.runtime.native.tiles import random_weights

_HERE = Path(__file__).parent
_SHAPES = ((1, 2048, 1536), (8, 2048, 1536), (32, 2048, 1536), (128, 2048, 1536), (512, 2048, 1536), (512, 1536, 8960))
_FORMATS = {"BF16": 0, "Q8": 32, "Q4": 32, "Q4_SUPER": 32, "Q5_SUPER": 32, "Q6_HALF": 16, "IQ4": 32, "MXFP4": 32}
_SOURCE = r"""
#define LANES_ARE_ROWS
#include "vec.h"
#include "quant.h"
#include "quant_tiles.h"
#define SCALE(has_min) void scale_##has_min(const struct unpacked *w, size_t num, const float **x, int32_t **to, float *sums) { \
    const float *const scales[] = {x[0], x[1]}; int32_t *const dots[] = {to[0], to[1]}; \
    add_scaled(SCALED, has_min, w, 0, num, scales, x[2], dots, sums); }
#define UNPACK(name) void unpack_##name(const struct linear *w, const char *panel, struct unpacked *to) { \
    unpack_as(WEIGHT_##name, w, panel, 0, to); }
SCALE(0) SCALE(1)
"""


class _Clock(ctypes.Structure):
    _fields_ = (
        ("ports", ctypes.c_double * (4 + 8)),
        ("cycles", ctypes.c_double),
        ("retire", ctypes.c_double * 48),
        ("num_dots", ctypes.c_uint64),
        ("num_lines", ctypes.c_uint64 * 3),
        ("caches", ctypes.c_uint64 * (1 + 64 * 12 + 2048 * 16)),
    )


def _clocked_library(folder: str) -> tuple[Library, _Clock]:
    options, used_by = {"clock": f"{build._AVX512BF16} -DTILE_MODEL"}, {"TILE_MODEL": build._USED_BY["amx"]}
    patches = patch.multiple(build, _OPTIONS={"x86_64": options}, _USED_BY={**build._USED_BY, **used_by})
    with patch.dict(os.environ, CPATH=str(_HERE), XDG_CACHE_HOME=folder), patches:
        [path] = build.compile_libraries(str(build.find_compiler()), ["clock"])
    library = Library(str(path), Isa.AMX)
    library.use_threads(1)
    for weight_format in WeightFormat:
        library.use_tiles(weight_format, 1)
    return library, _Clock.in_dll(ctypes.CDLL(str(path)), "tile_clock")


def _assembly() -> str:
    source = _SOURCE + " ".join(f"UNPACK({name})" for name, group in _FORMATS.items() if group)
    options = (*build._FLAGS, *build._QUICK, *build._OPTIONS["x86_64"]["amx"].split(), f"-I{build._HERE}")
    command = ("gcc", *options, "-xc", "-", "-S", "-o", "-")
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own


def _needs(assembly: str, function: str) -> Counter[str]:
    """Return what a function's loop over rows, or all of one that unpacks a block, takes of each port."""
    text = assembly.partition(f"\n{function}:\n")[2].partition("\t.size\t")[0]
    loops = re.findall(r"\n(\.L\d+):\n((?:(?!\n\.L\d+:)[\s\S])*?)\tj\w+\t\1\n", text)
    needs: Counter[str] = Counter()
    for name, operands in re.findall(r"\n\t([a-z]\w*)\t(.*)", loops[-1][1] if function[0] == "s" else text):
        needs["all"] += 1
        needs["stores"] += "mm" in operands and operands.endswith(")")
        needs["loads"] += "(" in operands and not operands.endswith(")")
        if "zmm" in operands and not name.startswith(("vmov", "vbroadcast")):
            is_shift, is_shuffle = name.startswith(("vpsrl", "vpsll")), name.startswith(("vpshuf", "vpmovzx"))
            needs["p0" if is_shift else "p5" if is_shuffle else "p05"] += 1
    return needs


def _cycles(needs: Counter[str]) -> tuple[float, str]:
    """Return the time of what takes longest, and which that is."""
    vectors = max((needs["p0"] + needs["p5"] + needs["p05"]) / 2, needs["p0"], needs["p5"])
    others = (needs["loads"] / 2, "loads"), (needs["stores"], "stores"), (needs["all"] / 6, "instructions")
    return max((vectors, "vectors"), *others)


def _product(library: Library, weight_format: WeightFormat, m: int, n: int, k: int) -> None:
    packed, scales = random_weights(library, WeightFormat.Q8, 2 * n, k)  # as many bytes as any format has
    addresses = packed.data_ptr(), scales.data_ptr(), None
    linear = LinearArgs(*addresses, n, k, weight_format, DTYPES[torch.bfloat16], 0)
    x, y = torch.randn(m, k).bfloat16(), torch.empty(m, n)
    library.gemm(GemmArgs(linear, x.data_ptr(), None, y.data_ptr(), m, k, n))


def main() -> None:
    """Print a line for each format and shape: cycles for a product of two tiles, and the share of 16."""
    with tempfile.TemporaryDirectory() as folder:
        (library, clock), assembly = _clocked_library(folder), _assembly()
    for (name, group), (m, n, k) in ((each, shape) for each in _FORMATS.items() for shape in _SHAPES):
        ctypes.memset(ctypes.byref(clock), 0, ctypes.sizeof(clock))
        _product(library, WeightFormat[name], m, n, k)
        dots, unpacking = clock.num_dots, 0.0
        cycles, what = max(clock.cycles, clock.ports[3]) / dots, "tiles and caches"
        if group:
            rows, tiles = min(m, 32), 2 * ceil(min(m, 32) / 16)  # of a group of rows; products of a group of inputs
            scaling = _needs(assembly, f"scale_{int(name.endswith('SUPER'))}")
            needs = Counter({port: num * rows / (2 * tiles) for port, num in scaling.items()})
            needs += Counter({"loads": sum(clock.num_lines) / dots, "stores": rows * 2 / tiles, "all": 8})
            cycles, what = max((cycles, what), _cycles(needs))
            unpacking = _cycles(_needs(assembly, f"unpack_{name}"))[0] * group / 32 / (2 * ceil(min(m, 512) / 16))
        cycles += unpacking
        share = n * k * m / 8192 / dots * 16 / cycles
        print(f"{name:9} {m:4} x {n} x {k} {cycles:6.1f} {share:4.0%}  {what}; unpacking {unpacking:.1f}")


if __name__ == "__main__":
    main()
