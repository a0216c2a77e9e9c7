"""What one long prompt does to those beside it: the gaps of running streams, and the first token of a short request.

    python -m loadtest latency --tree ../before --json daemon.json     # real daemons, of this code and of another checkout
    python -m loadtest latency --simulated --json simulated.json       # the real scheduler, steps that cost what is said

Each variant is driven through three phases: streams and short requests; the same and a long prompt; streams that are alone, then
have the long prompt beside them until its first token, then are alone again. Their own contexts grow meanwhile, and their steps
with them: so what they are without it is taken from both ends. The long prompt's own wait is told too: it is who pays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.daemon import daemon
from loadtest.latency_simulated import simulate
from loadtest.report import percentile

SHORT, STREAM = 100, 64  # tokens of their prompts
NUM_SHORTS, PAUSE_S = 10, 0.3
ALONE_S = 4.0  # of streams, before the long prompt and after it
_HEAD = """\
| | ITL p50 ms | ITL p99 ms | ratio | worst gap ms | TTFT of a short one ms | ratio | TTFT of the long one s |
|---|---|---|---|---|---|---|---|"""
_PATH = "/v1/completions"


class Phases(NamedTuple):
    """Seconds."""

    alone: list[float]  # gaps between tokens of streams
    beside: list[float]  # the same, while a long prompt is computed
    long_s: float  # until its first token
    ttfts: list[float]  # of short requests
    ttfts_beside: list[float]


class Drive:
    """One daemon and its load. Prompts are token ids, none used twice: the prefix cache has no say."""

    def __init__(self, port: int, num_streams: int, long: int) -> None:
        self.client = Client(Target.parse(f"http://127.0.0.1:{port}"))
        self._rng, self._num_streams, self._long = random.Random(0), num_streams, long

    async def ask(self, num_prompt: int, num_tokens: int, outcome: Outcome | None = None) -> Outcome:
        """One request."""
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        done = await self.client.stream(_PATH, {**body, "temperature": 0, "stream": True}, outcome)
        if done.error or not done.chunks:
            raise ClientError(f"a request of {num_prompt} tokens failed: {done.error or 'no text'}")
        return done

    @contextlib.asynccontextmanager
    async def streams(self) -> AsyncIterator[list[Outcome]]:
        """Streams that have all begun; at the end they are cancelled."""
        outcomes = [Outcome(start_s=time.perf_counter()) for _ in range(self._num_streams)]
        tasks = [asyncio.ensure_future(self.ask(STREAM, 7500, outcome)) for outcome in outcomes]
        try:
            await asyncio.sleep(1.5)
            yield outcomes
        finally:
            await _cancel(*tasks)

    async def shorts(self, *, long: bool) -> list[float]:
        """The waits of short requests beside streams, with a long prompt or without."""
        ttfts = []
        async with self.streams():
            task = asyncio.ensure_future(self.ask(self._long if long else SHORT, 1))
            for _ in range(NUM_SHORTS):
                await asyncio.sleep(PAUSE_S)
                done = await self.ask(SHORT, 1)
                ttfts.append(done.chunks[0] - done.start_s)
            await _cancel(task)
        return ttfts

    async def gaps(self) -> tuple[list[float], list[float], float]:
        """Gaps of streams without the long prompt and with it, and its wait."""
        async with self.streams() as outcomes:
            begun = time.perf_counter()
            await asyncio.sleep(ALONE_S)
            done = await self.ask(self._long, 1)
            await asyncio.sleep(ALONE_S)
        first = done.chunks[0]
        alone, beside = [], []
        for before, after in [pair for outcome in outcomes for pair in pairwise(outcome.chunks)]:
            if before >= begun and (after <= done.start_s or before >= first):
                alone.append(after - before)
            elif before >= done.start_s and after <= first:
                beside.append(after - before)
        return alone, beside, first - done.start_s

    async def phases(self) -> Phases:
        """All three, after a warm-up."""
        await self.ask(300, 20)
        await self.ask(700, 2)
        try:
            ttfts = await self.shorts(long=False)
            ttfts_beside = await self.shorts(long=True)
            return Phases(*await self.gaps(), ttfts, ttfts_beside)
        finally:
            self.client.close()


async def _cancel(*tasks: asyncio.Future[Outcome]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def figures(phases: Phases) -> dict[str, float]:
    """Milliseconds, and the two ratios that the long prompt is judged by."""
    alone, beside = sorted(phases.alone), sorted(phases.beside)
    p50, p99 = ([1e3 * percentile(gaps, quantile) for gaps in (alone, beside)] for quantile in (0.5, 0.99))
    ttft = [1e3 * statistics.median(ttfts) for ttfts in (phases.ttfts, phases.ttfts_beside)]
    return {
        "itl_p50_ms": p50[0],
        "itl_p50_beside_ms": p50[1],
        "itl_p99_ms": p99[0],
        "itl_p99_beside_ms": p99[1],
        "itl_p99_ratio": p99[1] / p99[0],
        "itl_max_ms": 1e3 * alone[-1],
        "itl_max_beside_ms": 1e3 * beside[-1],
        "num_gaps": len(alone),
        "num_gaps_beside": len(beside),
        "ttft_ms": ttft[0],
        "ttft_beside_ms": ttft[1],
        "ttft_ratio": ttft[1] / ttft[0],
        "ttft_max_ms": 1e3 * max(phases.ttfts),
        "ttft_max_beside_ms": 1e3 * max(phases.ttfts_beside),
        "long_ttft_s": phases.long_s,
        "stream_tokens_per_s_beside": len(beside) / phases.long_s,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `latency`."""
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="that run; default %(default)s")
    parser.add_argument("--long", type=int, default=7000, metavar="TOKENS", help="the prompt; default %(default)s")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="another checkout to be measured beside this one")
    parser.add_argument(
        "--target-itl-ms", type=float, metavar="MS", help="also measure this code with the flag of this name"
    )
    parser.add_argument("--simulated", action="store_true", help="virtual time, prompts of any length, no model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    rows = {}
    for name, phases in _simulated(options) if options.simulated else _measured(options):
        rows[name] = figures(phases)
        show(name, rows[name])
        if options.json:
            about = {"streams": options.streams, "long": options.long, "short": SHORT, "simulated": options.simulated}
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


def show(name: str, row: dict[str, float]) -> None:
    """A row of a Markdown table: without and with the long prompt."""
    print(
        f"| {name} | {row['itl_p50_ms']:.1f}, {row['itl_p50_beside_ms']:.1f} "
        f"| {row['itl_p99_ms']:.1f}, {row['itl_p99_beside_ms']:.1f} | {row['itl_p99_ratio']:.2f} "
        f"| {row['itl_max_ms']:.0f}, {row['itl_max_beside_ms']:.0f} | {row['ttft_ms']:.0f}, {row['ttft_beside_ms']:.0f} "
        f"| {row['ttft_ratio']:.2f} | {row['long_ttft_s']:.1f} |",
        flush=True,
    )


def _simulated(options: argparse.Namespace) -> Iterator[tuple[str, Phases]]:
    print(_HEAD)
    for name, phases in simulate(options.streams, options.long, options.target_itl_ms):
        yield name, Phases(*phases)


def _measured(options: argparse.Namespace) -> Iterator[tuple[str, Phases]]:
    variants: list[tuple[str, list[str], Path | None]] = [("this code", [], None)]
    if options.tree:
        variants.insert(0, ("before", [], options.tree))
    if options.target_itl_ms:
        flag = f"--target-itl-ms {options.target_itl_ms:g}"
        variants.append((f"`{flag}`", flag.split(), None))
    print(_HEAD)
    for name, flags, tree in variants:
        with daemon(flags, tree) as port:
            yield name, asyncio.run(Drive(port, options.streams, options.long).phases())
