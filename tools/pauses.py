"""Measures how long a message waits for an engine that is idle, with many cached blocks.

    python -m tools.pauses 60000 270000

Waits are from a call's submission to its run on the engine's thread, at random moments after the last message. The other
rows are the engine thread's time for one task between two steps.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.kv.prefix_cache import chain_root
from engine.core.scheduling.scheduler import Scheduler
from engine.handle import EngineFacts
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner

_SIZE, _RUN = 16, 15  # tokens a block, and blocks a sequence
_NUM_PROBES = 40


def measure(num_blocks: int) -> dict[str, float]:
    """Return rows of milliseconds."""
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=_SIZE, max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512
    )
    scheduler = Scheduler(config)
    prompt = _fill(scheduler, num_blocks)
    engine = Engine(scheduler, FakeRunner(config, vocab_size=1000), EngineFacts(1000))
    engine.start(lambda _: None)
    draw = random.Random(1)
    waits = []
    for _ in range(_NUM_PROBES):
        time.sleep(draw.uniform(0.1, 0.6))
        begun_s = time.perf_counter()
        ran_s: float = engine.between_steps(lambda *_: time.perf_counter()).result()
        waits.append(1e3 * (ran_s - begun_s))
    waits.sort()
    rows = {
        "wait, p50": waits[len(waits) // 2],
        "wait, largest": waits[-1],
        "snapshot": _task_ms(engine, lambda scheduler: scheduler.snapshot()),
        "lookup of a prompt": _task_ms(
            engine, lambda scheduler: scheduler.kv.find_prefix([chain_root("")], prompt, len(prompt) // _SIZE)
        ),
    }
    engine.stop(0.0)
    return rows


def _fill(scheduler: Scheduler, num_blocks: int) -> list[int]:
    """Let sequences without a named prompt leave until all blocks are cached; return the tokens of one."""
    cache, draw = scheduler.kv._cache, random.Random(0)  # noqa: SLF001 - serving as much would take hours
    tokens: list[int] = []
    for _ in range(num_blocks // _RUN):
        tokens = draw.choices(range(1000), k=_RUN * _SIZE)
        blocks = cache.pool.alloc_many(_RUN)
        cache.register([chain_root("")], tokens, blocks, 0, _RUN)
        cache.pool.free(*reversed(blocks))
    return tokens


def _task_ms(engine: Engine, task: Callable[[Scheduler], Any]) -> float:
    def timed(scheduler: Scheduler, _: object) -> float:
        begun_s = time.thread_time()
        task(scheduler)
        return 1e3 * (time.thread_time() - begun_s)

    return engine.between_steps(timed).result()


def main() -> None:
    """Print a table for each number of blocks."""
    for num_blocks in map(int, sys.argv[1:] or ("60000", "270000")):
        print(f"{num_blocks} cached blocks, milliseconds")
        for name, value in measure(num_blocks).items():
            print(f"  {name:20} {value:8.2f}")


if __name__ == "__main__":
    main()
