"""Measures the cost of drafts on this machine, at the start over the pool that will serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from engine.core.config import DraftCosts, SchedulerConfig
from engine.core.page_table import blocks_for
from engine.core.scheduling.drafts import lower_hull
from engine.core.step import Rows, StepPlan, plan_prompts
from engine.core.types import SamplingParams
from engine.runtime.execution.runner import ModelRunner, warm_up_plan
from engine.runtime.speculation.drafter import Drafter

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
    checking = list(_points(config, num_drafts, run))
    if not captures:
        plain = checking = plain + checking
    drafting = tuple(_drafting(drafter, config, num_drafts, run))
    return DraftCosts(lower_hull(plain), lower_hull(checking or plain), drafting)


def _points(config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None]) -> Iterator[tuple[int, float]]:
    """(rows, seconds), until it is long enough."""
    first = 0.0
    for num_seqs in _numbers(config, num_drafts):
        plan = _checking(config, num_seqs, num_drafts)
        cost = _time(lambda plan=plan: run(plan))  # type: ignore[misc]
        yield num_seqs * (1 + num_drafts), cost
        first = first or cost
        if cost > _ENOUGH * first:
            break


def _drafting(
    drafter: Drafter, config: SchedulerConfig, num_drafts: int, run: Callable[[StepPlan], None]
) -> Iterator[tuple[int, float]]:
    params = SamplingParams(max_tokens=1 + num_drafts, temperature=0.0)
    width = blocks_for(config.max_model_len, config.block_size)
    for num_seqs in _numbers(config, num_drafts):
        rows = []
        for row in warm_up_plan(config, num_seqs, num_seqs * (1 + num_drafts)).rows:
            # The last draft's entry is noted and not read.
            tables = tuple([(*table, table[-1])[:width] for table in row.tables])
            rows.append(row._replace(params=params, ids=(0,), num_prompt=1, tables=tables))
        plan = plan_prompts(rows, [1] * num_seqs, config.state_blocks)
        run(plan)  # for the states that a head reads
        slices = [piece._replace(tokens=[0, 0], start=1) for piece in Rows().follow(plan)]
        plan = plan._replace(drafts=tuple([(index, num_drafts) for index in range(num_seqs)]))
        yield num_seqs, _time(lambda plan=plan, slices=slices: drafter.draft(plan, slices)) / num_drafts  # type: ignore[misc]


def _numbers(config: SchedulerConfig, num_drafts: int) -> Iterator[int]:
    """Yield numbers of sequences 1, 2, 4, ... that a step and the pool can hold."""
    num_seqs, rows = 1, 1 + num_drafts
    blocks = blocks_for(rows, config.block_size)
    most_rows = min(_MAX_ROWS, config.max_num_batched_tokens)
    while num_seqs <= min(config.max_num_seqs, config.num_blocks // blocks) and num_seqs * rows <= most_rows:
        yield num_seqs
        num_seqs *= 2


def _checking(config: SchedulerConfig, num_seqs: int, num_drafts: int) -> StepPlan:
    """Return a step of sequences of one token and its drafts, with a draw for each."""
    plan = warm_up_plan(config, num_seqs, num_seqs * (1 + num_drafts))
    params = SamplingParams(max_tokens=1 + num_drafts, temperature=0.0)
    return plan._replace(
        rows=tuple([row._replace(params=params) for row in plan.rows]),
        chunks=tuple([chunk._replace(samples=chunk.samples * (1 + num_drafts)) for chunk in plan.chunks]),
        num_samples=plan.num_tokens,
    )


def _time(compute: Callable[[], object]) -> float:
    """Return the minimum of a few timings after a warm-up; of more if they are short."""
    compute()
    times: list[float] = []
    while len(times) < _MIN_TIMES or (sum(times) < _LONG_S and len(times) < _MAX_TIMES):
        begun = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begun)
    return min(times)
