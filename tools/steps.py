"""Times the parts of a decode step: the real engine on this thread, without HTTP.

    python -m tools steps --num-seqs 1 8 32 -- --dtype bfloat16

The parts are methods of the engine, found by name and wrapped. `rest` is the remaining time of the step, `host` the sum
of the parts that run on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.core.types import Adapter, Request, SamplingParams
from engine.loop import Engine
from loadtest.arguments import positive_int
from loadtest.engines import build
from loadtest.output import print_table, save_json

_PARTS = {  # name -> the path of its object in the engine, and its method
    "plan": ("_scheduler", "plan"),
    "tensors": ("_runner._batches", "to_batch"),
    "prepare": ("_runner._kv_cache", "prepare"),
    "forward": ("_runner._model", "forward"),
    "head": ("_runner._model", "logits"),
    "sampler": ("_runner._sampler", "sample"),
    "native": ("_runner._plain._library", "step"),  # of plain steps, in place of all from "tensors" on
    "commit": ("_scheduler", "commit"),
}
_HOST_PARTS = ("plan", "tensors", "prepare", "sampler", "commit", "rest")


class Stopwatch:
    """Seconds of each named part in each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._now[name] += time.perf_counter() - begun

        setattr(owner, method, timed)

    def step(self, turn: Callable[[], None]) -> None:
        """Time one turn of the engine."""
        self._now = defaultdict(float)
        begun = time.perf_counter()
        turn()
        total = time.perf_counter() - begun
        self.steps.append({**self._now, "rest": total - sum(self._now.values()), "step": total})

    def medians_us(self) -> dict[str, float]:
        """Return the median microseconds of each part."""
        names = (*_PARTS, "rest", "step")
        return {name: 1e6 * statistics.median([step.get(name, 0.0) for step in self.steps]) for name in names}


def decode(engine: Engine, watch: Stopwatch, num_seqs: int, options: argparse.Namespace) -> dict[str, float]:
    """Return medians of pure decode steps; the sequences use the adapters in turn."""
    turn, stats = engine._turn, engine.stats  # noqa: SLF001 - the loop's own body, without its thread
    adapters, rng = _adapters(engine, options.lora), random.Random(num_seqs)  # prompts differ between levels
    prompts = [tuple(rng.randrange(engine.facts.vocab_size) for _ in range(options.context)) for _ in range(num_seqs)]

    def submit(kind: str, max_tokens: int) -> None:
        for index, prompt in enumerate(prompts):
            adapter = adapters[index % len(adapters)]
            params = SamplingParams(max_tokens=max_tokens, temperature=options.temperature, adapter=adapter)
            request_id = f"{num_seqs}-{kind}-{index}"
            engine.submit(Request(request_id=request_id, prompt=prompt, params=params, arrival_s=engine.clock()))

    submit("read", 1)  # the prefix cache has the prompts from then on
    turn()
    while stats.num_running + stats.num_waiting > 0:
        turn()
    submit("timed", options.num_steps + 16)
    before = -1
    while stats.generation_tokens - before != num_seqs:
        before = stats.generation_tokens
        turn()
        if stats.num_running + stats.num_waiting == 0:
            raise SystemExit(
                f"{num_seqs} sequences never decode in one step: the pool or --max-num-seqs is too small for them."
            )
    watch.steps.clear()
    for _ in range(options.num_steps):
        watch.step(turn)
    found = watch.medians_us()
    while stats.num_running > 0:
        turn()
    return found


def _adapters(engine: Engine, names: Sequence[str]) -> list[Adapter | None]:
    loaded = {name: each.adapter for name, each in engine.adapters.items()}
    unknown = [name for name in names if name != "none" and name not in loaded]
    if unknown:
        raise SystemExit(f"--lora names {unknown[0]!r}; of --lora-modules there are: {', '.join(loaded) or 'none'}.")
    return [None if name == "none" else loaded[name] for name in names]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `steps`."""
    parser.add_argument("--num-seqs", type=positive_int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--num-steps", type=positive_int, default=64, metavar="N", help="to time; default %(default)s")
    parser.add_argument(
        "--context", type=positive_int, default=64, metavar="N", help="tokens of a prompt; default %(default)s"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    parser.add_argument(
        "--lora", nargs="+", default=["none"], metavar="NAME", help="of --lora-modules, for sequences in turn; or none"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="after --, what `quire serve` takes")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    engine = build(options.settings)
    watch = Stopwatch()
    for name, (path, method) in _PARTS.items():
        owner: Any = engine
        for attribute in path.split("."):
            owner = getattr(owner, attribute, None)
        if owner is not None:
            watch.wrap(owner, method, name)
    gc.freeze()
    rows = {}
    for num_seqs in options.num_seqs:
        found = decode(engine, watch, num_seqs, options)
        found["host"] = sum(found[name] for name in _HOST_PARTS)
        rows[num_seqs] = found
    print("median microseconds of a step")
    names = (*_PARTS, "rest", "step", "host")
    print_table(("sequences", *names), ((num, *(f"{row[name]:.0f}" for name in names)) for num, row in rows.items()))
    save_json(options.json, rows)
    return 0
