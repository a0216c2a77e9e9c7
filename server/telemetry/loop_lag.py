"""Measures how late the event loop is, by a timer that runs four times a second.

Code that blocks the loop delays every stream, probe and scrape. The worst recent lag is reported, so that a scrape finds a
stall that is over. A stall shorter than PERIOD_S may be missed, or seen in part.
"""

from __future__ import annotations

import asyncio
from collections import deque

PERIOD_S = 0.25
WINDOW_S = 45.0  # a scrape interval is shorter


class LoopLag:
    """Samples the running loop; `seconds` is the worst recent lag."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=round(WINDOW_S / PERIOD_S))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start sampling the running loop."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PERIOD_S, self._sample)

    def stop(self) -> None:
        """Stop sampling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def seconds(self) -> float:
        """Return the worst recent lag; a timer that is overdue now counts, too."""
        return max(0.0, *self._lags, self._overdue_s())

    def _sample(self) -> None:
        self._lags.append(self._overdue_s())
        self.start()

    def _overdue_s(self) -> float:
        return 0.0 if self._loop is None or self._timer is None else self._loop.time() - self._timer.when()
