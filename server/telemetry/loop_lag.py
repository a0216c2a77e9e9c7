"""Measures how late the event loop is, by a timer that runs four times a second.

Code that blocks the loop delays every stream, probe and scrape. The worst lag of the last half minute to a minute is kept,
so that a scrape finds a stall that is over. A stall shorter than PERIOD_S may be missed, or seen in part.
"""

from __future__ import annotations

import asyncio

PERIOD_S = 0.25
WINDOW_S = 30.0  # a scrape interval is shorter


class LoopLag:
    """Samples the running loop; `seconds` is the worst recent lag."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._worst_s = 0.0  # of this window
        self._before_s = 0.0  # of the window before it
        self._window_ends_s = 0.0

    def start(self) -> None:
        """Start sampling the running loop."""
        self._loop = asyncio.get_running_loop()
        self._window_ends_s = self._loop.time() + WINDOW_S
        self._wait(self._loop)

    def stop(self) -> None:
        """Stop sampling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def seconds(self) -> float:
        """Return the worst recent lag; a timer that is overdue now counts, too."""
        overdue_s = 0.0
        if self._loop is not None and self._timer is not None:
            overdue_s = self._loop.time() - self._timer.when()
        return max(self._worst_s, self._before_s, overdue_s)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(loop.time() + PERIOD_S, self._sample, loop)

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._timer is not None
        now = loop.time()
        self._worst_s = max(self._worst_s, now - self._timer.when())
        if now >= self._window_ends_s:
            self._before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends_s = now + WINDOW_S
        self._wait(loop)
