"""Real steps of a real engine, timed one by one: so many sequences decoding, and so much of a prompt beside them.

The engine is built as a daemon's would be and its runner is called on this thread, without scheduler or HTTP. Its
insides are known here and in loadtest/steps.py, nowhere else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from engine.core.kv.page_table import blocks_for
from engine.core.step import StepPlan
from engine.loop import Engine
from loadtest.simulation.measure import Shape

_NUM_TIMED = (5, 25)  # steps a measurement takes: at least, at most ...
_SECONDS = 0.4  # ... and about as long as this
_LARGEST = {"cpu": (2048, 512), "cuda": (16384, 1024)}  # tokens and sequences of the largest steps that are tried


class Load(NamedTuple):
    """The content of a step: sequences that decode at a context length, and a chunk of a prompt."""

    num_seqs: int
    context: int
    num_prompt_tokens: int = 0


class Probe:
    """Times the steps of one engine. A load is measured once, and remembered."""

    def __init__(self, engine: Engine) -> None:
        self.config = engine.config
        self._runner = engine._runner  # noqa: SLF001 - see above
        self._vocab_size = engine.vocab_size
        self.seconds: dict[Load, float] = {}
        self.spreads: list[float] = []  # of every measurement: how far its middle half is apart, to its median

    def most_sequences(self, context: int) -> int:
        """How many sequences of that length the pool and the batch hold, one slot kept for a prompt."""
        per_sequence = blocks_for(context + 1, self.config.block_size)
        return min(self.config.num_blocks // per_sequence, self.config.max_num_seqs) - 1

    def step_s(self, load: Load) -> float:
        """The median seconds of such a step."""
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

    def __init__(self, model: str | None, settings: Sequence[str], tell: Callable[[str], None]) -> None:
        import torch  # here, for `quire bench` needs neither torch nor pydantic

        from server.settings.flags import load_settings

        self._argv = [*([model] if model else []), *settings, "--no-async-scheduling"]
        self._tell = tell
        given = load_settings(self._argv)
        name = given.device
        device = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        self.largest_step, self._max_num_seqs = _LARGEST[device]
        self.given = {
            name: getattr(given, name)
            for name in sorted(given.model_fields_set - {"model", "async_scheduling", "config", "api_key"})
        }

    @contextmanager
    def open(self, block_size: int) -> Iterator[Probe]:
        """A probe of an engine with such blocks, and room for large steps; it is closed in the end."""
        from engine.build import build_engine
        from engine.model_source import find_model
        from server.settings.flags import load_settings

        room = ["--block-size", str(block_size), "--max-num-batched-tokens", str(self.largest_step)]
        settings = load_settings([*self._argv, *room, "--max-num-seqs", str(self._max_num_seqs)])
        self._tell(f"loading the model, blocks of {block_size}")
        engine = build_engine(settings.engine_config(find_model(settings.model).path), lambda _: None)
        try:
            yield Probe(engine)
        finally:
            engine._runner.close()  # noqa: SLF001 - its thread, which would do it, was never started
