"""Work of a start that runs beside imports: backed memory, torch's libraries, packing on other threads."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, get_ident

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.core.errors import ModelLoadError
from engine.runtime.models.load import load_model
from engine.runtime.native.arena import Arena
from engine.runtime.native.backed_memory import BackedMemory
from engine.runtime.native.library import Library, native
from engine.runtime.native.ops import NativeLinear
from engine.runtime.native.packer import Packer
from engine.settings.engine_config import EngineConfig
from engine.startup import ahead
from engine.startup.ahead import begin_weights
from tests.cpu.test_weights_gguf import tiny, write
from tests.patience import PATIENCE_S

_MIB = 1 << 20


@pytest.fixture
def library() -> Iterator[Library]:
    """The native library, whose arena is released."""
    library = native()
    if library is None:
        pytest.skip("no native library")
    yield library
    library.weights.release()


def backed(memory: BackedMemory) -> int:
    """The bytes of a map that have pages."""
    num_pages = -(-len(memory.pages) // mmap.PAGESIZE)
    found, whole = (ctypes.c_ubyte * num_pages)(), torch.frombuffer(memory.pages, dtype=torch.uint8)
    status = ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.data_ptr()), ctypes.c_size_t(len(whole)), found)
    assert status == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


def test_memory_is_backed_ahead_and_what_is_left_is_given_back() -> None:
    memory = BackedMemory(32 * _MIB)
    arena = Arena()
    arena.use(memory)
    first = torch.from_numpy(arena.take(4000)).view(torch.float32)
    first.fill_(7)
    memory._thread.join()
    assert backed(memory) == 32 * _MIB or native() is None
    arena.release()
    assert backed(memory) <= 4 * _MIB
    assert torch.equal(first, torch.full((1000,), 7.0))
    assert not arena.take(8 * _MIB).any()


def test_a_tensor_that_does_not_fit_gets_other_memory() -> None:
    arena = Arena()
    arena.use(BackedMemory(4 * _MIB))
    small, large = arena.take(100), arena.take(5 * _MIB)
    small.fill(1)
    assert not large.any()
    arena.release()  # a second time


@pytest.mark.parametrize(
    "settings", [{"device": "cuda"}, {"cpu_kernels": "off"}, {"quantization": "int8"}, {"model": "org/of-a-hub"}]
)
def test_memory_is_backed_only_for_weights_on_a_cpu(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(_MIB))
    model = {"model": str(tmp_path / "model.gguf"), "device": "cpu"}
    assert begin_weights(EngineConfig(**(model | settings))).memory is None
    memory = begin_weights(EngineConfig(**model)).memory
    assert memory is not None
    assert len(memory.pages) == int(0.95 * _MIB)
    memory.release(0)


def test_memory_of_several_nodes_is_left_to_the_threads_that_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(_MIB))
    monkeypatch.setattr(ahead, "_SECOND_NODE", tmp_path)
    assert begin_weights(EngineConfig(model=str(tmp_path / "model.gguf"), device="cpu")).memory is None


def test_memory_is_not_backed_where_little_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(_MIB))
    monkeypatch.setattr(ahead, "available_memory", lambda: _MIB)
    assert begin_weights(EngineConfig(model=str(tmp_path / "model.gguf"), device="cpu")).memory is None


def test_torchs_libraries_may_be_loaded_ahead() -> None:
    """Runs in a new process, because this one has torch. A process that ends meanwhile ends without a crash."""
    code = "from engine.startup.torch_ahead import load_torch_libraries\nload_torch_libraries()\n"
    subprocess.run([sys.executable, "-c", code], check=True)


_USES = (
    "find_spec('transformers')",
    "import torch.ao.quantization",
    "torch._meta_registrations.device_hint",
    "repr(torch.zeros(2))",
    "from torchgen.model import FunctionSchema",
    "assert torch.vmap(torch.sin)(torch.zeros(2)).shape == (2,)",
    "torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(1, device='meta'))",
)


def test_what_torch_needs_of_itself_is_imported_when_it_is_used() -> None:
    """Runs in a new process, because this one has torch. Each use is the first one in a fork of it."""
    code = f"""
import os, sys
from importlib.util import find_spec
from engine.startup.torch_ahead import load_torch_libraries
from server.serve import import_http
load_torch_libraries()
import_http()
import pydantic, torch
assert "defer_build" not in pydantic.BaseModel.model_config
torch.randn(1, generator=torch.Generator())  # which needs none of what is put off
late = [name for name, each in sys.modules.items() if type(getattr(each, "__loader__", None)).__name__ == "_Later"]
for use in {_USES}:
    print(use, flush=True)
    if os.fork():
        assert os.wait()[1] == 0, use
        continue
    exec(use)
    print(len(late) > 9, all(hasattr(sys.modules[name], "__file__") for name in late), torch.vmap is torch.func.vmap)
    print(torch._meta_registrations.device_hint.__name__, torch.cond is torch._higher_order_ops.cond)
    break
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        line for use in _USES for line in (use, "True True True", "device_hint True")
    ], done.stdout


def packed(model: object) -> list[bytes]:
    """The packed matrices of a decoder, in the order of their addresses' names."""
    found: dict[int, NativeLinear] = {}

    def visit(part: object) -> None:
        if isinstance(part, NativeLinear):
            found[id(part)] = part
            return
        if isinstance(part, (list, tuple)):
            for each in part:
                visit(each)
            return
        if not type(part).__module__.startswith("engine.runtime"):
            return
        names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in (*names, *getattr(part, "__dict__", ())):
            visit(getattr(part, name, None))

    visit(model)
    return [bytes(linear._packed) for linear in found.values()]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16])
def test_weights_packed_beside_are_those_packed_in_turn(
    kind: Kind, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, in backed memory or not."""
    theirs, tensors = tiny(tmp_path / "hf", num_hidden_layers=3)
    stored = {name: (values, kind if values.ndim > 1 else Kind.F32) for name, (values, _) in tensors.items()}
    config = EngineConfig(model=str(write(tmp_path / "model.gguf", "llama", theirs.config, stored)), device="cpu")
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    library.weights.use(BackedMemory(4 * _MIB))
    beside = packed(load_model(config, cpu, dtype, lambda _: None))
    library.weights.release()
    monkeypatch.setattr(library, "packer", Packer())
    monkeypatch.setattr(Packer, "run", lambda _, call: call())
    in_turn = packed(load_model(config, cpu, dtype, lambda _: None))
    assert len(beside) >= 3 * 4
    assert beside == in_turn
    assert any(np.frombuffer(each, np.uint8).any() for each in beside)


def test_reports_follow_the_calls_before_them() -> None:
    packer, order, go = Packer(), [], Event()

    def slow() -> None:
        go.wait(PATIENCE_S)
        order.append("packed")

    with packer.behind():
        packer.run(slow)
        packer.after(lambda: order.append(f"reported {get_ident()}"))
        assert order == []
        go.set()
    assert order == ["packed", f"reported {get_ident()}"]


def test_a_failed_call_ends_the_block_and_the_rest_is_not_run() -> None:
    packer, ran = Packer(), []

    def fail() -> None:
        raise ModelLoadError("It became shorter.")

    def load() -> None:
        with packer.behind():
            packer.run(fail)
            packer.after(lambda: ran.append("report"))

    with pytest.raises(ModelLoadError, match="shorter"):
        load()
    assert ran == []
    packer.run(lambda: ran.append("now"))
    packer.after(lambda: ran.append("after"))
    assert ran == ["now", "after"]
