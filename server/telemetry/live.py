"""Takes snapshots of the engine, shared by all callers, as JSON for the page.

Event loop. All open pages and waiting streams share one snapshot every MIN_AGE_S at most; without any, none is taken. A
snapshot contains no text. The page gets only the first characters of a request's id: enough for a client to recognise its
request, too few to use another's. A tenant sees its own sequences; sums cover all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from pydantic_core import to_json

from engine.core.stats import SequenceView, Snapshot
from engine.loop import Engine
from server.errors import ApiError

MIN_AGE_S = 0.1
PATIENCE_S = 5.0  # a snapshot waits for the end of the running step
TAG_CHARS = 8


class LiveView:
    """`snapshot` is at most MIN_AGE_S old; `document` is its JSON for the page."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._taken_s = 0.0
        self._taking: asyncio.Task[Snapshot] | None = None

    async def document(self, tenant: str | None = None) -> bytes:
        """Return a snapshot as JSON, with the sequences of one tenant, or of all. Raises what `snapshot` raises."""
        snapshot = await self.snapshot()
        views = [view for view in snapshot.sequences if tenant is None or view.tenant == tenant]
        return to_json(self._shape(snapshot, views))

    async def snapshot(self) -> Snapshot:
        """Return a snapshot. Raises a 503 if the engine does not answer in time."""
        now = self._engine.clock()
        if self._taking is None or (self._taking.done() and now - self._taken_s >= MIN_AGE_S):
            self._taken_s = now
            self._taking = asyncio.create_task(self._take())
            self._taking.add_done_callback(_drop_error)
        return await asyncio.shield(self._taking)  # a caller that leaves must not cancel the snapshot for the others

    async def _take(self) -> Snapshot:
        loop = asyncio.get_running_loop()
        taken: asyncio.Future[Snapshot] = loop.create_future()

        def settle(snapshot: Snapshot) -> None:
            if not taken.done():
                taken.set_result(snapshot)

        def reply(snapshot: Snapshot) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, snapshot)

        self._engine.look(reply)
        try:
            return await asyncio.wait_for(taken, PATIENCE_S)
        except asyncio.TimeoutError:  # not the builtin's before Python 3.11
            message = f"The engine did not answer within {PATIENCE_S:.0f} s: a step takes that long, or it has stopped."
            raise ApiError(503, "engine_busy", message, type="service_unavailable_error") from None

    def _shape(self, snapshot: Snapshot, views: Iterable[SequenceView]) -> dict[str, Any]:
        config, stats = self._engine.config, self._engine.stats
        return {
            "object": "engine.live",
            "time_s": self._engine.clock(),
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
            "blocks": {
                "held": snapshot.num_held_blocks,
                "cached": len(snapshot.cached_blocks),
                "free": snapshot.num_free_blocks,
            },
            "requests": {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "preempted": stats.num_preempted,
            },
            "totals": {
                "steps": stats.steps,
                "prompt_tokens": stats.prompt_tokens,
                "generation_tokens": stats.generation_tokens,
                "preemptions": stats.preemptions,
                "finished": stats.num_completed,
            },
            "targets": {"held": stats.targeted, "met": stats.met},
            "ttft": {"sum_s": stats.ttft_s.sum, "count": stats.ttft_s.count},
            "itl": {"sum_s": stats.itl_s.sum, "count": stats.itl_s.count},
            "cached_runs": runs(sorted(snapshot.cached_blocks)),
            "sequences": [_sequence(view) for view in views],
        }


def _drop_error(taking: asyncio.Task[Snapshot]) -> None:
    """Mark a failure as seen, for the case that no caller waits any more."""
    if not taking.cancelled():
        taking.exception()


def _sequence(view: SequenceView) -> dict[str, Any]:
    return {
        "seq_id": view.seq_id,
        "tag": view.request_id[:TAG_CHARS],
        "choice": view.choice,
        "status": view.status,
        "num_prompt": view.num_prompt,
        "num_tokens": view.num_tokens,
        "num_computed": view.num_computed,
        "num_cached": view.num_cached,
        "num_preemptions": view.num_preemptions,
        "block_runs": runs(view.blocks),
    }


def runs(blocks: Iterable[int]) -> list[list[int]]:
    """Return [first, length] of each run of adjacent blocks, in order: the pool hands out few and long runs."""
    found: list[list[int]] = []
    for block in blocks:
        if found and block == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([block, 1])
    return found
