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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_void_p
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import RLock, Thread
from types import ModuleType
from typing import Any, NamedTuple

from pydantic_core import SchemaValidator

from engine.files.gguf_header import part_paths
from engine.runtime.native.backed_memory import BackedMemory, find_touch
from engine.runtime.native.packed_file import PackedFile
from engine.runtime.native.rows import OpenFile
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import local_path
from engine.system.host_limits import available_memory
from engine.system.regular_file import expanded, read_text

# In the order in which torch loads them; the first makes those of a CUDA build visible to the second.
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so")
# Modules that a start imports beside them, and which have libraries, too.
_BESIDE = ("asyncio", "csv", "numpy", "orjson", "statistics", "unicodedata", "uuid", "yaml", "zoneinfo")
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_SECOND_NODE = Path("/sys/devices/system/node/node1")
_READ = 4 << 20  # bytes
_SHARE = 0.95  # of the files' bytes; some tensors of every model are not packed


class _Later(MetaPathFinder, Loader):
    """Puts off parts of torch's import, a third of it, until one of them is used; then all follow, in torch's order.

    They are for compiling, exporting, quantizing and meta tensors. Another version may use them while it is imported.
    """

    VERSION = "__version__ = '2.13."
    _PARTS = (
        *("_higher_order_ops", "_meta_registrations", "ao", "compiler", "distributions", "export", "func", "masked"),
        *("nested", "nn.intrinsic", "nn.qat", "nn.quantizable", "nn.quantized", "optim", "profiler", "quantization"),
        "utils.data",
    )
    # Of these parts, which torch itself has, too.
    _FUNCTIONS: Mapping[str, str] = {"cond": "_higher_order_ops", "while_loop": "_higher_order_ops", "vmap": "func"}
    _USERS = ("transformers", "torch._dynamo")

    def __init__(self) -> None:
        self._names = {f"torch.{part}" for part in self._PARTS}
        self._begun: list[str] = []
        self._lock = RLock()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return an empty module for a part, and load all of them before their users, and before modules within them."""
        if name in self._names:
            self._begun.append(name)
            return ModuleSpec(name, self, is_package=True)
        folder = name.rpartition(".")[0]
        if name not in self._USERS and folder not in self._begun:
            return None
        self._end()
        if name in sys.modules:  # a part has imported it
            return ModuleSpec(name, self)
        return PathFinder.find_spec(name, sys.modules[folder].__path__ if folder else None)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return a module that is there already, or None."""
        return sys.modules.get(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave a part empty until it is asked for something."""
        name = module.__name__
        if name not in self._names:
            return

        def get(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            if attribute in self._FUNCTIONS and not hasattr(sys.modules["torch"], attribute):
                return lambda *args, **kwargs: getattr(import_module(name), attribute)(*args, **kwargs)  # noqa: PLW0108
            self._end()
            return getattr(import_module(name), attribute)

        module.__getattr__ = get  # type: ignore[method-assign]

    def _end(self) -> None:
        with self._lock:
            if self not in sys.meta_path:
                return
            sys.meta_path.remove(self)
            for name in self._begun:
                del sys.modules[name]
            for name in self._begun:
                import_module(name)
            for name, part in self._FUNCTIONS.items():
                setattr(sys.modules["torch"], name, getattr(sys.modules[f"torch.{part}"], name))


def load_torch_libraries() -> None:
    """Start loading torch's libraries, which takes 0.15 s of C code; `import torch` waits for the rest.

    It is called first, so that they are there when torch is imported. The system loads one library at a time, so those of the
    modules that a start imports meanwhile are loaded before.
    """
    for name in _BESIDE:
        with suppress(ImportError):
            import_module(name)
    SchemaValidator({"type": "any"})  # the first one would wait for a library that is being loaded
    find_touch()

    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent
    if "torch" not in sys.modules and _Later.VERSION in read_text(folder / "version.py"):
        sys.meta_path.insert(0, _Later())
    # No daemon: a process that ends while a library is half loaded would crash.
    Thread(target=_load, args=(folder / "lib",), name="torch-libraries").start()


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
    return PackedFile(expanded(config.weights_cache), config.weights_cache_size, model)


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
