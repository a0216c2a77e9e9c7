"""Decides whether Triton kernels may be used, without importing Triton. Any thread."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

_FIRST_WITH_FP8 = (8, 9)
_LOWEST_CAPABILITY = (8, 0)  # Triton's minimum, and the first devices with bfloat16


@cache
def has_triton(device: torch.device) -> bool:
    """Return whether this device runs Triton kernels: recent CUDA, or Triton's interpreter."""
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LOWEST_CAPABILITY


def uses_triton(x: Tensor) -> bool:
    """Return whether Triton kernels accept this tensor."""
    return x.is_cuda and has_triton(x.device)


def has_fp8(device: torch.device) -> bool:
    """Return whether kernels for this device, or the interpreter, can read e4m3."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8
