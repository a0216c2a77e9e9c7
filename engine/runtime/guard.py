"""A Runner that raises the engine's errors for those of a device, or of other ranks. Engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from engine.core.errors import DeviceLostError
from engine.core.step import PendingStep, Runner, StepPlan, StepResult

T = TypeVar("T")


class GuardedStep:
    """A launched step, guarded."""

    def __init__(self, runner: GuardedRunner, step: PendingStep) -> None:
        self._runner, self._step = runner, step

    def wait(self) -> StepResult:
        """Wait for the device and return the step's result."""
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
        self._is_lost = False

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
        if not self._close() and not self._is_lost:
            self._runner.close()
