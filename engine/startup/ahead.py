"""Does work of a start outside of Python while modules are imported: libraries, memory, reading of files.

Importing torch and the HTTP side holds the GIL for about a second. C code called through ctypes runs without it, so each
part here starts a thread that uses another core meanwhile. All of it is optional: what is not done ahead is done by its
first user. The order of a start is in server/serve.py. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import c_void_p
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import NamedTuple

from engine.files.gguf_header import part_paths
from engine.runtime.native.backed_memory import BackedMemory, find_touch
from engine.runtime.native.packed_file import PackedFile
from engine.runtime.native.rows import OpenFile
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import local_path
from engine.system.host_limits import available_memory

# In the order in which torch loads them; the first makes those of a CUDA build visible to the second.
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so")
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_SECOND_NODE = Path("/sys/devices/system/node/node1")
_READ = 4 << 20  # bytes
_SHARE = 0.95  # of the files' bytes; some tensors of every model are not packed


class _Later(MetaPathFinder, Loader):
    """Puts off a quarter of torch's import, which is for meta tensors, until a module that makes some is imported."""

    _PART = "torch._meta_registrations"
    _USERS = ("transformers", "torch._dynamo")

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return an empty module for the part, and load it before its users."""
        if name in self._USERS:
            self._end()
        return ModuleSpec(name, self) if name == self._PART else None

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty until it is asked for something."""

        def get(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            self._end()
            return getattr(sys.modules[self._PART], name)

        module.__getattr__ = get  # type: ignore[method-assign]

    def _end(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            if sys.modules.pop(self._PART, None) is not None:
                import_module(self._PART)


def load_torch_libraries() -> None:
    """Start loading torch's libraries, which takes 0.15 s of C code; `import torch` waits for the rest.

    The system loads one library at a time, so those that are needed sooner are loaded before.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which nothing here uses, would spin for 0.1 s
    import asyncio  # noqa: F401 - imported for its duration, as those below

    import numpy as np  # noqa: F401

    with suppress(ImportError):
        import orjson  # noqa: F401 - FastAPI's
    find_touch()

    torch = find_spec("torch")
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Later())
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent / "lib"
    # No daemon: a process that ends while a library is half loaded would crash.
    Thread(target=_load, args=(folder,), name="torch-libraries").start()


def _load(folder: Path) -> None:
    try:
        dlopen = ctypes.CDLL(None).dlopen  # through ctypes, because ctypes.CDLL(path) holds the GIL
    except (AttributeError, OSError, TypeError):  # no such system
        return
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], c_void_p
    for name, scope in zip(_TORCH_LIBRARIES, (ctypes.RTLD_GLOBAL, ctypes.RTLD_LOCAL), strict=True):
        dlopen(os.fsencode(folder / name), os.RTLD_NOW | scope)  # if it fails, `import torch` says why


def runs_on_cpu(config: EngineConfig) -> bool:
    """Return whether a model runs on the CPU, as far as that is known without torch."""
    return config.device == "cpu" or (config.device == "auto" and not any(map(os.path.exists, _GPUS)))


def weight_files(config: EngineConfig) -> list[Path]:
    """Return the files of a model's weights; none of one that is not here yet, or has none."""
    path = local_path(config.model)
    if path is None or config.load_format == "dummy":
        return []
    return sorted(path.glob("*.safetensors")) if path.is_dir() else part_paths(path)


class WeightMemory(NamedTuple):
    """Where packed weights will be: memory with pages, or a file that has them, or will have."""

    memory: BackedMemory | None = None
    kept: PackedFile | None = None


def begin_weights(config: EngineConfig) -> WeightMemory:
    """Begin to map weights that are packed already, or to read a model's files and back memory for what is packed."""
    files = weight_files(config)
    kept = _open_kept(config) if files else None
    return WeightMemory(None if kept is not None and kept.is_found else _begin_packing(config, files), kept)


def _open_kept(config: EngineConfig) -> PackedFile | None:
    """Return the file of packed weights in --weights-cache, found or to be written; None without that setting."""
    if config.weights_cache is None or not _packs(config) or config.tensor_parallel_size > 1:
        return None
    facts = (
        config.dtype,
        config.quantization,
        config.load_format,
        config.cpu_kernels,
        config.portable_bits,
        config.speculative_config,
    )
    model = json.dumps([str(Path(config.model).resolve()), *facts, config.hf_overrides, config.mmproj], default=str)
    return PackedFile(Path(config.weights_cache).expanduser(), config.weights_cache_size, model)


def _packs(config: EngineConfig) -> bool:
    """Return whether rows of files will be packed on a CPU."""
    return runs_on_cpu(config) and config.cpu_kernels != "off" and config.quantization != "int8"


def _begin_packing(config: EngineConfig, files: Sequence[Path]) -> BackedMemory | None:
    """Begin to read a model's files, and return memory for packed weights, a little less than the files.

    Return None unless the weights will be packed on a CPU. Nothing is begun where the files would fill the memory.
    """
    num_bytes = sum(file.stat().st_size for file in files)
    if not num_bytes or num_bytes > available_memory() // 2:
        return None
    Thread(target=_read, args=(files,), name="read-ahead", daemon=True).start()
    if _SECOND_NODE.exists():  # the pages would all be of the node of the thread that touches them
        return None
    if not _packs(config):
        return None
    try:
        return BackedMemory(int(_SHARE * num_bytes))
    except (OSError, OverflowError, ValueError):  # too large for this process
        return None


def _read(files: Iterable[Path]) -> None:
    """Let the system read files into its cache. It takes no more than some megabytes a call, and does not wait."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with suppress(OSError):
            file = OpenFile(path)
            for begin in range(0, path.stat().st_size, _READ):
                os.posix_fadvise(file.number, begin, _READ, os.POSIX_FADV_WILLNEED)
