"""Times the scheduler alone: one plan and one commit of a decode step; and what KV events add to steps."""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Request, SamplingParams
from loadtest.arguments import positive_int
from loadtest.fake_runner import FakeRunner
from loadtest.output import print_table, save_json
from loadtest.report import percentile

PROMPT_LEN = 64
TARGET_US = 300.0  # at 256 sequences
ANSWER_LEN = 128  # of sequences that end, with --kv-events


def decode_step_us(
    num_seqs: int, num_steps: int, prompt_len: int = PROMPT_LEN, windows: tuple[int, ...] = ()
) -> list[float]:
    """Return the microseconds of each plan and commit while sequences decode."""
    config = SchedulerConfig(
        num_blocks=(1 + len(windows)) * num_seqs * ((prompt_len + num_steps) // 16 + 2),
        block_size=16,
        max_model_len=prompt_len + num_steps + 64,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * prompt_len,
        windows=windows,
    )
    scheduler, runner = Scheduler(config), FakeRunner(config, memory=False)
    params = SamplingParams(max_tokens=num_steps + 32, temperature=0.0)
    for index in range(num_seqs):
        prompt = tuple((index * 7919 + position) % 512 for position in range(prompt_len))
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


class EventTimes:
    """Steps in which sequences end and others begin, all of them different, with KV events or without."""

    def __init__(self, num_seqs: int, *, has_events: bool) -> None:
        self.us: list[float] = []
        length = PROMPT_LEN + ANSWER_LEN
        config = SchedulerConfig(
            num_blocks=2 * num_seqs * length // 16,  # half of it is held: the rest is cached, and evicted
            block_size=16,
            max_model_len=length,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + 8 * PROMPT_LEN,
        )
        self._num_seqs, self._num_added, self._now = num_seqs, 0, 0.0
        self._scheduler, self._runner = Scheduler(config), FakeRunner(config, memory=False)
        self._contents, self._events = None, None
        if has_events:
            from engine.outbound.contents import Contents
            from engine.outbound.kv_events import KVEvents
            from engine.settings.kv_events_config import KVEventsConfig

            self._events = KVEvents(KVEventsConfig(endpoint="tcp://127.0.0.1:*"), config.block_size)
            self._contents = Contents(self._scheduler.kv, self._events.put)
            self._events.start()

    def run(self, num_steps: int) -> None:
        """Time steps on this thread; new sequences take the places of those that have ended."""
        scheduler = self._scheduler
        for _ in range(num_steps):
            self._now += 0.01
            while scheduler.stats.num_running + scheduler.stats.num_waiting < self._num_seqs:
                self._add()
            started = time.thread_time()
            plan = scheduler.plan(self._now)
            if self._contents is not None:
                self._contents.flush()
            planned = time.thread_time()
            assert plan is not None
            result = self._runner.run(plan).wait()
            committing = time.thread_time()
            scheduler.commit(plan, result, self._now)
            if self._contents is not None:
                self._contents.flush()
            self.us.append((planned - started + time.thread_time() - committing) * 1e6)

    def _add(self) -> None:
        index = self._num_added
        self._num_added += 1
        # The first ones end at different times, so that later steps are alike.
        num_answer = ANSWER_LEN if index >= self._num_seqs else 1 + index * ANSWER_LEN // self._num_seqs
        params = SamplingParams(max_tokens=num_answer, temperature=0.0)
        prompt = tuple((index * 7919 + position * position) % 49152 for position in range(PROMPT_LEN))
        self._scheduler.add(Request(request_id=f"r{index}", prompt=prompt, params=params, arrival_s=self._now))

    def close(self) -> None:
        """End the publisher."""
        if self._events is not None:
            self._events.close()


def events_cost_us(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Return the mean microseconds of a step, off and on; the two take turns of 20 steps."""
    both = {"off": EventTimes(num_seqs, has_events=False), "on": EventTimes(num_seqs, has_events=True)}
    for each in both.values():
        each.run(2 * ANSWER_LEN)
        each.us.clear()
    for _ in range(num_steps // 20):
        for each in both.values():
            each.run(20)
    for each in both.values():
        each.close()
    return {name: sum(each.us) / len(each.us) for name, each in both.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scheduler`."""
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--num-steps", type=positive_int, default=500, help="decode steps to time; default %(default)s")
    parser.add_argument("--prompt-len", type=positive_int, default=PROMPT_LEN, help="tokens; default %(default)s")
    parser.add_argument(
        "--windows", type=positive_int, nargs="+", default=[], metavar="N", help="a group of windows of N for each"
    )
    parser.add_argument("--kv-events", action="store_true", help="time steps with and without KV events instead")
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Time and print."""
    gc.disable()  # a collection is the process's cost, not the scheduler's
    if options.kv_events:
        costs = {num_seqs: events_cost_us(num_seqs, options.num_steps) for num_seqs in options.num_seqs}
        print_table(
            ("sequences", "plan + commit us, mean", "with KV events", "more"),
            (
                (num, *(f"{us:.1f}" for us in (each["off"], each["on"], each["on"] - each["off"])))
                for num, each in costs.items()
            ),
        )
        save_json(options.json, {"kv_events": costs})
        return 0
    rows = {}
    for num_seqs in options.num_seqs:
        steps = decode_step_us(num_seqs, options.num_steps, options.prompt_len, tuple(options.windows))
        ordered = sorted(steps)
        rows[num_seqs] = {"median_us": percentile(ordered, 0.5), "p99_us": percentile(ordered, 0.99)}
    print_table(
        ("sequences decoding", "plan + commit us, median", "p99"),
        ((num_seqs, *(f"{each:.1f}" for each in row.values())) for num_seqs, row in rows.items()),
    )
    print(f"The target is {TARGET_US:g} us with 256 sequences.")
    save_json(options.json, {"plan_and_commit": rows})
    return 0
