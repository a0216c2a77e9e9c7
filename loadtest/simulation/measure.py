"""Times single steps of the real engine on this thread.

The pool's blocks are filled first: memory that was never written is faster to read.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.page_table import blocks_for
from engine.core.step import RowStart, Runner, StepPlan, plan_prompts
from engine.core.types import SamplingParams

DECODING = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXTS = (32, 400, 1600)
CHUNKS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
_PARAMS = SamplingParams(max_tokens=2, temperature=0.0)

OnStep = Callable[[], None]


class Shape(NamedTuple):
    """A step: the contexts of decoding sequences, and chunks (start, count)."""

    contexts: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.contexts) + sum(count for _, count in self.chunks)

    def fits(self, config: SchedulerConfig) -> bool:
        """Return whether the scheduler could plan this step."""
        lengths = [*self.contexts, *(start + count for start, count in self.chunks)]
        return (
            self.num_tokens <= config.max_num_batched_tokens
            and len(lengths) <= config.max_num_seqs
            and max(lengths) < config.max_model_len
            and sum(blocks_for(length, config.block_size) for length in lengths) <= config.num_blocks
        )

    def plan(self, config: SchedulerConfig, vocab_size: int) -> StepPlan:
        """Return a plan of this shape, in which every slice draws a token."""
        rows, block = [], 0
        pieces = [*((context - 1, 1) for context in self.contexts), *self.chunks]
        for slot, (start, count) in enumerate(pieces):
            stop = start + count
            ids = tuple([(slot * 7919 + position * 31) % vocab_size for position in range(stop)])
            num_blocks = blocks_for(stop, config.block_size)
            table = tuple([number % config.num_blocks for number in range(block, block + num_blocks)])
            block += num_blocks
            rows.append(RowStart(slot, -1 - slot, stop, _PARAMS, 0, ids, (table,) * config.num_groups))
        return plan_prompts(rows, [count for _, count in pieces])


def grid(config: SchedulerConfig) -> list[Shape]:
    """Return the steps to fit: decoding alone, chunks alone, and both together."""
    shapes = [Shape((context,) * num) for num in DECODING for context in CONTEXTS]
    shapes += [Shape((), ((start, count),)) for count in CHUNKS for start in (0, 500, 1500)]
    shapes += [Shape((200,) * num, ((0, count),)) for num in (4, 16, 64) for count in (32, 128, 384)]
    return [shape for shape in shapes if shape.fits(config)]


def held_out(config: SchedulerConfig, num: int, seed: int = 0) -> list[Shape]:
    """Return random steps, to measure the error of the fit."""
    rng = random.Random(seed)
    shapes: list[Shape] = []
    while len(shapes) < num:
        contexts = tuple(rng.randint(8, 1500) for _ in range(int(2 ** rng.uniform(0, 7))))
        chunks = [(rng.choice((0, rng.randint(0, 1500))), rng.randint(8, 300)) for _ in range(rng.choice((0, 0, 1, 2)))]
        shape = Shape(contexts, tuple(chunks))
        if shape.fits(config):
            shapes.append(shape)
    return shapes


def fill_pool(runner: Runner, config: SchedulerConfig, shapes: Sequence[Shape], vocab_size: int) -> None:
    """Fill every block of the shapes: the first is computed, the others are copies."""
    lengths = [[*shape.contexts, *(start + count for start, count in shape.chunks)] for shape in shapes]
    most = max(sum(blocks_for(length, config.block_size) for length in each) for each in lengths)
    plan = Shape((), ((0, config.block_size),)).plan(config, vocab_size)
    runner.run(plan).wait()
    for first in range(1, most, 256):
        copies = tuple([(0, block) for block in range(first, min(first + 256, most))])
        runner.run(plan._replace(copies=copies)).wait()


class Times:
    """The seconds of each shape, round by round."""

    def __init__(self, runner: Runner, config: SchedulerConfig, shapes: Sequence[Shape], vocab_size: int) -> None:
        self.shapes = shapes
        self._runner = runner
        self.plans = [shape.plan(config, vocab_size) for shape in shapes]
        self._found: list[list[float]] = [[] for _ in shapes]
        self._rng = random.Random(0)

    def measure(self, rounds: int, on_step: OnStep) -> None:
        """Measure each shape once a round, in random order."""
        order = list(range(len(self.plans)))
        for _ in range(rounds):
            self._rng.shuffle(order)
            for index in order:
                plan = self.plans[index]
                self._runner.run(plan).wait()  # restores the slots and caches that another shape used
                plan = plan._replace(rows=())  # which the runner has now
                begun = time.perf_counter()
                self._runner.run(plan).wait()
                self._found[index].append(time.perf_counter() - begun)
                on_step()

    def forget(self) -> None:
        """Discard the measurements of a warm-up."""
        self._found = [[] for _ in self.shapes]

    @property
    def seconds(self) -> list[float]:
        """Return the median of each shape."""
        return [statistics.median(times) for times in self._found]
