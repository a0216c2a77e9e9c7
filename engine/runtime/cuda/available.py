"""Whether Triton kernels may be used: asked once a device, and without importing Triton. Any thread."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_LOWEST_CAPABILITY = (8, 0)  # Triton's own floor, and the first devices with bfloat16


@cache
def has_triton(device: torch.device) -> bool:
    """Whether this device runs Triton kernels: a CUDA device that is new enough, or any under Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LOWEST_CAPABILITY


def uses_triton(x: Tensor) -> bool:
    """Whether kernels in Triton take this tensor."""
    return x.is_cuda and has_triton(x.device)
