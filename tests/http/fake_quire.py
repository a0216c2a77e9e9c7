"""The `quire` command with the real everything but the model: build_engine returns an engine over the fake runner.

FAKE_STEP_S is how long a step takes, FAKE_STEPS after how many the device is lost. FAKE_HOLD names a file: while it
exists, the step whose number it holds hangs, and so does every later one; a file NAME.hung then shows that. FAKE_LOAD names a file: while it
exists, the model is being loaded. FAKE_EXIT names one: while it exists, Python does not end; NAME.ending then shows that.
FAKE_MARGIN_S replaces STOP_MARGIN_S.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

from engine.core.config import SchedulerConfig
from engine.core.errors import DeviceLostError, MemoryBudgetError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import PendingStep, StepPlan
from engine.core.types import Progress
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from loadtest.fake_runner import CostModel, FakeRunner
from tests.patience import POLL_S

VOCAB_SIZE = 49152
NOWHERE = f"{__file__}/none"  # a path that no machine has


class MortalRunner(FakeRunner):
    """Fails as a whole after some steps, and hangs for as long as it is held."""

    steps_left = int(os.environ.get("FAKE_STEPS", "1000000"))
    hold = Path(os.environ.get("FAKE_HOLD", NOWHERE))

    def run(self, plan: StepPlan) -> PendingStep:
        while self._is_held():
            self.hold.with_suffix(".hung").touch()
            time.sleep(POLL_S)
        self.steps_left -= 1
        if self.steps_left < 0:
            raise DeviceLostError("the device fell off the bus")
        return super().run(plan)

    def _is_held(self) -> bool:
        try:
            return self.num_steps >= int(self.hold.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return False


def build_engine(
    config: EngineConfig, report: Callable[[Progress], None], _memory: object = None, **_: object
) -> Engine:
    if config.kv_cache_memory_bytes == 1:
        raise MemoryBudgetError("--kv-cache-memory-bytes is 1, too little for one block.")
    while Path(os.environ.get("FAKE_LOAD", NOWHERE)).exists():
        report(Progress("weights", "fake", 0, 100, "tensors"))
        time.sleep(POLL_S)
    for done in (0, 50, 100):
        report(Progress("weights", "fake", done, 100, "tensors"))
    report(Progress("kv_pool", "256 blocks"))
    scheduler = SchedulerConfig(
        num_blocks=256, block_size=16, max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=256
    )
    cost = CostModel(step_s=float(os.environ.get("FAKE_STEP_S", "0.001")), token_s=0.0)
    runner = MortalRunner(scheduler, vocab_size=VOCAB_SIZE, cost=cost, sleep=time.sleep)
    return Engine(Scheduler(scheduler), runner, EngineFacts(VOCAB_SIZE))


def wait_at_the_end() -> None:
    """Python's end takes a while, after the exit status is known."""
    while (hold := Path(os.environ.get("FAKE_EXIT", NOWHERE))).exists():
        hold.with_suffix(".ending").touch()
        time.sleep(POLL_S)


if __name__ == "__main__":
    atexit.register(wait_at_the_end)
    stand_in = types.ModuleType("engine.startup.build")
    stand_in.build_engine = build_engine  # type: ignore[attr-defined]  # a module made here
    sys.modules["engine.startup.build"] = stand_in
    from server import daemon
    from server.cli import main

    daemon.STOP_MARGIN_S = float(os.environ.get("FAKE_MARGIN_S", daemon.STOP_MARGIN_S))
    sys.exit(main())
