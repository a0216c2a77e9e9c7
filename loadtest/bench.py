"""Drives a server through a sweep of loads. Closed loop: so many requests in flight; open loop: so many a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.client import Client, ClientError, Outcome
from loadtest.report import Point, summarize
from loadtest.workload import Job

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
        """The JSON of one streaming request; with ignore_eos every answer has exactly max_tokens tokens."""
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
    """One point of a sweep. `concurrency` None is an open loop: jobs go out at their arrival times."""

    load: str
    value: float
    concurrency: int | None
    jobs: Sequence[Job]


@dataclass(slots=True)
class Sweep:
    """What has been measured so far. When interrupted, the point under way is summarized from what it has."""

    points: list[Point] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    is_interrupted: bool = False

    async def run(self, client: Client, asking: Asking, warm_up: Sequence[Job], levels: Sequence[Level]) -> None:
        """Warm up, then measure every level in turn. Raises ClientError if even the warm-up fails."""
        try:
            warmed: list[Outcome] = []
            await closed_loop(client, asking, warm_up, 1, warmed.append)
            if warmed and all(outcome.error for outcome in warmed):
                raise ClientError(f"the warm-up failed: {warmed[0].error}")
            with _progress() as progress:
                for level in levels:
                    await self._measure(client, asking, level, progress)
        except asyncio.CancelledError:
            self.is_interrupted = True

    async def _measure(self, client: Client, asking: Asking, level: Level, progress: Progress) -> None:
        task = progress.add_task(level.load, total=len(level.jobs), rate="")
        started = time.perf_counter()
        outcomes = self.outcomes[level.load] = []
        tokens = 0

        def record(outcome: Outcome) -> None:
            nonlocal tokens
            outcomes.append(outcome)
            tokens += outcome.completion_tokens or 0
            progress.update(task, advance=1, rate=f"{tokens / (time.perf_counter() - started):.0f} tok/s")

        try:
            if level.concurrency is None:
                await open_loop(client, asking, level.jobs, record)
            else:
                await closed_loop(client, asking, level.jobs, level.concurrency, record)
        finally:
            if outcomes:
                duration = max(outcome.end_s for outcome in outcomes) - started
                self.points.append(summarize(level.load, level.value, outcomes, duration))


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:>16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:>12}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),  # the output may go to a file
    )


async def closed_loop(
    client: Client, asking: Asking, jobs: Sequence[Job], concurrency: int, record: Callable[[Outcome], None]
) -> None:
    """Keep `concurrency` requests in flight until every job is answered."""
    remaining = iter(jobs)

    async def worker() -> None:
        for job in remaining:
            record(await client.stream(asking.path, asking.body(job)))

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(jobs)))))


async def open_loop(client: Client, asking: Asking, jobs: Sequence[Job], record: Callable[[Outcome], None]) -> None:
    """Send every job at its arrival time, whatever is still in flight."""
    started = time.perf_counter()

    async def send(job: Job) -> None:
        await asyncio.sleep(started + job.arrival_s - time.perf_counter())
        record(await client.stream(asking.path, asking.body(job)))

    await asyncio.gather(*(send(job) for job in jobs))


async def first_model(client: Client) -> str:
    """The id of the first model that the server lists. Raises ClientError."""
    listed = await client.get("/v1/models")
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ClientError("/v1/models lists no model; name one with --model.") from None
