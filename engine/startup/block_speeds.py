"""Times decode steps with blocks of each size, for --block-size auto."""

from __future__ import annotations

import time
from collections.abc import Iterator

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.page_table import blocks_for
from engine.core.step import StepPlan
from engine.core.types import SamplingParams
from engine.runtime.execution.runner import ModelRunner, synthetic_slice
from engine.startup.block_size import CANDIDATES, with_block_size

_NUM_SEQS, _CONTEXT = 8, 512  # of the step that is timed
_NUM_STEPS, _NUM_ROUNDS = 5, 2


def measure_speeds(runner: ModelRunner, config: SchedulerConfig) -> dict[int, float]:
    """Return tokens a second for each block size that pool and backend accept.

    Afterwards the runner's pool is void, and it has no CUDA graphs, for these are recorded for one size."""
    speeds: dict[int, float] = {}
    for _ in range(_NUM_ROUNDS):
        for size in CANDIDATES:
            candidate = with_block_size(config, size)
            if candidate.num_blocks * size < config.max_model_len:
                continue  # the longest sequence would no longer fit
            try:
                runner.repartition(candidate, is_trial=True)
            except ConfigError:
                continue  # this backend has other sizes
            speeds[size] = max(speeds.get(size, 0.0), _speed(runner, candidate))
    return speeds


def _speed(runner: ModelRunner, config: SchedulerConfig) -> float:
    plan = _decode_plan(config)
    return len(plan.slices) / min(_time_steps(runner, plan))  # the minimum: disturbances only add time


def _time_steps(runner: ModelRunner, plan: StepPlan) -> Iterator[float]:
    runner.run(plan).wait()  # touches its memory for the first time
    for _ in range(_NUM_STEPS):
        begun = time.perf_counter()
        runner.run(plan).wait()
        yield time.perf_counter() - begun


def _decode_plan(config: SchedulerConfig) -> StepPlan:
    """Return a decode step that fills the pool with sequences of equal length."""
    context = min(_CONTEXT, config.max_model_len - 1, config.num_blocks * config.block_size - 1)
    per_sequence = blocks_for(context + 1, config.block_size)
    num_seqs = min(_NUM_SEQS, config.max_num_seqs, config.num_blocks // per_sequence)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    slices = [
        synthetic_slice(slot, context + 1, 1, range(slot * per_sequence, (slot + 1) * per_sequence), params)
        for slot in range(num_seqs)
    ]
    return StepPlan(0, slices, [], num_seqs, num_seqs)
