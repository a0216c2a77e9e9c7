"""Times single steps of the real engine.

The runner is called on this thread, without scheduler or HTTP.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from engine.core.page_table import blocks_for
from engine.core.step import StepPlan
from engine.loop import Engine
from loadtest.engines import build, device_of
from loadtest.simulation.measure import Shape

_NUM_TIMED = (5, 25)  # steps a measurement takes: at least, at most ...
_SECONDS = 0.4  # ... and about as long as this
_NOT_WRITTEN = {"model", "config", "api_key"}  # settings that the file of results does not repeat
_LARGEST = {"cpu": (2048, 512), "cuda": (16384, 1024)}  # tokens and sequences of the largest steps that are tried


class Load(NamedTuple):
    """A step: sequences that decode at a context length, and a chunk."""

    num_seqs: int
    context: int
    num_prompt_tokens: int = 0


class Probe:
    """Times the steps of one engine; each load is measured once."""

    def __init__(self, engine: Engine) -> None:
        self.config = engine.config
        self._runner = engine._runner  # noqa: SLF001 - it runs steps without the engine's thread
        self._vocab_size = engine.facts.vocab_size
        self.seconds: dict[Load, float] = {}
        self.spreads: list[float] = []  # of every measurement: its interquartile range, relative to its median

    def most_sequences(self, context: int) -> int:
        """Return how many sequences of a length fit, beside one for a prompt."""
        per_sequence = blocks_for(context + 1, self.config.block_size)
        return min(self.config.num_blocks // per_sequence, self.config.max_num_seqs) - 1

    def step_s(self, load: Load) -> float:
        """Return the median seconds of a step."""
        if load not in self.seconds:
            self.seconds[load] = self._measure(load)
        return self.seconds[load]

    def _measure(self, load: Load) -> float:
        shape = Shape(
            (load.context + 1,) * load.num_seqs, ((0, load.num_prompt_tokens),) * bool(load.num_prompt_tokens)
        )
        plan = shape.plan(self.config, self._vocab_size)
        self._run(plan)  # touches its memory for the first time
        least, most = _NUM_TIMED
        took: list[float] = []
        while len(took) < least or (len(took) < most and sum(took) < _SECONDS):
            took.append(self._run(plan))
        low, median, high = statistics.quantiles(took, n=4)
        self.spreads.append((high - low) / median)
        return median

    def _run(self, plan: StepPlan) -> float:
        begun = time.perf_counter()
        self._runner.run(plan).wait()
        return time.perf_counter() - begun


class Opener:
    """Builds engines that differ in their block size."""

    def __init__(self, model: str | None, settings: Sequence[str], report: Callable[[str], None]) -> None:
        from server.settings.flags import load_settings  # here, because `quire bench` does not need pydantic

        self._flags = [*([model] if model else []), *settings]
        self._report = report
        given = load_settings(self._flags)
        self.largest_step, self._max_num_seqs = _LARGEST[device_of(self._flags)]
        self.given = {name: getattr(given, name) for name in sorted(given.given - _NOT_WRITTEN)}

    @contextmanager
    def open(self, block_size: int) -> Iterator[Probe]:
        """Yield a probe of an engine with this block size and room for large steps."""
        self._report(f"loading the model, blocks of {block_size}")
        room = ["--max-num-batched-tokens", str(self.largest_step), "--max-num-seqs", str(self._max_num_seqs)]
        engine = build([*self._flags, "--block-size", str(block_size), *room])
        try:
            yield Probe(engine)
        finally:
            engine._runner.close()  # noqa: SLF001 - the engine's thread, which does this, was never started
