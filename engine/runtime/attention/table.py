"""Chooses and loads an attention backend: the named one, or the device's default."""

from __future__ import annotations

from pkgutil import resolve_name

import torch

from engine.core.errors import ConfigError
from engine.runtime.attention import BACKENDS
from engine.runtime.attention.backend import AttentionBackend
from engine.runtime.cuda.available import has_triton
from engine.runtime.native.build import why_no_kernels
from engine.runtime.native.library import native


def load_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return the backend `name`, or the device's best with "auto". Raises ConfigError."""
    chosen = _best(device) if name == "auto" else name
    reason = _absence(chosen, device)
    if reason is not None:
        usable = ", ".join(other for other in BACKENDS if _absence(other, device) is None)
        raise ConfigError(
            f"--attention-backend is {chosen!r}, which {reason}; this machine has {usable}, or use 'auto'."
        )
    return resolve_name(BACKENDS[chosen])()


def describe_choice(name: str, device: torch.device) -> str:
    """Return the chosen backend, for the log."""
    return _best(device) if name == "auto" else name


def _absence(name: str, device: torch.device) -> str | None:
    """Return why a backend does not run here, as the end of a sentence; None if it does."""
    if name == "cpu_native":
        if device.type != "cpu":
            return f"is for CPUs, and the device is {device.type!r}"
        return f"is not available: {why_no_kernels()}" if native() is None else None
    if name == "triton" and not has_triton(device):
        return f"needs the package triton and a recent CUDA device, and the device is {device.type!r}"
    return None


def _best(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton" if has_triton(device) else "torch"
    return "torch" if native() is None else "cpu_native"
