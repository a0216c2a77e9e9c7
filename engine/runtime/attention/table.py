"""Which attention backends there are, by name, and which one a device gets when none is named."""

from __future__ import annotations

from importlib import import_module

import torch

from engine.core.errors import ConfigError
from engine.runtime.attention.base import AttentionBackend
from engine.runtime.cuda.available import has_triton
from engine.runtime.native.library import native

BACKENDS = {
    "cpu_native": "engine.runtime.attention.cpu_native:CpuNativeAttention",
    "cpu": "engine.runtime.attention.cpu_paged:CpuPagedAttention",
    "torch": "engine.runtime.attention.torch_paged:TorchPagedAttention",
    "reference": "engine.runtime.attention.reference:ReferenceAttention",
}
GPU_BACKENDS = {
    "triton": "engine.runtime.attention.triton_paged:TritonPagedAttention",
}


def load_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`, or with "auto" the device's best. Raises ConfigError for a name nobody has."""
    chosen = _best(device) if name == "auto" else name
    table = BACKENDS | GPU_BACKENDS
    if chosen not in table:
        raise ConfigError(f"--attention-backend is {name!r}; choose one of auto, {', '.join(table)}.")
    if chosen in ("cpu", "cpu_native") and device.type != "cpu":
        raise ConfigError(
            f"--attention-backend is {chosen!r} but the device is {device.type!r}; leave it out, or use 'auto'."
        )
    if chosen == "triton" and not has_triton(device):
        raise ConfigError(
            f"--attention-backend is 'triton', which needs the package triton and a recent CUDA device, and the device is "
            f"{device.type!r}; leave it out, or use 'auto'."
        )
    module, _, attribute = table[chosen].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


def _best(device: torch.device) -> str:
    if device.type != "cpu":
        return "triton" if has_triton(device) else "torch"
    return "cpu" if native() is None else "cpu_native"
