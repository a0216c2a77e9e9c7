"""The lag of the event loop is seen, stays visible for a scrape, and is forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from server.telemetry.metrics import LoopLag

BLOCKED_S = 0.2


async def until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.005)


def test_a_stall_is_seen_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.telemetry.metrics.PERIOD_S", 0.01)
    monkeypatch.setattr("server.telemetry.metrics.WINDOW_S", 0.5)

    async def run() -> None:
        lag = LoopLag()
        assert lag.seconds == 0.0
        lag.start()
        time.sleep(BLOCKED_S)  # noqa: ASYNC251 - this is what it is to see
        assert lag.seconds >= BLOCKED_S - 0.05, "before its timer runs"
        await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert lag.seconds >= BLOCKED_S - 0.05, "and after"
        await until(lambda: lag.seconds < BLOCKED_S / 2)
        lag.stop()
        lag.stop()

    asyncio.run(run())
