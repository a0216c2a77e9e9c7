"""Plans of synthetic prompts, which warm a device up and measure its memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.config import SchedulerConfig
from engine.core.step import RowStart, StepPlan, plan_prompts
from engine.core.types import SamplingParams


def warm_up_plan(config: SchedulerConfig, num_seqs: int, num_tokens: int) -> StepPlan:
    """Return a step of synthetic prompts that all draw; it writes to the first blocks."""
    rows, block = [], 0
    params = SamplingParams(max_tokens=1, top_p=0.9)
    for slot in range(num_seqs):
        length = num_tokens // num_seqs + (slot < num_tokens % num_seqs)
        num_blocks = -(-length // config.block_size)
        table = [(block + i) % config.num_blocks for i in range(num_blocks)]
        block += num_blocks
        rows.append(synthetic_row(config, slot, length, table, params))
    return plan_prompts(rows, [len(row.ids) for row in rows], state_slots(config, num_seqs))


def synthetic_row(
    config: SchedulerConfig, slot: int, length: int, table: Sequence[int], params: SamplingParams
) -> RowStart:
    """Return a row with a prompt of zeros, of which nothing was computed.

    Each group of layers has a share of the pool: a layer that reads what an earlier one kept would read another layout's.
    """
    share = config.num_blocks // config.num_groups or 1
    tables = [
        [(group * share + block % share) % config.num_blocks for block in table] for group in range(config.num_groups)
    ]
    return RowStart(slot, -1 - slot, length, params, 0, (0,) * length, tuple(map(tuple, tables)))


def state_slots(config: SchedulerConfig, num_seqs: int) -> list[tuple[int, ...]]:
    """Return the blocks of rows' recurrent states, if there are any: of each row others, as far as the pool goes.

    Programs of two rows that write to the same blocks would read each other's numbers again.
    """
    size = config.state_blocks
    num_slots = max(config.num_blocks // size, 1) if size else 0
    return [tuple(range(at % num_slots * size, at % num_slots * size + size)) for at in range(num_seqs) if size]
