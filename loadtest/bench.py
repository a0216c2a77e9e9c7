"""`quire bench`: drives a server through a sweep of loads.

A closed loop keeps a number of requests in flight; an open loop sends a number of requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from loadtest.arguments import given, positive_float, positive_int
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.errors import LoadtestError
from loadtest.output import progress_bar, save_json
from loadtest.plots import draw_bench, require_matplotlib
from loadtest.report import Point, show, summarize
from loadtest.workload import Job, Length, arrivals, dataset, synthetic

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Asking:
    """How a job becomes a request body."""

    model: str
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    def body(self, job: Job) -> dict[str, Any]:
        """Return a streaming request; ignore_eos makes every answer max_tokens long."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": job.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": job.max_tokens}
        if self.endpoint == "chat":
            return body | {"messages": [{"role": "user", "content": job.text}]}
        return body | {"prompt": job.text}


class Level(NamedTuple):
    """One point of a sweep; `concurrency` None is an open loop."""

    load: str
    value: float
    concurrency: int | None
    jobs: Sequence[Job]


@dataclass(slots=True)
class Sweep:
    """The points measured so far; an interrupted one has its answered requests."""

    points: list[Point] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    is_interrupted: bool = False

    async def run(self, client: Client, asking: Asking, warm_up: Sequence[Job], levels: Sequence[Level]) -> None:
        """Warm up, then measure each level. Raises ClientError if the warm-up fails."""
        try:
            warmed: list[Outcome] = []
            await closed_loop(client, asking, warm_up, 1, warmed.append)
            if warmed and all(outcome.error for outcome in warmed):
                raise ClientError(f"the warm-up failed: {warmed[0].error}")
            with progress_bar() as progress:
                for level in levels:
                    await self._measure(client, asking, level, progress)
        except asyncio.CancelledError:
            self.is_interrupted = True

    async def _measure(self, client: Client, asking: Asking, level: Level, progress: Progress) -> None:
        task = progress.add_task(level.load, total=len(level.jobs))
        started = time.perf_counter()
        outcomes = self.outcomes[level.load] = []

        def record(outcome: Outcome) -> None:
            outcomes.append(outcome)
            progress.advance(task)

        try:
            if level.concurrency is None:
                await open_loop(client, asking, level.jobs, record)
            else:
                await closed_loop(client, asking, level.jobs, level.concurrency, record)
        finally:
            if outcomes:
                duration = max(outcome.end_s for outcome in outcomes) - started
                self.points.append(summarize(level.load, level.value, outcomes, duration))


async def closed_loop(
    client: Client,
    asking: Asking,
    jobs: Sequence[Job],
    concurrency: int,
    record: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Keep `concurrency` requests in flight until every job is answered; return the outcomes in order."""
    remaining, outcomes = iter(enumerate(jobs)), dict[int, Outcome]()

    async def worker() -> None:
        for place, job in remaining:
            outcomes[place] = await client.stream(asking.path, asking.body(job))
            record(outcomes[place])

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(jobs)))))
    return [outcomes[place] for place in range(len(jobs))]


async def open_loop(
    client: Client, asking: Asking, jobs: Sequence[Job], record: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send every job at its arrival time; return the outcomes in order."""
    started = time.perf_counter()

    async def send(job: Job) -> Outcome:
        await asyncio.sleep(started + job.arrival_s - time.perf_counter())
        outcome = await client.stream(asking.path, asking.body(job))
        record(outcome)
        return outcome

    return await asyncio.gather(*(send(job) for job in jobs))


async def first_model(client: Client) -> str:
    """Return the id of the first model that the server lists. Raises ClientError."""
    listed = await client.get("/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ClientError("/v1/models lists no model; name one with --model.") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `bench`."""
    _add_target_options(parser)
    _add_load_options(parser)
    _add_request_options(parser)
    out = parser.add_argument_group("the report")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a picture, .png or .svg")


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("the server")
    target.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="default %(default)s")
    target.add_argument("--model", metavar="NAME", help="default: the first that /v1/models lists")
    target.add_argument("--endpoint", choices=tuple(PATHS), default="completions", help="default %(default)s")
    target.add_argument("--api-key", metavar="KEY", default="", help="sent as a bearer token")
    target.add_argument(
        "--timeout", metavar="S", type=positive_float, default=600.0, help="seconds a request may take; default 600"
    )


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("the load")
    how = load.add_mutually_exclusive_group()
    how.add_argument(
        "--concurrency", metavar="N", type=positive_int, nargs="+", default=[1, 4, 16],
        help="requests in flight; default 1 4 16",
    )  # fmt: skip
    how.add_argument(
        "--request-rate", metavar="RATE", type=positive_float, nargs="+", help="requests a second, sent without waiting"
    )
    load.add_argument(
        "--burstiness", metavar="SHAPE", type=positive_float, default=1.0,
        help="with --request-rate: 1 is Poisson, less is burstier",
    )  # fmt: skip
    load.add_argument(
        "--num-prompts",
        metavar="N",
        type=positive_int,
        help="requests a point; default 4 a concurrent one, at least 16",
    )
    load.add_argument(
        "--num-warmups", metavar="N", type=int, default=2, help="requests sent before measuring; default %(default)s"
    )
    load.add_argument("--seed", metavar="N", type=int, default=0, help="of prompts, lengths and arrivals")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("the requests")
    default = Length(64, 64)
    work.add_argument(
        "--input-len", metavar="N", type=_length, default=default, help="words a prompt, N or LOW:HIGH; default 64"
    )
    work.add_argument(
        "--output-len", metavar="N", type=_length, default=default, help="tokens to generate, N or LOW:HIGH; default 64"
    )
    work.add_argument(
        "--dataset",
        metavar="FILE",
        type=Path,
        help='JSONL of {"prompt": ..., "max_tokens": ...} instead of random words',
    )
    work.add_argument("--prefix-len", metavar="N", type=int, default=0, help="words of a prefix that prompts share")
    work.add_argument("--num-prefixes", metavar="N", type=positive_int, default=1, help="number of such prefixes")
    work.add_argument("--temperature", metavar="T", type=float, default=0.0, help="default 0: greedy")
    work.add_argument(
        "--respect-eos", action="store_true", help="let answers end early; default: send ignore_eos and min_tokens"
    )


def _length(text: str) -> Length:
    try:
        return Length.parse(text)
    except LoadtestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Sweep, print, write; return 1 if a request failed, 130 if interrupted."""
    if options.plot:
        require_matplotlib()
    return asyncio.run(_bench(options))


async def _bench(options: argparse.Namespace) -> int:
    sweep = Sweep()
    with closing(Client(Target.parse(options.base_url, options.api_key), options.timeout)) as client:
        model = options.model or await first_model(client)
        asking = Asking(model, options.endpoint, options.temperature, not options.respect_eos)
        print(f"{model} at {options.base_url}{asking.path}")
        warm_up = _jobs(options, options.num_warmups, options.seed)
        running = asyncio.ensure_future(sweep.run(client, asking, warm_up, _levels(options)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
        await running
    show(sweep.points)
    save_json(options.json, {"settings": given(options) | {"model": model}, "points": sweep.points})
    if options.plot and sweep.points:
        draw_bench(options.plot, sweep.points, sweep.outcomes)
    if sweep.is_interrupted:
        print("Interrupted: the figures above are of the requests answered until then.")
        return 130
    return 1 if any(point.num_failed for point in sweep.points) else 0


def _jobs(options: argparse.Namespace, num: int, seed: int) -> list[Job]:
    if options.dataset:
        return dataset(options.dataset, num, output=options.output_len, seed=seed)
    return synthetic(
        num,
        prompt=options.input_len,
        output=options.output_len,
        seed=seed,
        prefix_len=options.prefix_len,
        num_prefixes=options.num_prefixes,
    )


def _levels(options: argparse.Namespace) -> list[Level]:
    """Return the points of the sweep, whose prompts differ."""
    levels = []
    for index, level in enumerate(options.request_rate or options.concurrency):
        seed = options.seed + 1 + index
        if options.request_rate:
            jobs = _jobs(options, options.num_prompts or 64, seed)
            timed = arrivals(jobs, rate=level, burstiness=options.burstiness, seed=seed)
            levels.append(Level(f"{level:g} requests/s", level, None, timed))
        else:
            jobs = _jobs(options, options.num_prompts or max(16, 4 * level), seed)
            levels.append(Level(f"concurrency {level}", level, level, jobs))
    return levels
