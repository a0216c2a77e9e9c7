"""Counts what a pool of 2 GiB holds of models with sliding windows: sequences, and chats, documents and agents in turns.

The scheduler and the pool are real, with the sizes of the models; no tensors are made.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Request, SamplingParams
from loadtest.fake_runner import FakeRunner
from loadtest.output import print_table, save_json

if TYPE_CHECKING:  # PyTorch, which other commands do without
    from engine.runtime.kv_layout import AttentionSpec
    from engine.runtime.pool.groups import LayerGroups

POOL_BYTES = 2 << 30
LENGTH, MAX_LENGTH, BLOCK_SIZE = 8192, 40_000, 16


class Model(NamedTuple):
    """The attention of a published model."""

    num_full: int
    num_windowed: int
    window: int
    num_kv_heads: int
    head_dim: int

    def specs(self) -> list[AttentionSpec]:
        """Return its layers."""
        from engine.runtime.kv_layout import AttentionSpec

        windows = [None] * self.num_full + [self.window] * self.num_windowed
        return [AttentionSpec(8, self.num_kv_heads, self.head_dim, 1.0, window=window) for window in windows]


MODELS = {"Gemma-3-4B": Model(5, 29, 1024, 4, 256), "gpt-oss-20b": Model(12, 12, 128, 8, 64)}


class Phase(NamedTuple):
    """Conversations of some turns at a time; each turn has the prompt of the one before, and more."""

    num: int
    prompt: int
    answer: int
    num_turns: int = 1


PHASES = {"64 chats": Phase(64, 300, 200), "4 documents": Phase(4, 32_000, 100), "4 agents": Phase(4, 6000, 1400, 4)}


def sized(groups: LayerGroups) -> SchedulerConfig:
    """Return the settings of a scheduler over a pool of POOL_BYTES."""
    return SchedulerConfig(
        num_blocks=POOL_BYTES // (BLOCK_SIZE * groups.cuts[-1]),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LENGTH,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        windows=groups.windows,
    )


class Load:
    """A scheduler under phases of load, one after the other."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._scheduler, self._runner = Scheduler(config), FakeRunner(config, memory=False)
        self._num_added = 0

    def run(self, name: str) -> tuple[int, int]:
        """Run a phase to its end; return the most sequences that ran at a time, and the tokens found in the cache."""
        phase, scheduler, most = PHASES[name], self._scheduler, 0
        found = scheduler.stats.prefix_hit_tokens
        for turn in range(phase.num_turns):
            for index in range(phase.num):
                self._num_added += 1
                first, length = 97 * index + len(name), phase.prompt + 600 * turn
                prompt = tuple((first + 31 * position) % 499 for position in range(length))
                params = SamplingParams(max_tokens=phase.answer, temperature=0.0)
                request_id = f"r{self._num_added}"
                scheduler.add(Request(request_id=request_id, prompt=prompt, params=params, arrival_s=0.0))
            while scheduler.has_work:
                plan = scheduler.plan(0.0)
                assert plan is not None, "steps are committed at once"
                scheduler.commit(plan, self._runner.run(plan).wait(), 0.0)
                most = max(most, len(scheduler.running))
        return most, scheduler.stats.prefix_hit_tokens - found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `groups`."""
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Count and print."""
    import torch

    from engine.runtime.pool.groups import group_layers, one_group

    held = {}
    for name, model in MODELS.items():
        specs = model.specs()
        both = map(sized, (one_group(specs, torch.bfloat16), group_layers(specs, torch.bfloat16, MAX_LENGTH)))
        held[name] = [config.num_blocks / config.max_blocks(LENGTH) for config in both]
    print_table(
        (f"sequences of {LENGTH} tokens", "one table", "groups", "ratio"),
        ((name, f"{one:.1f}", f"{more:.1f}", f"{more / one:.1f}") for name, (one, more) in held.items()),
    )
    specs = MODELS["Gemma-3-4B"].specs()
    config = sized(group_layers(specs, torch.bfloat16, MAX_LENGTH))
    mixed = Load(config)
    turns = {name: (mixed.run(name), Load(config).run(name)) for name in PHASES}
    print_table(
        ("Gemma-3-4B, one phase after the other", "running at most", "alone", "tokens found", "alone"),
        ((name, *(str(each[at]) for at in (0, 1) for each in both)) for name, both in turns.items()),
    )
    save_json(options.json, {"held": held, "phases": turns})
    return 0
