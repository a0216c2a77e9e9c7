"""What goes wrong on the way to the disk leaves nothing wrong there."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from engine.core.errors import DeviceMemoryError
from engine.core.kv.tiers import Transfer
from engine.core.step import StepPlan
from engine.outbound.offload import Offload
from tests.pure.driver import Driver, config, request


def test_a_spill_that_finds_no_memory_stores_nothing() -> None:
    driver = Driver(config(num_host_blocks=16, host_caching=True, num_disk_blocks=40))
    queued: list[Transfer] = []

    class Store:
        def start(self, transfers: Iterable[Transfer]) -> None:
            queued.extend(transfers)

        def finished(self, wait_s: float) -> list[tuple[Transfer, bool]]:
            assert wait_s >= 0
            done = [(transfer, True) for transfer in queued]
            for transfer, _ in done:
                driver.runner.transfer(transfer, driver.slots)
            queued.clear()
            return done

        def close(self) -> None: ...

    class Runner:
        is_full = True

        def run(self, plan: StepPlan) -> Any:
            if self.is_full:
                raise DeviceMemoryError("no room")
            return driver.runner.run(plan)

    runner = Runner()
    offload = Offload(driver.scheduler, runner, {"disk": Store()}, time.monotonic)  # type: ignore[arg-type]  # all that it uses
    prompt = tuple(range(10, 30))
    driver.add(request("a", prompt, max_tokens=1))
    driver.drain()
    offload.spill()
    offload.exchange()
    offload.exchange()
    assert not driver.slots
    runner.is_full = False
    driver.add(request("b", tuple(range(30, 50)), max_tokens=1))
    driver.drain()
    while offload.spill():
        pass
    assert {tuple(slot) for slot in driver.slots.values()} == {tuple(range(30 + 4 * i, 34 + 4 * i)) for i in range(5)}
