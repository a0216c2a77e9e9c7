"""Translates CUDA errors into the engine's: out of memory, or device lost.

After an out-of-memory error the device is prepared for a smaller step. After any other CUDA error the device is lost to
this process, because every later call would report it again. Engine thread.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.core.errors import DeviceLostError, DeviceMemoryError
from engine.core.step import Runner
from engine.runtime.guard import GuardedRunner

_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")


def guard_cuda(runner: Runner, device: torch.device) -> GuardedRunner:
    """Return a Runner on CUDA that raises DeviceMemoryError and DeviceLostError."""
    return GuardedRunner(runner, to_fault, settle=partial(_settle, device))


def _settle(device: torch.device, fault: Exception) -> Exception:
    """Prepare the device for the next step, if possible; return the error to raise."""
    if isinstance(fault, DeviceMemoryError):
        try:
            # The next step may write where a copy of this one is still reading.
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:
            return to_fault(error)
    return fault


def to_fault(error: Exception) -> Exception:
    """Return the engine's error for one of torch's; other errors are unchanged."""
    if not isinstance(error, RuntimeError):
        return error
    message = str(error)
    line = message.strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or any(sign in message for sign in _MEMORY):
        return DeviceMemoryError(". ".join(line.split(". ")[:2]).removesuffix("."))  # the rest is advice
    if isinstance(error, torch.AcceleratorError) or any(sign in message for sign in _LOST):
        return DeviceLostError(f"the CUDA device is lost: {line.removesuffix('.')}")
    return error
