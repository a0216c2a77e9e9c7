"""Warm answers against cold ones, bit for bit: agents' conversations over a pool, host memory and a disk that are too small.

`python -m tests.cpu.warm --answers 10000 [NAME...]` runs many; test_warm.py runs a few. A warm answer resumes from whatever
is left of earlier ones: K/V, windows, snapshots, tickets, after evictions, faults, aborts and restarts. A cold one is
computed alone, by an engine that keeps nothing.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core.types import AbortCause, Request, SamplingParams, StepEvents, TokenEvent
from engine.loop import Engine
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.test_engine_faults import Forgetful
from tests.cpu.test_models_families import CASES, Case, write_tiny
from tests.integrity import check_scheduler
from tests.patience import PATIENCE_S

NAMES = ("qwen3_5", "granitemoehybrid-mamba", "lfm2", "gemma3", "gemma3n", "gpt-oss", "deepseek_v2")  # in the suite
ALL = (*NAMES, "qwen3_5-moe", "qwen3_next", "granitemoehybrid-mamba-dense", "bamba", "nemotron_h", "nemotron_h-latent")
ALL += ("falcon_h1", "lfm2-moe", "lfm3", "gemma4-shared", "gemma4-moe", "gemma4-unified", "granite_swa")
SIZES = {"block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 40, "num_threads": 2}
NUM_OPEN = 4  # conversations that run concurrently
NUM_KEPT = 12  # conversations that may go on
NUM_A_LIFE = 20  # answers of a warm engine before it is stopped and another starts

Answer = tuple[tuple[int, ...], tuple[float, ...]]  # ids, and their log probabilities


@dataclass
class Outcome:
    """What came of some answers."""

    num_answers: int = 0
    num_resumed: int = 0
    num_below: int = 0  # of those resumed, from host memory or a disk
    num_faults: int = 0
    num_preempted: int = 0
    wrong: list[str] = field(default_factory=list)

    def has_seen_all(self) -> bool:
        """Whether half of the answers resumed, some from below the pool, and steps failed or were preempted."""
        is_disturbed = self.num_preempted + self.num_faults > 0
        return 2 * self.num_resumed > self.num_answers > 0 and self.num_below > 0 and is_disturbed


class Heard:
    """The answers of one engine, by request and choice."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._events = engine, queue.SimpleQueue[StepEvents]()
        engine.start(self._events.put)
        self._said: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
        self._open: dict[str, int] = {}
        self.cached: dict[str, tuple[int, int]] = {}  # tokens that a prompt found, and those of them below the pool

    def submit(self, request: Request) -> None:
        self._open[request.request_id] = request.params.num_sequences
        self._engine.submit(replace(request, arrival_s=self._engine.clock()))

    def abort(self, request: Request) -> None:
        self._engine.abort(request.request_id, AbortCause.DISCONNECT)

    def next_end(self) -> str:
        """Return the next request that has ended."""
        while True:
            ended = next((name for name, num in self._open.items() if not num), None)
            if ended is not None:
                del self._open[ended]
                return ended
            for event in self._events.get(timeout=PATIENCE_S):
                assert isinstance(event, TokenEvent)
                assert event.error is None, event.error
                ids, logprobs = self._said.setdefault((event.request_id, event.choice), ([], []))
                ids += event.token_ids
                logprobs += [each.logprob for each in event.logprobs or ()]
                if event.prompt is not None:
                    below = event.prompt.num_host_tokens + event.prompt.num_disk_tokens
                    self.cached[event.request_id] = event.prompt.num_cached_tokens, below
                self._open[event.request_id] -= event.finish_reason is not None

    def answer(self, request: Request) -> list[Answer]:
        return [
            (tuple(ids), tuple(logprobs))
            for ids, logprobs in (self._said[request.request_id, choice] for choice in range(request.params.n))
        ]


def save(name: str, folder: Path) -> None:
    sizes = {"max_position_embeddings": 256, "mamba_d_state": 8}  # a piece of a state has to fit into a block
    write_tiny(Case(CASES[name].config, CASES[name].settings | sizes), folder)


@contextmanager
def engine_of(model: Path, *, faults: int | None = None, **settings: Any) -> Iterator[tuple[Engine, Heard]]:
    """A started engine; with the seed `faults` its device is out of memory now and then."""
    config = EngineConfig(model=str(model), device="cpu", dtype="bfloat16", **(SIZES | settings))
    engine = build_engine(config, lambda _: None)
    if faults is not None:
        engine._runner = Forgetful(engine._runner, faults, num_good=40)
    yield engine, Heard(engine)
    engine.stop(0.0)
    check_scheduler(engine._scheduler)
    assert engine.stats.blocks_held == engine.stats.integrity_failures == 0


class Traffic:
    """Conversations that go on, branch off, are sent again or are given up."""

    def __init__(self, seed: int) -> None:
        self._random, self._count = random.Random(seed), 0
        self._histories: list[tuple[int, ...]] = [()]

    def next(self) -> Request:
        """Return the next request."""
        draw = self._random
        history = draw.choice(self._histories)
        if draw.random() < 0.3:  # leaves the conversation somewhere
            history = history[: draw.randrange(len(history) + 1)]
        if len(history) > 180:
            history = history[: draw.choice((0, 31, 64, 97, 128))]
        added = [draw.randrange(3, 128) for _ in range(draw.choice((1, 3, 16, 17, 40, 63, 64, 65)))]
        prompt = (*history, *(() if history and draw.random() < 0.1 else added))
        self._count += 1
        params = SamplingParams(
            max_tokens=draw.randrange(1, 12),
            temperature=draw.choice((0.0, 1.0)),
            seed=self._count,
            n=draw.choice((1, 1, 1, 2)),
            logprobs=0,
        )
        return Request(request_id=str(self._count), prompt=prompt, params=params, arrival_s=0.0)

    def learn(self, request: Request, answer: Sequence[Answer]) -> None:
        """Let later conversations go on from an answer."""
        self._histories.append((*request.prompt, *self._random.choice(answer)[0]))
        del self._histories[:-NUM_KEPT]

    def is_given_up(self) -> bool:
        return self._random.random() < 0.1


def play(name: str, num_answers: int, seed: int, folder: Path, *, num_a_life: int = NUM_A_LIFE) -> Outcome:
    """Return what came of so many answers of one kind of model, in several lives of its engine.

    What a request finds depends on how fast threads are. So there are up to ten times as many until `has_seen_all`.
    """
    model, outcome, traffic, draw = folder / name, Outcome(), Traffic(seed), random.Random(seed)
    if not model.exists():
        save(name, model)
    with engine_of(model, enable_prefix_caching=False) as (cold, heard):
        longest = SIZES["max_model_len"]
        most = int(1.2 * max(cold.config.max_blocks(longest, num_states=30), longest // SIZES["block_size"]))
        for life in itertools.count():
            most_answers = num_answers if outcome.has_seen_all() else 10 * num_answers
            if outcome.wrong or outcome.num_answers >= most_answers:
                break
            tiers = {"kv_offload_gib": 0.002, "kv_offload_dir": str(folder / "kv"), "kv_offload_disk_gib": 0.01}
            sizes = {"num_gpu_blocks_override": most, "max_num_seqs": 4, "async_scheduling": bool(life % 2)}
            faults = draw.randrange(1 << 30) if life % 3 else None
            with engine_of(model, faults=faults, **sizes, **tiers) as (warm, warm_heard):
                ended = list(_converse(traffic, warm_heard, num_a_life))
                outcome.num_faults += warm.stats.out_of_memory_steps
                outcome.num_preempted += sum(warm.stats.preempted.values())
            for request, answers in ended:
                heard.submit(request)
                assert heard.next_end() == request.request_id
                cached, below = warm_heard.cached[request.request_id]
                outcome.num_answers += len(answers)
                outcome.num_resumed += len(answers) * (cached > 0)
                outcome.num_below += len(answers) * (below > 0)
                if heard.answer(request) != answers:
                    outcome.wrong.append(f"{name}, seed {seed}, request {request.request_id}, {cached} tokens cached")
    return outcome


def _converse(traffic: Traffic, heard: Heard, num_answers: int) -> Iterator[tuple[Request, list[Answer]]]:
    """Yield so many answers, of requests that run concurrently."""
    is_open: dict[str, Request] = {}
    given_up: set[str] = set()
    while num_answers > 0 or is_open:
        while len(is_open) < NUM_OPEN and num_answers > 0:
            request = traffic.next()
            is_open[request.request_id] = request
            heard.submit(request)
            num_answers -= request.params.n
            if traffic.is_given_up():
                given_up.add(request.request_id)
                heard.abort(request)
        request = is_open.pop(heard.next_end())
        if request.request_id not in given_up:
            answers = heard.answer(request)
            traffic.learn(request, answers)
            yield request, answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the kinds of models in turns, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("names", nargs="*", default=ALL)
    asked, wrong = parser.parse_args(arguments), list[str]()
    print(
        "| kind | answers | resumed | from below the pool | steps out of memory | preempted | wrong |\n|---|"
        + "---|" * 6
    )
    for name in asked.names:
        with tempfile.TemporaryDirectory() as folder:
            found = play(name, asked.answers, asked.seed, Path(folder), num_a_life=100)
        counts = (found.num_answers, found.num_resumed, found.num_below, found.num_faults, found.num_preempted)
        print("|", name, "|", *(f"{count} |" for count in counts), len(found.wrong), "|", flush=True)
        wrong += found.wrong
    print(*wrong, sep="\n")
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
