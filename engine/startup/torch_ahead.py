"""Makes torch's import shorter: its libraries are loaded on a thread before, and parts of it when they are used.

Imports no torch, and little else, because the thread starts when this module has been imported.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from ctypes import c_void_p
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from threading import RLock, Thread
from types import ModuleType
from typing import Any

from pydantic_core import SchemaValidator

from engine.runtime.native.backed_memory import find_touch
from engine.system.regular_file import read_text

# In the order in which torch loads them; the first makes those of a CUDA build visible to the second.
_TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch_cpu.so")
# Modules that a start imports beside them, and which have libraries, too.
_BESIDE = ("asyncio", "csv", "numpy", "orjson", "statistics", "unicodedata", "uuid", "zoneinfo")
_GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def has_gpu() -> bool:
    """Return whether the system has the device files of a GPU."""
    return any(map(os.path.exists, _GPUS))


class _Later(MetaPathFinder, Loader):
    """Puts off parts of torch's import, two fifths of it, until one of them is used; then all follow, in torch's order.

    They are for compiling, exporting, quantizing and meta tensors, and kernels for GPUs, which a system with one needs.
    Another version may use them while it is imported.
    """

    VERSION = "__version__ = '2.13."
    _PARTS = (
        *("_higher_order_ops", "_meta_registrations", "ao", "compiler", "distributions", "export", "func", "masked"),
        *("nested", "nn.intrinsic", "nn.qat", "nn.quantizable", "nn.quantized", "optim", "profiler", "quantization"),
        "utils.data",
    )
    # Of these parts, which torch itself has, too.
    _FUNCTIONS: Mapping[str, str] = {"cond": "_higher_order_ops", "while_loop": "_higher_order_ops", "vmap": "func"}

    def __init__(self) -> None:
        self._names = {"torchgen.model", *(f"torch.{part}" for part in self._PARTS)}
        if not has_gpu():
            self._names.add("torch._native")
        self._begun: list[str] = []
        self._lock = RLock()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return an empty module for a part; load all before transformers, and before what torch does not import itself."""
        if name in self._names:
            self._begun.append(name)
            return ModuleSpec(name, self, is_package=True)
        folder, torch = name.rpartition(".")[0], sys.modules.get("torch")
        is_whole = torch is not None and not getattr(torch.__spec__, "_initializing", False)
        if name != "transformers" and folder not in self._begun and not (is_whole and name.startswith("torch.")):
            return None
        self._end()
        if (module := sys.modules.get(name)) is not None:  # a part has imported it; its own spec would run it again
            module.__spec__ = ModuleSpec(name, self, is_package=hasattr(module, "__path__"))
            return module.__spec__
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
        if name == "torch._meta_registrations":  # which sets it, and without it there are no generators
            meta = import_module("torch._opaque_base").OpaqueBaseMeta
            sys.modules["torch"]._C._set_generator_metaclass(meta)  # noqa: SLF001 - torch has no public one

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
