"""GET /v1/engine/live: the state of the pool and the engine, for the page.

The page gets only the first characters of a request's id: enough for a client to recognise its request, too few to use
another's. A tenant sees its own sequences; sums and the pool's cells cover all, the others' without their ids.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.responses import Response

from engine.core.stats import SequenceView
from server.answers.parts import InEngine, InLive, InOwner, InRequestLog
from server.operations.pool_cells import MAX_CELLS, summarise
from server.telemetry.events import TAG_CHARS
from server.telemetry.request_log import EndedSequence
from server.tenancy.tenant_file import DEFAULT

_OF_SEQUENCE = (
    *("seq_id", "status", "num_prompt", "num_tokens", "num_computed", "num_cached", "num_preemptions"),
    *("arrival_s", "first_scheduled_s", "first_token_s"),
)
_OF_ENDED = ("at_s", "num_tokens", "num_preemptions", "queue_s", "prefill_s", "decode_s", "finish_reason")

router = APIRouter()


@router.get("/v1/engine/live")
async def live(
    engine: InEngine,
    view: InLive,
    log: InRequestLog,
    owner: InOwner,
    cells: Annotated[int, Query(ge=1, le=MAX_CELLS)] = MAX_CELLS,
    blocks: Annotated[int | None, Query(ge=1)] = None,
    since: Annotated[float, Query(allow_inf_nan=False)] = 0.0,
) -> Response:
    """Return the engine's state: its first `blocks` in at most `cells` cells, and the sequences that ended `since` a time.

    The time is an earlier answer's `time_s`.
    """
    snapshot = await view.snapshot()
    config, stats = engine.config, engine.stats
    views = [view for view in snapshot.sequences if owner in (DEFAULT, view.tenant)]
    pool = summarise(
        snapshot,
        config.num_blocks,
        config.block_size,
        is_visible=lambda view: owner in (DEFAULT, view.tenant),
        num_shown=blocks,
        max_cells=cells,
    )
    document = {
        "object": "engine.live",
        "time_s": engine.clock(),
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "num_groups": len(config.groups),
        "blocks": {
            "held": snapshot.num_held_blocks,
            "cached": snapshot.num_cached_blocks,
            "free": snapshot.num_free_blocks,
        },
        "cells": pool._asdict(),
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting, "preempted": stats.num_preempted},
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
        "sequences": [_sequence(view) for view in views],
        "ended": [_ended(end) for end in log.ended(since) if owner in (DEFAULT, end.owner)],
    }
    return Response(to_json(document), media_type="application/json", headers={"cache-control": "no-store"})


def _name(request_id: str, choice: int) -> dict[str, Any]:
    """Return what names a sequence both in a snapshot and at its end."""
    return {"tag": request_id[:TAG_CHARS], "prompt": request_id.rpartition("-")[2][:TAG_CHARS], "choice": choice}


def _ended(end: EndedSequence) -> dict[str, Any]:
    return {**_name(end.request_id, end.choice), **{name: getattr(end, name) for name in _OF_ENDED}}


def _sequence(view: SequenceView) -> dict[str, Any]:
    shown = {name: getattr(view, name) for name in _OF_SEQUENCE}
    return {**_name(view.request_id, view.choice), **shown, "num_blocks": len(view.all_blocks)}
