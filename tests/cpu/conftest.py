"""Fixtures of the tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runtime.native.build import Isa, machine_isas
from engine.runtime.native.library import Library, choose_kernels, native
from engine.sources.model_source import find_model
from tests.cpu.native_linears import ISAS
from tests.cpu.tile_model import tiles_in_use


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The default model as transformers reads it, in float32: five seconds of a core, so it is read once."""
    import gguf
    from transformers import AutoModelForCausalLM  # seconds, of which most tests here have no need

    path = Path(find_model(None).path)
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file twice, and makes the table of names for each module: six seconds more.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop what repeats AVX512BF16's tests: of floats tiles multiply bfloat16 alone."""
    items[:] = [item for item in items if not (item.path.name == "test_native.py" and _goes_past_tiles(item))]


def _goes_past_tiles(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("library") is Isa.AMX and parameters.get("dtype", torch.bfloat16) is not torch.bfloat16


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
