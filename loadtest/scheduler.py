"""Times the scheduler alone: one plan and one commit of a decode step."""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.core.types import Request, SamplingParams
from loadtest.arguments import positive_int
from loadtest.output import print_table, save_json
from loadtest.report import percentile

PROMPT_LEN = 64
TARGET_US = 300.0  # at 256 sequences


def decode_step_us(num_seqs: int, num_steps: int) -> list[float]:
    """Return the microseconds of each plan and commit while sequences decode."""
    config = SchedulerConfig(
        num_blocks=num_seqs * (PROMPT_LEN + num_steps) // 16 + num_seqs,
        block_size=16,
        max_model_len=PROMPT_LEN + num_steps + 64,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * PROMPT_LEN,
    )
    scheduler, runner = Scheduler(config), FakeRunner(config, memory=False)
    params = SamplingParams(max_tokens=num_steps + 32, temperature=0.0)
    for index in range(num_seqs):
        prompt = tuple((index * 7919 + position) % 512 for position in range(PROMPT_LEN))
        scheduler.add(Request(request_id=f"r{index}", prompt=prompt, params=params, arrival_s=0.0))
    figures = []
    now = 0.0
    for _ in range(num_steps + 8):
        now += 0.01
        started = time.perf_counter()
        plan = scheduler.plan(now)
        planned = time.perf_counter()
        assert plan is not None
        result = runner.run(plan).wait()
        committing = time.perf_counter()
        scheduler.commit(plan, result, now)
        figures.append((planned - started + time.perf_counter() - committing) * 1e6)
    return figures[8:]  # the first steps prefill


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scheduler`."""
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--num-steps", type=positive_int, default=500, help="decode steps to time; default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Time and print."""
    gc.disable()  # a collection is the process's cost, not the scheduler's
    rows = {}
    for num_seqs in options.num_seqs:
        ordered = sorted(decode_step_us(num_seqs, options.num_steps))
        rows[num_seqs] = {"median_us": percentile(ordered, 0.5), "p99_us": percentile(ordered, 0.99)}
    print_table(
        ("sequences decoding", "plan + commit us, median", "p99"),
        ((num_seqs, *(f"{each:.1f}" for each in row.values())) for num_seqs, row in rows.items()),
    )
    print(f"The target is {TARGET_US:g} us with 256 sequences.")
    save_json(options.json, {"plan_and_commit": rows})
    return 0
