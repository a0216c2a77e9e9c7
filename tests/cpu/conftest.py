"""Fixtures of the tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.runtime.native.build import machine_isas
from engine.runtime.native.library import Library, choose_kernels, native
from engine.sources.model_source import find_model
from tests.cpu.native_linears import ISAS


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


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The native library on one instruction set after the other, on one thread where a test does not ask for more."""
    choose_kernels(request.param.name.lower() if machine_isas() else "auto")
    loaded = native()
    if loaded is None:
        pytest.skip("no native library and no C compiler")
    num_threads = loaded.num_threads
    loaded.use_threads(1)
    yield loaded
    loaded.use_threads(num_threads)
    choose_kernels("auto")
