"""GET /v1/engine/live: the state of the pool and the engine, for the page.

The page gets only the first characters of a request's id: enough for a client to recognise its request, too few to use
another's. A tenant sees its own sequences; sums and the pool's cells cover all, the others' without their ids.

The pool is drawn as a bounded number of cells, whatever its size. A cell covers `blocks_per_cell` adjacent blocks. In a small pool that is one block, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.responses import Response

from engine.core.page_table import NO_BLOCK
from engine.core.stats import SequenceView, Snapshot
from server.answers.parts import InEngine, InLive, InOwner, InRequestLog
from server.telemetry.events import TAG_CHARS
from server.telemetry.request_log import EndedSequence
from server.tenancy.tenancy import DEFAULT

MAX_CELLS = 4096  # about the most that a screen shows side by side
OTHERS = -1  # the owner of blocks whose sequence the reader may not see
NO_OWNER = -2

Ints = npt.NDArray[np.int64]


class Cells(NamedTuple):
    """The first blocks of the pool in cells, run-length encoded."""

    num_blocks: int  # that the cells cover
    num_used: int  # up to the last block of the pool that is held or cached
    blocks_per_cell: int
    runs: list[list[int]]
    """[cells, held, shared, cached, tokens, owner] of adjacent equal cells.

    `held`, `shared` and `cached` count blocks of one cell; shared blocks have several holders and are also held.
    `tokens` are the computed positions of the held blocks. `owner` is the id of a sequence that holds blocks of the
    cell, of the majority's if one holds more than half; OTHERS, or NO_OWNER where nothing is held.
    """


def summarise(
    snapshot: Snapshot,
    num_blocks: int,
    block_size: int,
    *,
    is_visible: Callable[[SequenceView], bool] = lambda _: True,
    num_shown: int | None = None,
    max_cells: int = MAX_CELLS,
) -> Cells:
    """Return the first `num_shown` blocks (all by default) in at most `max_cells` cells, in physical order.

    Takes about 15 ms for 100,000 blocks in use.
    """
    holders = np.zeros(num_blocks, np.int64)
    tokens = np.zeros(num_blocks, np.int64)
    owners = np.full(num_blocks, NO_OWNER, np.int64)
    for view in snapshot.sequences:
        for table in view.tables:
            places = np.array(table, np.int64)
            computed = np.clip(view.num_computed - np.arange(len(places)) * block_size, 0, block_size)
            blocks, computed = places[places != NO_BLOCK], computed[places != NO_BLOCK]
            holders[blocks] += 1  # a page table names a block once
            tokens[blocks] = np.maximum(tokens[blocks], computed)
            owners[blocks] = view.seq_id if is_visible(view) else OTHERS
    cached = (np.frombuffer(snapshot.findable, np.uint8) > 0) & (holders == 0)
    used = np.flatnonzero((holders > 0) | cached)
    shown = num_blocks if num_shown is None else min(num_shown, num_blocks)
    size = -(-shown // max_cells)
    columns = [_per_cell(each[:shown], size) for each in (holders > 0, holders > 1, cached, tokens)]
    rows = np.stack([*columns, _owner_per_cell(owners[:shown], columns[0], size)], axis=1)
    return Cells(shown, int(used[-1]) + 1 if len(used) else 0, size, _encode(rows))


def _per_cell(values: npt.NDArray[np.generic], size: int) -> Ints:
    return np.add.reduceat(values.astype(np.int64), np.arange(0, len(values), size))


def _owner_per_cell(owners: Ints, num_held: Ints, size: int) -> Ints:
    """Return the median owner of each cell's held blocks: the majority's, if there is one."""
    padded = np.full(len(num_held) * size, NO_OWNER, np.int64)
    padded[: len(owners)] = owners
    ordered = np.sort(padded.reshape(-1, size), axis=1)  # blocks without an owner come first
    return ordered[np.arange(len(num_held)), size - 1 - num_held // 2]


def _encode(rows: Ints) -> list[list[int]]:
    """Return [length, *row] of each run of equal rows."""
    starts = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)])
    lengths = np.diff(np.r_[starts, len(rows)])
    encoded: list[list[int]] = np.column_stack([lengths, rows[starts]]).tolist()
    return encoded


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
        "sequences": [{**_shown(view, _OF_SEQUENCE), "num_blocks": len(view.all_blocks)} for view in views],
        "ended": [_shown(end, _OF_ENDED) for end in log.ended(since) if owner in (DEFAULT, end.owner)],
    }
    return Response(to_json(document), media_type="application/json", headers={"cache-control": "no-store"})


def _shown(sequence: SequenceView | EndedSequence, fields: Iterable[str]) -> dict[str, Any]:
    """Return fields of a sequence, with what names it both in a snapshot and at its end."""
    name = sequence.request_id
    named = {"tag": name[:TAG_CHARS], "prompt": name.rpartition("-")[2][:TAG_CHARS], "choice": sequence.choice}
    return {**named, **{field: getattr(sequence, field) for field in fields}}
