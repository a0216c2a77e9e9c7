"""Prepares the device that a model runs on: a GPU's allocator, a CPU's native library and its threads.

Runs once, on the thread that starts the daemon.
"""

from __future__ import annotations

import os

import torch

from engine.core.errors import ConfigError
from engine.core.types import Progress, ReportProgress
from engine.runtime.cuda.device import explain_absence
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.native.build import tiles_are_open
from engine.runtime.native.library import choose_kernels, native
from engine.system.host_limits import usable_cpus


def resolve_device(name: str) -> torch.device:
    """Return the device of --device; `auto` takes a GPU if there is one. Raises ConfigError if it is missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device is 'cuda', but {explain_absence()}; use 'cpu' or 'auto'.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        _configure_allocator()
        torch.cuda.set_per_process_memory_fraction(1.0)  # an engine before this one may have been held to a share
        return torch.device(name, torch.cuda.current_device())  # parts of torch.cuda refuse a device without a number
    return torch.device(name)


def _configure_allocator() -> None:
    """Let torch's cache of GPU memory grow in place: steps of varying sizes would fragment fixed segments.

    The variable is read with the first allocation; one that is set already is left alone.
    """
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def load_kernels(setting: str, report: ReportProgress, *, is_portable: bool = False) -> None:
    """Choose the native library of --cpu-kernels and --portable-bits, compiled if need be, and report it."""
    detail = "compiling them for this machine, once"

    def show(done: int, total: int) -> None:
        report(Progress("kernels", "" if done else detail, done, total, "files"))

    if not is_portable and (setting == "amx" or (setting == "auto" and tiles_are_open())):
        from engine.runtime.native.tiles import prove_tiles

        prove_tiles(show, is_asked=setting == "amx")
    choose_kernels(setting, show, is_portable=is_portable)
    library, bits = native(), ", the same bits everywhere" * is_portable
    report(Progress("kernels", "torch's own" if library is None else f"native, {library.isa.name.lower()}{bits}"))


def share_threads(asked: int | None, model: CausalLM) -> None:
    """Give the cores to one team of threads.

    Torch's, which wait by spinning, would slow down the native library's, also between a vision tower's products. The team has as many threads as asked for, else one per core, but no more than a container's limit allows.
    """
    library = native()
    num_threads = asked or min(library.num_threads if library else torch.get_num_threads(), usable_cpus())
    torch.set_num_threads(num_threads)
    if library is not None:
        library.use_threads(num_threads)
    if library is not None and model.capabilities.native:
        torch.set_num_threads(1)
