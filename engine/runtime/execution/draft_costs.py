"""Measures the cost of drafts on this machine, at the start over the pool that will serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from engine.core.config import DraftCosts, SchedulerConfig
from engine.core.page_table import blocks_for
from engine.core.scheduling.drafts import lower_hull
from engine.core.step import StepPlan
from engine.core.types import SamplingParams
from engine.runtime.execution.runner import ModelRunner, warm_up_plan
from engine.runtime.speculation.base import Drafter, with_drafts

_MIN_TIMES, _MAX_TIMES, _LONG_S = 3, 10, 0.05
_ENOUGH = 4.0  # times the first; beyond, the cost is linear
_MAX_ROWS = 256


def measure_draft_costs(
    runner: ModelRunner, drafter: Drafter, config: SchedulerConfig, num_drafts: int, *, captures: bool
) -> DraftCosts:
    """Time the drafter, and steps of growing size; the runner must not speculate yet, a head runs in its steps.

    A row costs the same with and without drafts, unless a step without drafts becomes a graph (`captures`).
    """

    def run(plan: StepPlan) -> None:
        runner.run(plan).wait()

    plain = list(_points(config, 0, run))
    checking = list(_points(config, num_drafts, lambda plan: run(_drafted(plan))))
    if not captures:
        plain = checking = plain + checking
    drafting = tuple(_drafting(drafter, config, num_drafts, run))
    return DraftCosts(lower_hull(plain), lower_hull(checking or plain), drafting)


def _points(config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None]) -> Iterator[tuple[int, float]]:
    """(rows, seconds), until it is long enough."""
    first = 0.0
    for num_seqs in _numbers(config, num_drafts):
        plan = _plan(config, num_seqs, num_drafts)
        cost = _time(lambda plan=plan: run(plan))  # type: ignore[misc]
        yield num_seqs * (1 + num_drafts), cost
        first = first or cost
        if cost > _ENOUGH * first:
            break


def _drafting(
    drafter: Drafter, config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None]
) -> Iterator[tuple[int, float]]:
    for num_seqs in _numbers(config, num_drafts):
        plan = _plan(config, num_seqs, num_drafts)
        run(plan._replace(num_drafts={}))  # for the states that a head reads
        following = [
            replace(piece, tokens=[0, 0], start=1, block_table=[*piece.block_table, piece.block_table[-1]])
            for piece in plan.slices  # with an entry for the last draft, which is noted and not read
        ]
        plan = plan._replace(slices=following)
        yield num_seqs, _time(lambda plan=plan: drafter.draft(plan)) / num_drafts  # type: ignore[misc]


def _numbers(config: SchedulerConfig, num_drafts: int) -> Iterator[int]:
    """Yield numbers of sequences 1, 2, 4, ... that a step and the pool can hold."""
    num_seqs, rows = 1, 1 + num_drafts
    blocks = blocks_for(rows, config.block_size)
    most_rows = min(_MAX_ROWS, config.max_num_batched_tokens)
    while num_seqs <= min(config.max_num_seqs, config.num_blocks // blocks) and num_seqs * rows <= most_rows:
        yield num_seqs
        num_seqs *= 2


def _plan(config: SchedulerConfig, num_seqs: int, num_drafts: int) -> StepPlan:
    """Return a plan of sequences of one token, with room for drafts."""
    params = SamplingParams(max_tokens=1 + num_drafts, temperature=0.0)
    whole = warm_up_plan(config, num_seqs, num_seqs * (1 + num_drafts))
    slices = [replace(piece, tokens=[0], num_prompt=1, num_tokens=1, params=params) for piece in whole.slices]
    room = dict.fromkeys(range(num_seqs), num_drafts) if num_drafts else {}
    return StepPlan(0, slices, [], num_seqs, num_seqs, num_drafts=room)


def _drafted(plan: StepPlan) -> StepPlan:
    return with_drafts(plan, {index: [0] * num for index, num in plan.num_drafts.items()})


def _time(compute: Callable[[], object]) -> float:
    """Return the minimum of a few timings after a warm-up; of more if they are short."""
    compute()
    times: list[float] = []
    while len(times) < _MIN_TIMES or (sum(times) < _LONG_S and len(times) < _MAX_TIMES):
        begun = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begun)
    return min(times)
