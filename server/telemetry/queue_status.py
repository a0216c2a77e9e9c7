"""Reports a request's place in the queue, its prompt's progress and its blocks.

Event loop. Reads the snapshots that LiveView shares among all callers; knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.stats import SequenceView, Snapshot
from server.telemetry.live import LiveView


class Place(NamedTuple):
    """A place in the queue; 1 is next."""

    position: int
    num_waiting: int


class QueueStatus:
    """Answers any number of callers from one snapshot at a time."""

    def __init__(self, live: LiveView) -> None:
        self._live = live
        self._read: Snapshot | None = None  # the snapshot that `_positions` were read from
        self._positions: dict[str, int] = {}

    async def sequences(self, request_ids: Sequence[str]) -> list[SequenceView]:
        """Return the live sequences of some requests; waiting ones may be missing. Raises a 503 if the engine hangs."""
        wanted = set(request_ids)
        return [view for view in (await self._live.snapshot()).sequences if view.request_id in wanted]

    async def place(self, request_ids: Sequence[str]) -> Place | None:
        """Return the first place that some requests have in the queue; None if none of them waits."""
        snapshot = await self._live.snapshot()
        if snapshot is not self._read:
            self._positions = {name: i for i, name in reversed(list(enumerate(snapshot.queue, 1)))}
            self._read = snapshot
        places = [self._positions[name] for name in request_ids if name in self._positions]
        return Place(min(places), len(snapshot.queue)) if places else None

    async def sentence(self, request_ids: Sequence[str]) -> str:
        """Return the status of a stream that has nothing to send yet, or ""."""
        place = await self.place(request_ids)
        if place is not None:
            return f"queued, {place.position} of {place.num_waiting}"
        views = await self.sequences(request_ids)
        done, total = sum(view.num_computed for view in views), sum(view.num_prompt for view in views)
        return f"prefill, {done} of {total} tokens" if views else ""
