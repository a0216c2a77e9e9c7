"""Checks of a machine: can it serve, and what is missing? `quire doctor` prints them (server/doctor.py).

Each check yields findings and never raises. torch is imported by one of them only, because its absence is a finding.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import metadata
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError, QuireError
from engine.runtime.cuda.toolchain import TOOLS
from engine.runtime.native.build import find_compiler, installed_library
from engine.sources.model_source import find_model
from engine.system.cache_folder import cache_folder
from engine.system.host_limits import available_memory, read, usable_cpus
from engine.system.progress import human_bytes
from engine.system.version import VERSION

_MIN_FREE_DISK = 5 << 30  # a small model, or the image of a large one's first file
_MIN_MEMORY = 2 << 30  # the default model with its pool
_FEATURES = {  # of /proc/cpuinfo, and what uses them
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "bfloat16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "bf16": "bfloat16",
}


class State(str, Enum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"  # it serves, but something could be better
    FAILED = "failed"  # it cannot serve


class Finding(NamedTuple):
    """A row of the table."""

    check: str
    state: State
    found: str
    advice: str = ""


def check_machine() -> Iterator[Finding]:
    """Yield the findings on versions, devices, memory, kernels and caches."""
    for check in (_versions, _torch, _processor, _memory, _kernels, _model, _caches):
        yield from check()


def _versions() -> Iterator[Finding]:
    yield Finding("version", State.OK, f"quire {VERSION}, Python {platform.python_version()}, {platform.platform()}")


def _torch() -> Iterator[Finding]:
    """Import torch, and compare its build with the machine's GPU."""
    try:
        import torch
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:  # of a broken installation
        yield Finding("torch", State.FAILED, f"cannot be imported: {error}", "install it: pip install 'torch>=2.11'")
        return
    cuda = torch.version.cuda
    yield Finding("torch", State.OK, f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPUs'}")
    yield _transformers()
    has_driver = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            found = f"{about.name}, {human_bytes(about.total_memory)}, compute capability {about.major}.{about.minor}"
            is_old = (about.major, about.minor) < (8, 0)
            advice = "kernels are made for 8.0 and newer; expect torch's attention" if is_old else ""
            yield Finding(f"GPU {index}", State.NOTE if is_old else State.OK, found, advice)
        yield from _gpu_tools()
    elif has_driver and cuda is None:
        yield Finding(
            "GPU", State.NOTE, "a driver, but this torch is for CPUs", "install torch for CUDA to use the GPU"
        )
    elif has_driver:
        advice = f"update the driver to one for CUDA {cuda}, or check the container's --gpus option"
        yield Finding("GPU", State.NOTE, "a driver that torch cannot use", advice)
    else:
        yield Finding("GPU", State.OK, "none; models run on the CPU")


def _gpu_tools() -> Iterator[Finding]:
    """Check what Triton needs at the first launch of a kernel; a start refuses without it."""
    if importlib.util.find_spec("triton") is None:
        yield Finding("GPU kernels", State.NOTE, "no Triton: torch's operations, slower", "pip install triton")
        return
    yield from starmap(_tool, TOOLS.items())


def _tool(check: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding(check, State.OK, find())
    except ConfigError as error:
        fault, _, advice = str(error).rpartition("; ")
        return Finding(check, State.FAILED, fault, advice)


def _transformers() -> Finding:
    try:
        return Finding("transformers", State.OK, metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Finding("transformers", State.FAILED, "not installed", "pip install 'transformers>=5'")


def _processor() -> Iterator[Finding]:
    flags = _cpu_flags()
    names = list(dict.fromkeys(name for flag, name in _FEATURES.items() if flag in flags))
    usable, total = usable_cpus(), os.cpu_count() or 1
    limited = f"{usable} of {total} processors (a limit of this process or its container)"
    found = f"{limited if usable < total else f'{total} processors'}, {platform.machine()}, {', '.join(names) or 'no vectors known'}"
    slow = platform.machine() == "x86_64" and not {"avx2", "fma"} <= flags
    advice = "without AVX2 the portable kernels run, which are several times slower" if slow else ""
    yield Finding("processor", State.NOTE if slow else State.OK, found, advice)


def _cpu_flags() -> set[str]:
    """Return the features in /proc/cpuinfo, x86's or ARM's; empty on other systems."""
    lines = read(Path("/proc/cpuinfo")).splitlines()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _memory() -> Iterator[Finding]:
    free = available_memory()
    advice = "the default model needs about 1 GiB, most others more; free some, or raise the container's limit"
    low = free < _MIN_MEMORY
    yield Finding("memory", State.NOTE if low else State.OK, f"{human_bytes(free)} available", advice if low else "")


def _kernels() -> Iterator[Finding]:
    library, compiler = installed_library(), find_compiler()
    if library is not None:
        yield Finding("CPU kernels", State.OK, f"ready: {library}")
    elif compiler is not None:
        yield Finding("CPU kernels", State.OK, f"compiled by {compiler} at the first start, about 20 s")
    else:
        advice = "install a C compiler (Debian: apt-get install gcc libc6-dev), or a wheel that contains them"
        yield Finding("CPU kernels", State.NOTE, "none and no C compiler: torch's operations, slower", advice)


def _model() -> Iterator[Finding]:
    try:
        source = find_model(None)
    except QuireError as error:
        yield Finding("default model", State.NOTE, "not usable", str(error))
    else:
        yield Finding("default model", State.OK, source.name)


def _caches() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    kernels = cache_folder()
    models = Path(HF_HUB_CACHE)
    yield _folder("cache of kernels", kernels, 0)
    kept = [folder for folder in models.glob("models--*") if folder.is_dir()] if models.is_dir() else []
    size = sum(file.lstat().st_size for folder in kept for file in folder.rglob("blobs/*"))
    yield _folder("cache of models", models, _MIN_FREE_DISK, f", {len(kept)} models of {human_bytes(size)}")


def _folder(check: str, folder: Path, wanted: int, content: str = "") -> Finding:
    """Check a folder that may not exist yet by its nearest parent that does."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            check, State.NOTE, f"{folder} cannot be written", "make it writable, or set HF_HOME or XDG_CACHE_HOME"
        )
    free = shutil.disk_usage(existing).free
    found = f"{folder}{content}, {human_bytes(free)} free"
    if free < wanted:
        return Finding(check, State.NOTE, found, "free some space, or name another folder with --download-dir")
    return Finding(check, State.OK, found)
