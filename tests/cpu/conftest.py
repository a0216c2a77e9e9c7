"""Fixtures of the tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from engine.runtime.native.build import Isa, machine_isas
from engine.runtime.native.library import Library, choose_kernels, native
from engine.sources.model_source import find_model
from tests.cpu.native_linears import ISAS
from tests.cpu.tile_model import tiles_in_use


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The default model as transformers reads it, in float32: three seconds of a core, so it is read once."""
    import gguf
    from transformers import AutoModelForCausalLM  # seconds, of which most tests here have no need

    path, make = Path(find_model(None).path), gguf.GGUFReader

    def read(path: Path) -> gguf.GGUFReader:
        """Without the long lists of the tokenizer, of which it needs one."""
        reader = make(path)
        for name in ("merges", "token_type"):
            del reader.fields[f"tokenizer.ggml.{name}"]
        return reader

    with pytest.MonkeyPatch.context() as patch:
        # A slice of a map takes ten times as long as one of an array, and the header is cut into a hundred thousand.
        arrays = {"memmap": lambda *args, **named: np.memmap(*args, **named).view(np.ndarray)}
        patch.setattr(gguf.gguf_reader, "np", SimpleNamespace(**{**vars(np), **arrays}))
        # transformers reads the file twice, and makes the table of names for each module: six seconds more.
        patch.setattr(gguf, "GGUFReader", cache(read))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop what repeats AVX512BF16's tests (of floats tiles multiply bfloat16 alone), and what has its turn elsewhere."""
    items[:] = [item for item in items if not _goes_past_tiles(item) and _has_its_turn(item)]


def _goes_past_tiles(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    is_of_products = item.path.name == "test_native.py" and parameters.get("library") is Isa.AMX
    return is_of_products and parameters.get("dtype", torch.bfloat16) is not torch.bfloat16


def _has_its_turn(item: pytest.Item) -> bool:
    """Whether a test in turns runs: all do with the machine's best kernels, and each with one other instruction set."""
    if item.get_closest_marker("in_turns") is None:
        return True
    *_, best, _ = ISAS if len(ISAS) > 1 else ISAS * 2
    isa, others = item.callspec.params["library"], [each for each in ISAS if each is not best]  # type: ignore[attr-defined]
    case = item.callspec.id.replace(isa.name, "")  # type: ignore[attr-defined]
    return isa is best or others.index(isa) == crc32(case.encode()) % len(others)


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The native library on one instruction set after the other, on one thread where a test does not ask for more."""
    if request.param is not Isa.AMX:
        choose_kernels(request.param.name.lower() if machine_isas() else "auto")
    with tiles_in_use() if request.param is Isa.AMX else nullcontext(native()) as loaded:
        if loaded is None:
            pytest.skip("no native library and no C compiler")
        num_threads = loaded.num_threads
        loaded.use_threads(1)
        yield loaded
        loaded.use_threads(num_threads)
    choose_kernels("auto")
