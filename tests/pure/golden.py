"""Random histories of the scheduler, recorded as digests: a refactoring must leave them as they are.

    python -m tests.pure.golden            record all groups again
    python -m tests.pure.golden swap fair  record only these

Each history has three digests. `streams` covers the tokens and the end of every request that was not aborted: these never
change. `events` adds what else events say, and the order; `plans` adds every slice, copy and move of every step. A change
that means to plan differently records its groups again, and its commit says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import NeverFitsError
from engine.core.rows import SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.core.types import AbortCause, BeamParams, EarlyStopping, Request, TokenEvent
from loadtest.fake_runner import CostModel
from tests.pure.driver import EOS, FAILS, Driver, config, request

RECORDED = Path(__file__).with_name("golden.json")
NUM_HISTORIES = 24  # of each group
SMALL_POOL = 12
COSTS = (CostModel(0.01, 0.002), CostModel(0.001, 0.01, 0.001))

# What a group's histories have besides prompts, choices, seeds, failures and a pool that is often too small.
GROUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"depth": 1},
    "abort": {"aborts": 0.25},
    "abort-overlap": {"aborts": 0.25, "depth": 1},
    "out-of-memory": {"rollbacks": 0.15},
    "out-of-memory-overlap": {"rollbacks": 0.15, "depth": 1},
    "no-cache": {"enable_prefix_caching": False},
    "beams": {"beams": 0.5},
    "salts-and-adapters": {"salts": True, "num_blocks": 40},
    "drafts": {"num_speculative_tokens": 4},
    "swap": {"num_host_blocks": 40, "num_blocks": SMALL_POOL},
    "swap-overlap": {"num_host_blocks": 12, "num_blocks": SMALL_POOL, "depth": 1, "aborts": 0.1, "rollbacks": 0.05},
    "tiers": {"num_host_blocks": 20, "host_caching": True, "num_disk_blocks": 30, "num_blocks": SMALL_POOL},
    "priority": {"policy": "priority", "timed": True},
    "fair": {"policy": "fair", "timed": True},
    "background": {"background": 0.4, "timed": True},
    "everything": {"aborts": 0.1, "rollbacks": 0.05, "beams": 0.2, "salts": True, "num_host_blocks": 20, "timed": True},
}


@dataclass(frozen=True)
class FakeAdapter:
    """An adapter by name alone."""

    name: str

    @property
    def digest(self) -> bytes:
        return sha256(self.name.encode()).digest()


class History:
    """One seeded history: requests arrive, steps run, some are aborted or rolled back, everything ends."""

    def __init__(self, group: str, seed: int, scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler) -> None:
        options = dict(GROUPS[group])
        self._random = Random(f"{group} {seed}")
        self._aborts = options.pop("aborts", 0.0)
        self._rollbacks = options.pop("rollbacks", 0.0)
        self._beams = options.pop("beams", 0.0)
        self._salts = options.pop("salts", False)
        self._background = options.pop("background", 0.0)
        cost = self._random.choice(COSTS) if options.pop("timed", False) else None
        depth = options.pop("depth", 0)
        options.setdefault("num_blocks", self._random.randint(SMALL_POOL, 24))
        settings = config(max_num_batched_tokens=self._random.randint(6, 30), max_model_len=40, **options)
        self._plans, self._events = sha256(), sha256()
        self._driver = RecordedDriver(self, settings, depth, cost and cost.seconds, scheduler=scheduler(settings))
        self._aborted: set[str] = set()

    def digests(self) -> dict[str, str]:
        """Run it and return its three digests."""
        for number in range(self._random.randint(4, 14)):
            with suppress(NeverFitsError):
                self._driver.add(self._request(str(number)))
            for _ in range(self._random.choice((0, 1, 1, 2, 5))):
                self._turn()
        while self._driver.scheduler.has_work:
            self._turn()
        self._driver.check_streams(self._aborted)
        streams = sha256()
        for (name, choice), tokens in sorted(self._driver.streams.items()):
            if name not in self._aborted:
                streams.update(f"{name} {choice} {tokens} {self._driver.ends[name, choice].finish_reason!r}\n".encode())
        return {"streams": _short(streams), "events": _short(self._events), "plans": _short(self._plans)}

    def note_plan(self, plan: StepPlan, pieces: list[SequenceSlice]) -> None:
        tables = self._driver.runner.tables
        slices = [
            (piece.seq_id, piece.slot, piece.start, piece.num_tokens, tuple(tables[piece.slot][0]), len(piece.samples))
            for piece in pieces
        ]
        drafts = sorted(plan.drafts)
        moves = (list(plan.copies), list(plan.swap_out), list(plan.swap_in))
        self._plans.update(f"{slices} {drafts} {moves}\n".encode())

    def note_event(self, event: TokenEvent) -> None:
        cached = None if event.prompt is None else event.prompt.num_cached_tokens
        preempted = None if event.timings is None else event.timings.num_preemptions
        said = (event.request_id, event.choice, event.token_ids, event.logprobs, event.finish_reason, event.stop_reason)
        self._events.update(f"{said} {cached} {preempted} {event.error}\n".encode())

    def _turn(self) -> None:
        driver, chance = self._driver, self._random.random()
        if chance < self._rollbacks:
            self._aborted |= driver.run_out_of_memory(self._random.choice((None, None, "no memory")))
        elif chance < self._rollbacks + self._aborts and driver.requests:
            name = self._random.choice(sorted(driver.requests))
            choice = self._random.choice((None, None, 0, 1))
            cause = self._random.choice((AbortCause.DISCONNECT, AbortCause.STOP_STRING))
            if events := list(driver.scheduler.abort(name, cause, driver.now, choice)):
                self._aborted.add(name)
            driver.take(events)
        else:
            driver.step()

    def _request(self, name: str) -> Request:
        draw = self._random
        own = tuple(draw.randrange(50) for _ in range(draw.randint(1, 8)))
        n = draw.randint(1, 3)
        beam = None
        if draw.random() < self._beams:
            beam = BeamParams(
                width=n + draw.randint(0, 2),
                length_penalty=draw.choice((0.0, 1.0, 2.0)),
                early_stopping=draw.choice(list(EarlyStopping)),
            )
        salted = {"cache_salt": draw.choice(("", "a", "b"))} if self._salts else {}
        adapter = draw.choice((None, FakeAdapter("x"), FakeAdapter("y"))) if self._salts else None
        return request(
            name,
            tuple(range(draw.randint(0, 14))) + own,
            n=n,
            beam=beam,
            adapter=adapter,
            max_tokens=draw.randint(0, 15),
            seed=draw.randint(0, 5),
            temperature=draw.choice((0.0, 1.0)),
            eos_token_ids=draw.choice((frozenset(), frozenset([EOS]), frozenset(range(10)))),
            min_tokens=draw.randint(0, 3),
            top_k=draw.choice((0, 0, 0, 0, FAILS)),
            prompt_logprobs=draw.choice((None, None, 0, 2)),
            arrival_s=self._driver.now,
            priority=draw.randint(-2, 2),
            tenant=draw.choice("aabc"),
            is_background=draw.random() < self._background,
            **salted,
        )


class RecordedDriver(Driver):
    """A driver that notes every plan and every event in its history."""

    def __init__(self, history: History, *arguments: Any, scheduler: Scheduler) -> None:
        super().__init__(*arguments, scheduler=scheduler)
        self._history = history

    def check_plan(self, plan: StepPlan, slices: list[SequenceSlice]) -> None:
        super().check_plan(plan, slices)
        self._history.note_plan(plan, slices)

    def take(self, events: Any) -> None:
        taken = list(events)
        super().take(taken)
        for event in taken:
            self._history.note_event(event)


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:12])


def histories(groups: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The name and the digests of each history of these groups."""
    for group in groups:
        for seed in range(NUM_HISTORIES):
            yield f"{group} {seed}", History(group, seed).digests()


def main(groups: list[str]) -> None:
    recorded: dict[str, dict[str, str]] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    recorded |= dict(histories(groups or list(GROUPS)))
    kept = {name: digests for name, digests in recorded.items() if name.rpartition(" ")[0] in GROUPS}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    RECORDED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
