"""The native library with AMX's kernels on machines that have none, whose tiles are a model in C (tile_model.h)."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from engine.runtime.native import build
from engine.runtime.native.build import Isa
from engine.runtime.native.library import Library

_HERE = Path(__file__).parent


@cache
def tile_model() -> Library:
    """Return the library with the model in place of instructions, compiled once; skip a test where it cannot be."""
    digest = sha256((_HERE / "tile_model.h").read_bytes()).hexdigest()[
        :16
    ]  # part of the options, which name the library
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPATH", str(_HERE))
        patch.setattr(build, "_OPTIONS", {"x86_64": {"amx": f"{build._AVX512BF16} -DTILE_MODEL=0x{digest}"}})
        patch.setattr(build, "source_digest", build.source_digest.__wrapped__)
        [path] = build.compile_libraries(_compiler(), ["amx"])
    return Library(str(path), Isa.AMX)


def trapped_tiles(folder: Path) -> tuple[Library, ctypes.CDLL]:
    """Return the library that a machine with tiles loads, and what computes its instructions where they trap."""
    handler = folder / "tile_traps.so"
    options = ("-O2", "-std=gnu11", "-fPIC", "-shared", *build._AVX512BF16.split(), f"-I{build._HERE}", f"-I{_HERE}")
    subprocess.run((_compiler(), *options, "-o", str(handler), str(_HERE / "tile_traps.c")), check=True)
    [path] = build.compile_libraries(_compiler(), ["amx"])
    traps = ctypes.CDLL(str(handler))
    assert traps.trap_tiles() == 0
    return Library(str(path), Isa.AMX), traps


def _compiler() -> str:
    compiler = build.find_compiler()
    if compiler is None or Isa.AVX512BF16 not in build.machine_isas():
        pytest.skip("needs a compiler and a machine with AVX512-BF16")
    return compiler
