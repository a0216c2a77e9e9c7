"""The phases of `loadtest latency` on a virtual clock: the scheduler that serves, and steps that cost what is said.

Costs are linear, with noise: about what SmolLM2-135M takes on two cores, its context stretched
to any length, and a made-up machine of 50 times the arithmetic, where one step of 8192 tokens is the default. Knows no clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import inf
from typing import NamedTuple
from unittest import mock

from engine.core.budget import StepBudget
from engine.core.config import SchedulerConfig
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.core.types import Request, SamplingParams

_NOISE = 0.05
_LONG_AT, _ALONE_S = 7.0, 4.0
_SHORT_AT = tuple(_LONG_AT + 0.1 + 0.3 * index for index in range(10))

Figures = tuple[list[float], list[float], float, list[float], list[float]]  # as latency.Phases


class Machine(NamedTuple):
    """Seconds of a step: fixed, a decode, a position that it attends to, a prompt token, a position that it attends to, and
    what a chunk reads of its context, however few tokens it has, a position."""

    fixed_s: float
    decode_s: float
    decode_context_s: float
    prompt_s: float
    prompt_context_s: float
    chunk_context_s: float
    max_step_tokens: int

    def seconds(self, plan: StepPlan) -> float:
        total = self.fixed_s
        for piece in plan.slices:
            if piece.start >= piece.num_prompt:
                total += self.decode_s + self.decode_context_s * piece.start
            else:
                middle = piece.start + piece.num_tokens / 2
                total += piece.num_tokens * (self.prompt_s + self.prompt_context_s * middle)
                total += self.chunk_context_s * piece.start
        return total


MACHINES = {
    "two cores": Machine(4.5e-3, 0.2e-3, 0.3e-6, 0.24e-3, 0.12e-6, 0.6e-6, 512),
    "fifty times that": Machine(4e-3, 0.02e-3, 0.02e-6, 0.02e-3, 0.6e-9, 0, 8192),
}


class _Clocked:
    """A scheduler, driven from arrival to arrival."""

    def __init__(self, machine: Machine, target_itl_ms: float | None) -> None:
        config = SchedulerConfig(
            num_blocks=20_000,
            block_size=16,
            max_model_len=100_000,
            max_num_seqs=128,
            max_num_batched_tokens=machine.max_step_tokens,
            enable_prefix_caching=False,
            target_itl_s=None if target_itl_ms is None else target_itl_ms / 1e3,
        )
        self._machine, self._rng = machine, random.Random(0)
        self._scheduler, self._runner = Scheduler(config), FakeRunner(config, memory=False)
        self.now = 0.0
        self.tokens: dict[str, list[float]] = {}  # when each came

    def run(self, requests: list[Request], end_s: float, awaited: str = "") -> None:
        """To `end_s`, or to the first token of whom is awaited."""
        requests.sort(key=lambda request: -request.arrival_s)
        while self.now < end_s and (not awaited or awaited not in self.tokens):
            while requests and requests[-1].arrival_s <= self.now:
                self._scheduler.add(requests.pop())
            plan = self._scheduler.plan(self.now)
            if plan is None:
                self.now = requests[-1].arrival_s
                continue
            self.now += self._machine.seconds(plan) * self._rng.lognormvariate(0, _NOISE)
            for event in self._scheduler.commit(plan, self._runner.run(plan).wait(), self.now):
                self.tokens.setdefault(event.request_id, []).append(self.now)


def simulate(num_streams: int, long: int, target_itl_ms: float | None) -> Iterator[tuple[str, Figures]]:
    """The phases of each variant; the long prompt of the first is not paced at all."""
    for name, machine in MACHINES.items():
        with _unpaced():
            unpaced = _phases(machine, num_streams, long, None)
        yield f"{name}, not paced", unpaced
        yield name, _phases(machine, num_streams, long, None)
        if target_itl_ms:
            yield f"{name}, `--target-itl-ms {target_itl_ms:g}`", _phases(machine, num_streams, long, target_itl_ms)


@contextmanager
def _unpaced() -> Iterator[None]:
    with mock.patch.object(StepBudget, "long_s", return_value=inf):
        yield


def _phases(machine: Machine, num_streams: int, long: int, target_itl_ms: float | None) -> Figures:
    def shorts(long: int) -> list[float]:
        world = _Clocked(machine, target_itl_ms)
        requests = _load(num_streams, long)
        requests += [_request(f"short{index}", 100, 1, at) for index, at in enumerate(_SHORT_AT)]
        world.run(requests, max(_SHORT_AT) + 2.0)
        return [world.tokens[f"short{index}"][0] - at for index, at in enumerate(_SHORT_AT)]

    world = _Clocked(machine, target_itl_ms)
    world.run(requests := _load(num_streams, long), inf, "long")
    first_s = world.now
    world.run(requests, first_s + _ALONE_S)
    alone, beside = [], []
    for name, times in world.tokens.items():
        for before, after in pairwise(times if name.startswith("stream") else ()):
            if before >= _LONG_AT - _ALONE_S and (after <= _LONG_AT or before >= first_s):
                alone.append(after - before)
            elif before >= _LONG_AT and after <= first_s:
                beside.append(after - before)
    return alone, beside, first_s - _LONG_AT, shorts(0), shorts(long)


def _load(num_streams: int, long: int) -> list[Request]:
    requests = [_request(f"warm{index}", 100, 2, 0.1 * index) for index in range(10)]
    requests += [_request(f"stream{index}", 64, 90_000, 1.5) for index in range(num_streams)]
    return requests + [_request("long", long, 1, _LONG_AT)] * (long > 0)


def _request(name: str, num_prompt: int, max_tokens: int, arrival_s: float) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id=name, prompt=(1,) * num_prompt, params=params, arrival_s=arrival_s)
