"""Translates CUDA errors into the engine's: out of memory, or device lost.

After an out-of-memory error the device is prepared for a smaller step. After any other CUDA error the device is lost to
this process, because every later call would report it again. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.core.errors import DeviceLostError, DeviceMemoryError
from engine.core.step import PendingStep, Runner, StepPlan, StepResult

_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
_LOST = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")


class CudaStep:
    """A launched step, guarded."""

    def __init__(self, runner: CudaRunner, step: PendingStep) -> None:
        self._runner, self._step = runner, step

    def wait(self) -> StepResult:
        """Wait for the device and return the step's result."""
        try:
            return self._step.wait()
        except RuntimeError as error:
            fault = to_fault(error)
        raise self._runner.settle(fault)


class CudaRunner:
    """A Runner on CUDA that raises DeviceMemoryError and DeviceLostError."""

    def __init__(self, runner: Runner, device: torch.device) -> None:
        self._runner, self._device = runner, device
        self._is_lost = False

    def begin(self) -> None:
        """What the runner behind does with it."""
        try:
            self._runner.begin()
            return
        except RuntimeError as error:
            fault = to_fault(error)
        raise self.settle(fault)

    def run(self, plan: StepPlan) -> CudaStep:
        """Launch a step."""
        try:
            return CudaStep(self, self._runner.run(plan))
        except RuntimeError as error:
            fault = to_fault(error)
        # Outside the handler: its exception keeps the tensors of the failed step alive.
        raise self.settle(fault)

    def settle(self, fault: Exception) -> Exception:
        """Prepare the device for the next step, if possible; return the error to raise."""
        if isinstance(fault, DeviceMemoryError):
            try:
                # The next step may write where a copy of this one is still reading.
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
            except RuntimeError as error:
                fault = to_fault(error)
        self._is_lost |= isinstance(fault, DeviceLostError)
        return fault

    def read_blocks(self, blocks: Sequence[int], rows: Any) -> None:
        """What the runner behind does with it."""
        self._runner.read_blocks(blocks, rows)

    def write_blocks(self, blocks: Sequence[int], rows: Any) -> None:
        """What the runner behind does with it."""
        self._runner.write_blocks(blocks, rows)

    def use_idle_moment(self) -> bool:
        """What the runner behind does with it."""
        return self._runner.use_idle_moment()

    def close(self) -> None:
        """Release memory, unless the device is lost."""
        if not self._is_lost:
            self._runner.close()


def to_fault(error: RuntimeError) -> Exception:
    """Return the engine's error for one of torch's; other errors are unchanged."""
    message = str(error)
    line = message.strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or any(sign in message for sign in _MEMORY):
        return DeviceMemoryError(". ".join(line.split(". ")[:2]).removesuffix("."))  # the rest is advice
    if isinstance(error, torch.AcceleratorError) or any(sign in message for sign in _LOST):
        return DeviceLostError(f"the CUDA device is lost: {line.removesuffix('.')}")
    return error
