"""Takes snapshots between two steps: the page tables and the cached blocks.

The engine thread makes a snapshot on request (Engine.look); any thread may read it. Only integers are copied, which takes
well under a millisecond; the reader formats them. It has no tokens and no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.core.kv.block_pool import BlockPool
from engine.core.sequence import Sequence, Status
from engine.core.stats import Stats

MAX_WAITING = 64  # sequences without blocks that are listed: a long queue would make snapshots slow


class SequenceView(NamedTuple):
    """One sequence and its page table."""

    seq_id: int
    request_id: str
    tenant: str
    choice: int
    status: Status
    num_prompt: int
    num_tokens: int  # prompt and answer so far
    num_computed: int  # of these, with K and V in the pool
    num_cached: int  # of these, found in the prefix cache
    num_preemptions: int
    blocks: tuple[int, ...]  # physical blocks in logical order


class Snapshot(NamedTuple):
    """The pool and its holders. Sums and counts grow over the engine's life; a reader takes differences."""

    time_s: float
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    ttft_sum_s: float
    ttft_count: int
    itl_sum_s: float  # gaps between two tokens of an answer
    itl_count: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_free_blocks: int
    num_held_blocks: int
    cached_blocks: tuple[int, ...]  # not held, but found by prompts
    sequences: tuple[SequenceView, ...]
    queue: tuple[str, ...]  # ids of the waiting requests, the next one first


def take_snapshot(
    stats: Stats, pool: BlockPool, living: Iterable[Sequence], queue: Iterable[Sequence], now: float
) -> Snapshot:
    """Return a snapshot. `living` are all sequences that hold blocks or wait, `queue` those that wait, in order."""
    views: list[SequenceView] = []
    num_empty = 0
    for seq in living:
        if not seq.kv.blocks:
            num_empty += 1
            if num_empty > MAX_WAITING:
                continue
        views.append(
            SequenceView(
                seq_id=seq.seq_id,
                request_id=seq.request_id,
                tenant=seq.request.tenant,
                choice=seq.choice,
                status=seq.status,
                num_prompt=seq.num_prompt,
                num_tokens=len(seq.tokens),
                num_computed=seq.num_computed,
                num_cached=seq.history.num_cached,
                num_preemptions=seq.history.num_preemptions,
                blocks=tuple(seq.kv.blocks),
            )
        )
    return Snapshot(
        time_s=now,
        steps=stats.steps,
        prompt_tokens=stats.prompt_tokens,
        generation_tokens=stats.generation_tokens,
        preemptions=stats.preemptions,
        ttft_sum_s=stats.ttft_s.sum,
        ttft_count=stats.ttft_s.count,
        itl_sum_s=stats.itl_s.sum,
        itl_count=stats.itl_s.count,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_preempted=stats.num_preempted,
        num_free_blocks=pool.num_free,
        num_held_blocks=pool.num_held,
        cached_blocks=pool.cached_blocks,
        sequences=tuple(views),
        queue=tuple([seq.request_id for seq in queue]),
    )
