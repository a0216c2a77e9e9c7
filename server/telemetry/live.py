"""Takes snapshots of the engine, shared by all callers: the page, waiting streams, /v1/requests.

All callers share one snapshot every MIN_AGE_S at most; without any, none is taken. A snapshot contains no text. Event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from engine.core.stats import SequenceView, Snapshot
from engine.handle import EngineHandle, TakeSnapshot
from server.protocol.errors import ApiError

MIN_AGE_S = 0.1
PATIENCE_S = 5.0  # a snapshot waits for the end of the running step


class QueuePosition(NamedTuple):
    """A place in the queue; 1 is next."""

    position: int
    num_waiting: int


class LiveView:
    """Answers all callers from one snapshot; raises a 503 if the engine hangs."""

    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine
        self._taken_s = 0.0
        self._taking: asyncio.Task[Snapshot] | None = None
        self._read: Snapshot | None = None  # the snapshot that `_positions` were read from
        self._positions: dict[str, int] = {}

    async def snapshot(self) -> Snapshot:
        """Return a snapshot that is at most MIN_AGE_S old."""
        now = self._engine.clock()
        if self._taking is None or (self._taking.done() and now - self._taken_s >= MIN_AGE_S):
            self._taken_s = now
            self._taking = asyncio.create_task(self._take())
            self._taking.add_done_callback(_drop_error)
        return await asyncio.shield(self._taking)  # a caller that leaves must not cancel the snapshot for the others

    async def sequences(self, request_ids: Sequence[str]) -> list[SequenceView]:
        """Return the live sequences of some requests; waiting ones may be missing."""
        wanted = set(request_ids)
        return [view for view in (await self.snapshot()).sequences if view.request_id in wanted]

    async def place(self, request_ids: Sequence[str]) -> QueuePosition | None:
        """Return the first place of some requests in the queue; None if none waits."""
        snapshot = await self.snapshot()
        if snapshot is not self._read:
            self._positions = {name: i for i, name in reversed(list(enumerate(snapshot.queue, 1)))}
            self._read = snapshot
        places = [self._positions[name] for name in request_ids if name in self._positions]
        return QueuePosition(min(places), len(snapshot.queue)) if places else None

    async def status(self, request_ids: Sequence[str]) -> str:
        """Return the status of a stream that has nothing to send yet, or ""."""
        place = await self.place(request_ids)
        if place is not None:
            return f"queued, {place.position} of {place.num_waiting}"
        views = await self.sequences(request_ids)
        done, total = sum(view.num_computed for view in views), sum(view.num_prompt for view in views)
        return f"prefill, {done} of {total} tokens" if views else ""

    async def _take(self) -> Snapshot:
        taken = asyncio.wrap_future(self._engine.control(TakeSnapshot()))
        await asyncio.wait((taken,), timeout=PATIENCE_S)
        if not taken.done() or taken.cancelled():
            message = f"The engine did not answer within {PATIENCE_S:.0f} s: a step takes that long, or it has stopped."
            raise ApiError(503, "engine_busy", message, type="service_unavailable_error")
        return taken.result()


def _drop_error(taking: asyncio.Task[Snapshot]) -> None:
    """Mark a failure as seen, for the case that no caller waits any more."""
    if not taking.cancelled():
        taking.exception()
