"""The native library with AMX's kernels, whose tiles are a model in C: proves them on machines that have none."""

from __future__ import annotations

from functools import cache

import pytest

from engine.runtime.native import build
from engine.runtime.native.build import Isa
from engine.runtime.native.library import Library

QUICK = (*build._FLAGS, "-Og")  # a third of -O2's time for attention; products and rows keep what they have


@cache
def tile_model() -> Library:
    """Return the library, compiled once; skip a test where it cannot be."""
    compiler = build.find_compiler()
    if compiler is None or Isa.AVX512BF16 not in build.machine_isas():
        pytest.skip("needs a compiler and a machine with AVX512-BF16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", QUICK)
        patch.setattr(build, "_OPTIONS", {"x86_64": {"amx": f"{build._AVX512BF16} -DTILE_MODEL"}})
        patch.setattr(build, "source_digest", build.source_digest.__wrapped__)
        [path] = build.compile_libraries(compiler, ["amx"])
    return Library(str(path), Isa.AMX)
