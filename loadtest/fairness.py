"""What a greedy tenant does to another's time to first token, under each scheduling policy.

A light tenant has one request at a time; a greedy one has many open all the time. The light one is measured alone and
beside the greedy one. `python -m loadtest fairness` drives the scheduler that serves with a fake runner on a virtual
clock, at the costs that `quire calibrate` found; with `--daemon` real daemons with the default model are driven over
HTTP, which takes minutes. Tenants are told apart by the field `user`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.config import SchedulerConfig
from engine.core.fake_runner import FakeRunner
from engine.core.scheduler import Scheduler
from engine.core.types import Request, SamplingParams
from loadtest.client import Client, Target
from loadtest.daemon import daemon, get
from loadtest.simulation.costs import DEFAULT_COSTS, StepCosts
from loadtest.workload import Length, synthetic

POLICIES = ("fcfs", "sjf", "priority", "fair")
DAEMON_POLICIES = ("fcfs", "fair")
WARM_UP_S = 5.0  # of the greedy tenant, before the light one is measured beside it
ALONE_SHARE = 0.25  # of the time beside the greedy tenant: alone, one request is like another


Figures = dict[str, float]
Row = dict[str, Any]


class Load(NamedTuple):
    """A tenant with so many clients, each with one request at a time and `pause_s`, or down to half of it, between two of them."""

    tenant: str
    concurrency: int
    prompt: Length
    output: Length
    pause_s: float = 0.0


GREEDY = Load("greedy", 64, Length(64, 256), Length(64, 256))


def light(prompt_len: int) -> Load:
    """Short answers: what is measured is their beginning."""
    return Load("light", 1, Length(prompt_len, prompt_len), Length(8, 8), 0.6)


@dataclass(slots=True)
class Measured:
    """One tenant's answers; times are of those that began while it was measured."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0

    def figures(self, seconds: float) -> Figures:
        ordered = sorted(self.ttft_s) or [0.0]
        return {
            "requests": len(self.ttft_s),
            "failed": self.failed,
            "ttft_p50_s": statistics.median(ordered),
            "ttft_p99_s": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)],
            "output_tokens_per_s": self.tokens / seconds,
        }


# -- on a virtual clock ------------------------------------------------------------------------------------------------


class Simulation:
    """Clients in a closed loop around one scheduler; deterministic."""

    def __init__(self, policy: str, max_num_seqs: int, loads: Sequence[Load], seed: int) -> None:
        config = SchedulerConfig(
            num_blocks=4096,
            block_size=16,
            max_model_len=2048,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            policy=policy,
        )
        self.scheduler, self.runner = Scheduler(config), FakeRunner(config, memory=False)
        self.measured = {load.tenant: Measured() for load in loads}
        self._costs = StepCosts.load(DEFAULT_COSTS)
        self._chance = random.Random(seed)
        self._now = 0.0
        self._due: list[tuple[float, int, Load]] = []  # who sends when
        self._open: dict[str, tuple[Load, float]] = {}
        for load in loads:
            for _ in range(load.concurrency):
                self._think(load)

    def run(self, warm_up_s: float, seconds: float) -> None:
        """Everything that is sent within `seconds` after the warm-up is measured."""
        while self._now < warm_up_s + seconds:
            while self._due and self._due[0][0] <= self._now:
                due_s, _, load = heappop(self._due)
                self._send(load, due_s)
            plan = self.scheduler.plan(self._now)
            if plan is None:
                self._now = self._due[0][0]
                continue
            self._now += self._costs.step(plan)
            for event in self.scheduler.commit(plan, self.runner.run(plan).wait(), self._now):
                load, sent_s = self._open[event.request_id]
                if sent_s >= warm_up_s:
                    if event.prompt is not None:
                        self.measured[load.tenant].ttft_s.append(self._now - sent_s)
                    self.measured[load.tenant].tokens += len(event.token_ids)
                if event.finish_reason is not None:
                    del self._open[event.request_id]
                    self._think(load)

    def _think(self, load: Load) -> None:
        heappush(
            self._due,
            (self._now + self._chance.uniform(load.pause_s / 2, load.pause_s), self.scheduler.stats.steps, load),
        )

    def _send(self, load: Load, now: float) -> None:
        name = f"{load.tenant}-{self._chance.getrandbits(60)}"
        prompt = tuple(self._chance.choices(range(512), k=load.prompt.draw(self._chance)))
        params = SamplingParams(max_tokens=load.output.draw(self._chance), temperature=0.0)
        self._open[name] = load, now
        self.scheduler.add(Request(request_id=name, prompt=prompt, params=params, arrival_s=now, tenant=load.tenant))


def simulate(policy: str, max_num_seqs: int, prompt_len: int, seconds: float) -> Row:
    """The light tenant alone, then beside the greedy one."""
    alone = Simulation(policy, max_num_seqs, [light(prompt_len)], seed=1)
    alone.run(0.0, seconds * ALONE_SHARE)
    beside = Simulation(policy, max_num_seqs, [light(prompt_len), GREEDY], seed=2)
    beside.run(WARM_UP_S, seconds)
    return {
        "policy": policy,
        "max_num_seqs": max_num_seqs,
        "prompt_len": prompt_len,
        "alone": alone.measured["light"].figures(seconds * ALONE_SHARE),
        "beside": beside.measured["light"].figures(seconds),
        "greedy": beside.measured["greedy"].figures(seconds),
        "yielded": beside.scheduler.stats.yielded,
    }


# -- real daemons ------------------------------------------------------------------------------------------------------


async def drive(port: int, load: Load, until_s: float, seed: int, measured: Measured) -> None:
    """A tenant's clients, until a reading of the monotonic clock; answers that are open then are waited for."""
    client = Client(Target.parse(f"http://127.0.0.1:{port}"))
    jobs = iter(synthetic(20_000, prompt=load.prompt, output=load.output, seed=seed))
    chance = random.Random(seed)

    async def one() -> None:
        while time.perf_counter() < until_s:
            job = next(jobs)
            body = {
                "prompt": job.text,
                "max_tokens": job.max_tokens,
                "ignore_eos": True,
                "min_tokens": job.max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "user": load.tenant,
            }
            outcome = await client.stream("/v1/completions", body)
            if outcome.error or not outcome.chunks:
                measured.failed += 1
            else:
                measured.ttft_s.append(outcome.chunks[0] - outcome.start_s)
                measured.tokens += outcome.completion_tokens or 0
            await asyncio.sleep(chance.uniform(load.pause_s / 2, load.pause_s))

    try:
        await asyncio.gather(*[one() for _ in range(load.concurrency)])
    finally:
        client.close()


async def drive_daemon(port: int, prompt_lens: Sequence[int], seconds: float) -> list[Row]:
    """The light tenant with prompts of each length, alone; then the same while the greedy one is there."""
    rows: list[Row] = []
    await drive(port, light(64), time.perf_counter() + 1.0, 0, Measured())
    for prompt_len in prompt_lens:
        alone = Measured()
        await drive(port, light(prompt_len), time.perf_counter() + seconds * ALONE_SHARE, prompt_len, alone)
        rows.append({"prompt_len": prompt_len, "alone": alone.figures(seconds * ALONE_SHARE)})
    crowd, crowd_s = Measured(), WARM_UP_S + seconds * len(prompt_lens)
    crowding = asyncio.ensure_future(drive(port, GREEDY, time.perf_counter() + crowd_s, 1, crowd))
    await asyncio.sleep(WARM_UP_S)
    for row in rows:
        beside = Measured()
        await drive(port, light(row["prompt_len"]), time.perf_counter() + seconds, 1 + row["prompt_len"], beside)
        row["beside"] = beside.figures(seconds)
    await crowding
    for row in rows:
        row["greedy"] = crowd.figures(crowd_s)  # of the whole time
    return rows


def measure(policy: str, flags: Sequence[str], prompt_lens: Sequence[int], seconds: float) -> list[Row]:
    """The same of a daemon that is started for it."""
    with daemon(["--scheduling-policy", policy, *flags]) as port:
        rows = asyncio.run(drive_daemon(port, prompt_lens, seconds))
        lines = [line for line in get(port, "/metrics").splitlines() if line.startswith("quire_fairness_preemptions")]
    yielded = int(sum(float(line.split()[-1]) for line in lines))
    return [{"policy": policy, **row, "yielded": yielded} for row in rows]


# -- the command -------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fairness`."""
    parser.add_argument("--daemon", action="store_true", help="real daemons instead of a virtual clock")
    parser.add_argument(
        "--policy", nargs="+", choices=POLICIES, metavar="NAME", help="default: all; daemons, fcfs fair"
    )
    parser.add_argument("--flags", default="", metavar="FLAGS", help="of the daemons, in one string")
    parser.add_argument("--prompt-len", type=int, nargs="+", default=[64, 256, 1024], metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of each measurement; default 60")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    rows: list[Row] = []
    if options.daemon:
        for policy in options.policy or DAEMON_POLICIES:
            rows += measure(policy, options.flags.split(), options.prompt_len, options.seconds)
    else:
        for max_num_seqs in (16, 128):
            for prompt_len in options.prompt_len:
                rows += [
                    simulate(policy, max_num_seqs, prompt_len, options.seconds) for policy in options.policy or POLICIES
                ]
    show(rows)
    if options.json:
        document = {"daemon": options.daemon, "flags": options.flags, "seconds": options.seconds, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row[who]["failed"] for row in rows for who in ("alone", "beside", "greedy")) else 0


def show(rows: Sequence[Row]) -> None:
    """A Markdown table; TTFT of the light tenant, p50 / p99."""
    print(
        f"{GREEDY.concurrency} requests of the greedy tenant, {GREEDY.prompt.low}-{GREEDY.prompt.high} tokens in and "
        f"{GREEDY.output.low}-{GREEDY.output.high} out; one of the light tenant\n"
    )
    print("| policy | seats | prompt | requests | TTFT alone ms | beside ms | ratio | greedy tok/s | gave way |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        alone, beside = ([row[who][f"ttft_{which}_s"] for which in ("p50", "p99")] for who in ("alone", "beside"))
        columns = [
            row["policy"],
            str(row.get("max_num_seqs", "")),
            str(row["prompt_len"]),
            str(row["beside"]["requests"]),
            " / ".join(f"{value * 1e3:.0f}" for value in alone),
            " / ".join(f"{value * 1e3:.0f}" for value in beside),
            " / ".join(f"{b / a:.2f}" if a else "-" for a, b in zip(alone, beside, strict=True)),
            f"{row['greedy']['output_tokens_per_s']:.0f}",
            str(row["yielded"]),
        ]
        print(f"| {' | '.join(columns)} |")
