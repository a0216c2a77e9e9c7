"""A Runner that raises the engine's errors for those of a device, or of other ranks. Engine thread.

After an out-of-memory error a GPU is prepared for a smaller step. After any other CUDA error the device is lost to this
process, because every later call would report it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from engine.core.errors import DeviceLostError, DeviceMemoryError
from engine.core.step import PendingStep, Runner, StepPlan, StepResult

T = TypeVar("T")


class GuardedStep(PendingStep):
    """A launched step, guarded."""

    def __init__(self, runner: GuardedRunner, step: PendingStep) -> None:
        self._runner, self._step = runner, step

    def wait(self) -> StepResult:
        return self._runner.guarded(self._step.wait)


class GuardedRunner:
    """Translates errors, and releases no memory of a device that is lost."""

    def __init__(
        self,
        runner: Runner,
        translate: Callable[[Exception], Exception],
        *,
        settle: Callable[[Exception], Exception] = lambda fault: fault,
        close: Callable[[], bool] = lambda: False,
    ) -> None:
        """`translate` returns an error it does not know; `settle` prepares for the next step.

        `close` is called first, and returns whether the device is lost.
        """
        self._runner, self._translate, self._settle, self._close = runner, translate, settle, close
        self.read_blocks, self.write_blocks = runner.read_blocks, runner.write_blocks
        self.use_idle_moment, self._is_lost = runner.use_idle_moment, False

    def guarded(self, call: Callable[[], T]) -> T:
        """Return a call's result."""
        try:
            return call()
        except Exception as error:  # any: `translate` decides which it knows, and others are raised
            fault = self._translate(error)
            self._is_lost |= isinstance(fault, DeviceLostError)
            if fault is error:
                raise
        # Outside the handler: its exception keeps the tensors of the failed step alive.
        fault = self._settle(fault)
        self._is_lost |= isinstance(fault, DeviceLostError)
        raise fault

    def begin(self) -> None:
        """What the runner behind does with it."""
        self.guarded(self._runner.begin)

    def run(self, plan: StepPlan) -> GuardedStep:
        """Launch a step."""
        return GuardedStep(self, self.guarded(lambda: self._runner.run(plan)))

    def close(self) -> None:
        """Release memory, unless the device is lost."""
        if not self._close() and not self._is_lost:
            self._runner.close()


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
