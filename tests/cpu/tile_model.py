"""The native library with AMX's kernels on machines that have none, whose tiles are a model in C (tile_model.h)."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from engine.runtime.native import build, library
from engine.runtime.native.build import Isa
from engine.runtime.native.library import Library

_HERE = Path(__file__).parent
_NAME = f"tile_model_{sha256((_HERE / 'tile_model.h').read_bytes()).hexdigest()[:16]}"


@contextmanager
def known_to_build() -> Iterator[None]:
    """Make the library with the model one of all libraries, if it runs here: so tests/conftest.py compiles it with them."""
    if Isa.AVX512BF16 not in build.machine_isas():
        yield
        return
    digest, options = build.source_digest(), {_NAME: f"{build._AVX512BF16} -DTILE_MODEL"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPATH", str(_HERE))
        patch.setattr(build, "_OPTIONS", {"x86_64": build._OPTIONS["x86_64"] | options})
        patch.setattr(build, "_USED_BY", {**build._USED_BY, "TILE_MODEL": build._USED_BY["amx"]})
        patch.setattr(build, "source_digest", lambda *_: digest)  # the others keep their names
        yield


@cache
def tile_model() -> Library:
    """Return the library with the model in place of instructions; skip a test where it cannot be."""
    compiler = _compiler()
    with known_to_build():
        [path] = build.compile_libraries(compiler, [_NAME])
    return Library(str(path), Isa.AMX)


@contextmanager
def tiles_in_use(kernels: Library | None = None) -> Iterator[Library]:
    """Have all code take AMX's kernels: those given, else the machine's, else on one without tiles the model's."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels is not None or Isa.AMX not in build.machine_isas():
            patch.setitem(library._loaded, (Isa.AMX, False), kernels or tile_model())
        patch.setattr(library, "_chosen", ("amx", False))
        library.native.cache_clear()
        found = library.native()
        assert found is not None
        yield found
    library.native.cache_clear()


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
