"""Logs the state of the engine and of every thread, for SIGUSR1. It contains no text of a request. Event loop."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import Any

from engine.core.stats import SequenceView, Snapshot
from server.answers.client import EngineClient
from server.answers.models import Models
from server.protocol.errors import ApiError
from server.telemetry.request_log import RequestLog

log = logging.getLogger("quire.state")

MAX_SEQUENCES = 256
_QUEUED = {"waiting", "preempted"}  # values of engine.core.sequence.Status


async def log_state(models: Models, requests: RequestLog) -> None:
    """Log one record of each engine; one that does not answer is reported as such."""
    for parts in models.loaded:
        try:
            snapshot = await parts.live.snapshot()
            state = _of_snapshot(snapshot, requests.open_ids(), parts.engine.clock())
        except ApiError as error:
            state = {"engine_does_not_answer": error.message}
        state |= {"model": parts.name, **_of_engine(parts.client), "threads": _threads()}
        log.info("state of the engine and of all threads", extra={"state": state})


def _of_engine(client: EngineClient) -> dict[str, Any]:
    """Return what is known without the engine's thread."""
    health, stats = client.engine.health(), client.engine.stats
    return {
        "is_alive": health.alive,
        "is_busy": health.busy,
        "seconds_since_step": round(health.seconds_since_step, 3),
        "error": health.error,
        "open_requests": client.num_open,
        "is_draining": client.is_draining,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "preempted": stats.num_preempted,
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "preemptions": stats.preemptions,
        "kv_cache_usage_ratio": round(stats.kv_cache_usage_ratio, 4),
    }


def _of_snapshot(snapshot: Snapshot, names: dict[str, str], now: float) -> dict[str, Any]:
    return {
        "blocks": {
            "free": snapshot.num_free_blocks,
            "held": snapshot.num_held_blocks,
            "cached": snapshot.num_cached_blocks,
        },
        "sequences": [_sequence(view, names, now) for view in snapshot.sequences[:MAX_SEQUENCES]],
        "sequences_not_listed": _num_not_listed(snapshot),
    }


def _num_not_listed(snapshot: Snapshot) -> int:
    """Count the sequences above the limit, and those waiting that the snapshot leaves out."""
    num_waiting = sum(view.status in _QUEUED for view in snapshot.sequences)
    return max(len(snapshot.sequences) - MAX_SEQUENCES, 0) + max(len(snapshot.queue) - num_waiting, 0)


def _sequence(view: SequenceView, names: dict[str, str], now: float) -> dict[str, Any]:
    return {
        "request_id": names.get(view.request_id),
        "choice": view.choice,
        "tenant": view.tenant,
        "status": view.status,
        "age_s": round(now - view.arrival_s, 3),
        "prompt_tokens": view.num_prompt,
        "tokens": view.num_tokens,
        "computed_tokens": view.num_computed,
        "cached_tokens": view.num_cached,
        "preemptions": view.num_preemptions,
        "blocks": len(view.all_blocks),
    }


def _threads() -> list[dict[str, Any]]:
    """Return each thread's stack as "file:line function", the innermost frame last; no variables."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {
            "name": names.get(ident, str(ident)),
            "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_stack(top)],
        }
        for ident, top in sys._current_frames().items()  # noqa: SLF001 - the documented way to all stacks
    ]
