"""When those that run will be through, by what steps are known to take: an upper bound, exact where nobody's prompt is left.

Everybody decodes in every step, and prompts fill what is left of it, in order. Of others' decodes an answer with d steps to go
sees min(d, theirs); while its own prompt is computed it may see one more of them in every step. So its seconds are at most

    all prompts + d * fixed + sum over others of min(d, theirs) decodes + steps with prompts * (what such a step holds besides)

Long prompts of others are paced (pacing.py), and add no more than their share of the rest. As a step is taken that holds all
of the work, and nothing else, no bound rises by less than the step takes: what was promised by it stays kept. Pure functions
of integers and seconds, a few hundred nanoseconds a sequence; knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from engine.core.pacing import SHARE
from engine.core.sequence import Sequence, Status
from engine.core.step_time import Costs

_num_decodes = attrgetter("num_decodes")


class Work(NamedTuple):
    """What is left to do of a sequence, or of n that are to fork from one prompt."""

    num_decodes: int  # steps, once all that is known is computed
    first: int  # position of the first of them
    num_rows: int = 1
    num_known: int = 0  # positions that are known and not computed yet
    known_s: float = 0.0  # what they add to steps
    is_paced: bool = False  # they are computed in small pieces
    due_s: float = inf  # when it is to be through
    owner: Sequence | None = None


def work_of(seq: Sequence, costs: Costs, num_cached: int = 0) -> Work:
    """Of a sequence that runs, or of one that waits and would find so many positions in the cache."""
    end = seq.promised_total or seq.num_prompt + seq.request.params.max_tokens
    due_s = inf
    if seq.promised_total and seq.request.deadline_s is not None:
        due_s = seq.request.arrival_s + seq.request.deadline_s
    num_rows = len(seq.seats) or seq.num_seats
    start = seq.num_planned or num_cached
    if seq.status is Status.RUNNING:
        return Work(max(end - 1 - start, 0), start, num_rows, 0, 0.0, False, due_s, seq)
    first = len(seq.tokens)
    known_s = costs.chunk_s(start, first - start)
    is_paced = seq.is_long and due_s == inf
    return Work(max(end - 1 - first, 0), first, num_rows, first - start, known_s, is_paced, due_s, seq)


def seconds_left(
    works: Iterable[Work], costs: Costs, step_limit: int, *, is_begun: bool = False
) -> list[tuple[float, Work]]:
    """Who is through after how many seconds, if all of these share steps of so many tokens from now on.

    If a step `is_begun`, planned in part, prompts may still join it, and what it holds already is not counted.
    """
    fixed_s, chunked_s, decode_s, context_s = costs.fixed_s, costs.chunked_s, costs.decode_s, costs.context_s
    ordered = sorted(works, key=_num_decodes)
    num_rows = rows_positions = num_known = num_paced = farthest = 0
    prompts_s = paced_s = last_s = 0.0
    for num_decodes, first, rows, known, known_s, is_paced, _, _ in ordered:
        num_rows += rows
        rows_positions += rows * first
        last_s += rows * (decode_s + context_s * (first + num_decodes))
        if is_paced:
            num_paced, paced_s = num_paced + 1, paced_s + known_s
        elif known:
            num_known, prompts_s, farthest = num_known + known, prompts_s + known_s, max(farthest, first)
    num_chunks = -(-num_known // max(step_limit - num_rows, 1))
    chunk_s = costs.chunk_s(max(farthest - step_limit, 0), min(step_limit, num_known))  # the most of a step
    share = SHARE * num_paced * num_paced
    through_s = 0.0  # the decodes of those that are through before
    found = []
    for work in ordered:
        num, first, rows, known, *_ = work
        positions = rows_positions * num + num_rows * (num * (num - 1) // 2)
        total_s = num * fixed_s + through_s + decode_s * num_rows * num + context_s * positions
        if known:
            besides_s = last_s - rows * (decode_s + context_s * (first + num))
            total_s += prompts_s + num_chunks * (fixed_s + chunked_s + besides_s)
        else:
            num_steps = num + is_begun
            total_s += min(prompts_s, num_steps * chunk_s) + min(num_chunks, num_steps) * chunked_s
        found.append((total_s + min(paced_s, share * total_s), work))
        num_rows -= rows
        rows_positions -= rows * first
        through_s += rows * (decode_s * num + context_s * (num * first + num * (num - 1) // 2))
    return found
