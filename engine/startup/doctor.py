"""Findings on a machine that a start does not log, or would end at. `quire doctor` prints them (server/doctor.py).

Each check yields findings and never raises. torch is imported by one of them only, because its absence is a finding.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.runtime.cuda.toolchain import TOOLS
from engine.runtime.native.build import best_library, find_compiler, machine_isas
from engine.system.cache_folder import cache_folder
from engine.system.host_limits import available_memory, usable_cpus
from engine.system.progress import human_bytes
from engine.system.version import VERSION


class Finding(NamedTuple):
    """What a check found, and what to do about it."""

    check: str
    found: str
    advice: str = ""
    is_fatal: bool = False  # the machine cannot serve


def check_machine() -> Iterator[Finding]:
    """Yield the findings on versions, devices, memory and kernels."""
    yield Finding("version", f"quire {VERSION}, Python {platform.python_version()}, {platform.platform()}")
    yield from _torch()
    yield Finding("host", f"{usable_cpus()} processors, {human_bytes(available_memory())} of memory available")
    yield _kernels()


def _torch() -> Iterator[Finding]:
    """Import torch, and compare its build with the machine's GPU."""
    try:
        import torch
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:  # of a broken installation
        yield Finding("torch", f"cannot be imported: {error}", "install it: pip install 'torch>=2.11'", is_fatal=True)
        return
    cuda = torch.version.cuda
    yield Finding("torch", f"{torch.__version__}, built for {f'CUDA {cuda}' if cuda else 'CPUs'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            yield Finding(
                f"GPU {index}",
                f"{about.name}, {human_bytes(about.total_memory)}, compute capability {about.major}.{about.minor}",
                "" if about.major >= 8 else "kernels are made for 8.0 and newer; expect torch's attention",
            )
        if importlib.util.find_spec("triton") is None:
            yield Finding("GPU kernels", "no Triton: torch's operations, slower", "pip install triton")
        else:
            yield from starmap(_tool, TOOLS.items())
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None:
        advice = f"update the driver to one for CUDA {cuda}, or check the container's --gpus option"
        yield Finding(
            "GPU", "a driver that this torch cannot use", advice if cuda else "install torch for CUDA to use the GPU"
        )


def _tool(check: str, find: Callable[[], str]) -> Finding:
    """Check what Triton needs at the first launch of a kernel; a start refuses without it."""
    try:
        return Finding(check, find())
    except ConfigError as error:
        fault, _, advice = str(error).rpartition("; ")
        return Finding(check, fault, advice, is_fatal=True)


def _kernels() -> Finding:
    library, compiler = best_library(), find_compiler()
    if library is not None:
        return Finding("CPU kernels", f"ready: {library}")
    if compiler is not None and machine_isas():  # a small library, compiled by now, says which others run here
        return Finding("CPU kernels", f"compiled by {compiler} at the first start, about 7 s")
    if compiler is not None:
        advice = (
            f"see the warning above; {cache_folder()} must be a folder that may be written to, or set XDG_CACHE_HOME"
        )
        return Finding("CPU kernels", f"none, as {compiler} made none: torch's operations, slower", advice)
    advice = "install a C compiler (Debian: apt-get install gcc libc6-dev), or a wheel that contains them"
    return Finding("CPU kernels", "none and no C compiler: torch's operations, slower", advice)
