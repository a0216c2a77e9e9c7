"""Measures requests beside a long prompt, on running daemons in turns.

    python -m loadtest beside http://127.0.0.1:8001 http://127.0.0.1:8002 --rounds 7

Each round drives every daemon once, so that a drift of the machine's speed affects all of them. A round measures the
gaps of running streams, alone and beside the long prompt, and the first token of short requests beside it. To compare
two commits, start a daemon of each; an idle daemon takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from loadtest.arguments import positive_int
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.output import print_table, save_json
from loadtest.report import percentile

Round = TypeVar("Round", bound=NamedTuple)

_SHORT, _STREAM = 100, 64  # tokens of their prompts
_STREAM_ANSWER = 7500  # tokens: longer than any round
_NUM_SHORTS, _PAUSE_S = 10, 0.3
_BEGIN_S = 1.5  # until all streams have begun
_ALONE_S = 4.0  # of streams, before the long prompt and after it: their contexts grow meanwhile


class Figures(NamedTuple):
    """The milliseconds of one round; NaN if no gap fell beside the long prompt."""

    gap_p99: float  # between tokens of streams that are alone
    gap_p99_beside: float
    gap_max_beside: float
    short_ttft_p99: float  # beside streams
    short_ttft_p99_beside: float  # beside streams and the long prompt
    long_ttft: float

    @property
    def gap_ratio(self) -> float:
        return self.gap_p99_beside / self.gap_p99


class Drive:
    """One daemon and its load: prompts of random ids, which no prefix cache has."""

    def __init__(self, url: str, api_key: str, num_streams: int, long: int, seed: int) -> None:
        self._client = Client(Target.parse(url, api_key))
        self._rng, self._num_streams, self._long = random.Random(seed), num_streams, long

    async def measure(self) -> Figures:
        """Drive one round."""
        with closing(self._client):
            await self._ask(300, 20)  # a warm-up
            shorts = await self._shorts(_SHORT)
            beside = await self._shorts(self._long)
            alone_p99, beside_p99, beside_max, long_s = await self._gaps()
            seconds = alone_p99, beside_p99, beside_max, p99(shorts), p99(beside), long_s
            return Figures(*[1e3 * each for each in seconds])

    async def _ask(self, num_prompt: int, num_tokens: int, outcome: Outcome | None = None) -> Outcome:
        """Stream one answer. Raises ClientError."""
        prompt = [self._rng.randrange(1000, 40_000) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True}
        done = await self._client.stream("/v1/completions", {**body, "temperature": 0, "stream": True}, outcome)
        if done.error or not done.chunks:
            raise ClientError(f"a request of {num_prompt} tokens failed: {done.error or 'no text'}")
        return done

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[list[Outcome]]:
        """Keep streams running until left."""
        outcomes = [Outcome(start_s=time.perf_counter()) for _ in range(self._num_streams)]
        tasks = [asyncio.ensure_future(self._ask(_STREAM, _STREAM_ANSWER, outcome)) for outcome in outcomes]
        try:
            await asyncio.sleep(_BEGIN_S)
            yield outcomes
        finally:
            await cancel(tasks)

    async def _shorts(self, num_beside: int) -> list[float]:
        """Return the TTFTs of short requests beside streams and another prompt."""
        ttfts = []
        async with self._streams():
            task = asyncio.ensure_future(self._ask(num_beside, 1))
            for _ in range(_NUM_SHORTS):
                await asyncio.sleep(_PAUSE_S)
                done = await self._ask(_SHORT, 1)
                ttfts.append(done.chunks[0] - done.start_s)
            await cancel([task])
        return ttfts

    async def _gaps(self) -> tuple[float, float, float, float]:
        """Return gap p99 alone, gap p99 and longest beside the prompt, and its TTFT."""
        async with self._streams() as outcomes:
            begun = time.perf_counter()
            await asyncio.sleep(_ALONE_S)
            done = await self._ask(self._long, 1)
            await asyncio.sleep(_ALONE_S)
        first = done.chunks[0]
        alone, beside = split_gaps([outcome.chunks for outcome in outcomes], begun, done.start_s, first)
        return p99(alone), p99(beside), max(beside, default=nan), first - done.start_s


def split_gaps(
    arrivals: Sequence[Sequence[float]], begun: float, sent: float, first: float
) -> tuple[list[float], list[float]]:
    """Return the gaps between arrivals outside of sent .. first, and inside."""
    alone, beside = [], []
    for before, after in (pair for times in arrivals for pair in pairwise(times)):
        if before >= begun and (after <= sent or before >= first):
            alone.append(after - before)
        elif before >= sent and after <= first:
            beside.append(after - before)
    return alone, beside


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return percentile(sorted(values), 0.99)


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `beside`."""
    add_rounds(parser)
    parser.add_argument("--api-key", metavar="KEY", default="", help="sent as a bearer token")
    parser.add_argument("--streams", type=positive_int, default=8, metavar="N", help="that run; default %(default)s")
    parser.add_argument("--long", type=positive_int, default=7000, metavar="TOKENS", help="default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Measure in turns, print the medians of the rounds."""
    rounds = in_turns(
        options, lambda url, seed: Drive(url, options.api_key, options.streams, options.long, seed).measure()
    )
    base = _median(rounds[options.url[0]], "short_ttft_p99_beside")
    rows = []
    for url, measured in rounds.items():
        alone, beside, ratio, longest = [
            _median(measured, name) for name in ("gap_p99", "gap_p99_beside", "gap_ratio", "gap_max_beside")
        ]
        shorts = [_median(measured, name) for name in ("short_ttft_p99", "short_ttft_p99_beside")]
        gaps = (f"{alone:.1f}, {beside:.1f}", f"{ratio:.2f}", f"{longest:.0f}")
        waits = (f"{shorts[0]:.0f}, {shorts[1]:.0f}", f"{shorts[1] / base:.2f}")
        rows.append((url, *gaps, *waits, f"{_median(measured, 'long_ttft') / 1e3:.1f}"))
    names = ("gap p99 ms: alone, beside", "ratio", "longest", "short TTFT p99 ms: without, beside", "to first")
    print_table(("daemon", *names, "long TTFT s"), rows)
    return 0


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `in_turns`."""
    parser.add_argument("url", nargs="+", metavar="URL", help="running servers; others are compared to the first")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every round")


def in_turns(
    options: argparse.Namespace, measure: Callable[[str, int], Coroutine[Any, Any, Round]]
) -> dict[str, list[Round]]:
    """Return the figures of each server's rounds, and write them; `measure` takes its address and the round's number."""
    rounds: dict[str, list[Round]] = {url: [] for url in options.url}
    for number in range(options.rounds):
        for url, measured in rounds.items():
            measured.append(asyncio.run(measure(url, number)))
    save_json(options.json, {url: [each._asdict() for each in measured] for url, measured in rounds.items()})
    return rounds


def _median(rounds: Sequence[Figures], name: str) -> float:
    figures: list[float] = [getattr(each, name) for each in rounds]
    return median(figures)
