"""Measures requests that answer with numbers, on running servers in turns, also beside streams of a chat model.

    python -m loadtest texts http://127.0.0.1:8001 http://127.0.0.1:8002 --model embedder --texts 256 --words 200
    python -m loadtest texts http://127.0.0.1:8001 http://127.0.0.1:8002 --model embedder --chat chat \
        --chat-url http://127.0.0.1:8001 http://127.0.0.1:8003

Each round sends every server the same new texts, in calls of some by a few clients. With `--chat` they come once more while
streams of that model run, which its own daemon may answer: their gaps are those alone and beside the texts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from math import nan
from statistics import median
from typing import Any, NamedTuple

from loadtest.arguments import positive_int
from loadtest.beside import add_rounds, cancel, in_turns, p99
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.output import print_table
from loadtest.workload import text_of

_PATHS = {"embeddings": "/v1/embeddings", "rerank": "/v1/rerank", "moderations": "/v1/moderations"}
_STREAM_WORDS, _STREAM_ANSWER, _BEGIN_S, _ALONE_S = 64, 4000, 6.0, 8.0
_AFTER_S = 1.0  # a gap that the texts made may end behind them


class Figures(NamedTuple):
    """One round."""

    texts_per_s: float
    call_p50_s: float
    texts_per_s_beside: float = nan  # with streams
    gap_p99_s: float = nan  # of streams alone
    gap_p99_beside_s: float = nan
    tokens_per_s: float = nan  # of streams alone
    tokens_per_s_beside: float = nan


class Drive:
    """One server and its load."""

    def __init__(self, url: str, options: argparse.Namespace, seed: int) -> None:
        chat = dict(zip(options.url, options.chat_url, strict=True)) if options.chat_url else {}
        self._client, self._chat = Client(Target.parse(url)), Client(Target.parse(chat.get(url, url)))
        self._options, self._rng = options, random.Random(seed)

    async def measure(self) -> Figures:
        """Drive one round."""
        with closing(self._client), closing(self._chat):
            await self._call(self._batch(1))  # a warm-up
            seconds, calls = await self._all()
            figures = Figures(self._options.texts / seconds, median(calls))
            return figures._replace(**await self._beside()) if self._options.chat else figures

    async def _beside(self) -> dict[str, float]:
        """Run streams alone, and beside the texts."""
        streams = [Outcome(time.perf_counter()) for _ in range(self._options.streams)]
        tasks = [asyncio.ensure_future(self._stream(outcome)) for outcome in streams]
        await asyncio.sleep(_BEGIN_S)
        begun = time.perf_counter()
        await asyncio.sleep(_ALONE_S)
        sent = time.perf_counter()
        seconds, _ = await self._all()
        now = time.perf_counter()
        await asyncio.sleep(_AFTER_S)
        await cancel(tasks)
        figures = of_streams([outcome.chunks for outcome in streams], begun, sent, now)
        return {"texts_per_s_beside": self._options.texts / seconds, **figures}

    async def _all(self) -> tuple[float, list[float]]:
        """Send all texts; return the seconds that all took, and each call."""
        left, calls = [self._batch(self._options.batch) for _ in range(0, self._options.texts, self._options.batch)], []

        async def client() -> None:
            while left:
                calls.append(await self._call(left.pop()))

        begun = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(self._options.clients)])
        return time.perf_counter() - begun, calls

    def _batch(self, num: int) -> list[str]:
        prefix = text_of(random.Random(0), self._options.prefix)
        num_words = self._options.words - self._options.prefix
        return [f"{prefix} {text_of(self._rng, num_words)}".strip() for _ in range(num)]

    async def _call(self, texts: list[str]) -> float:
        """Return the seconds of a call. Raises ClientError."""
        body: dict[str, Any] = {"model": self._options.model, "input": texts}
        if self._options.kind == "rerank":
            body = {"model": self._options.model, "query": text_of(self._rng, 8), "documents": texts}
        begun = time.perf_counter()
        await self._client.post(_PATHS[self._options.kind], body)
        return time.perf_counter() - begun

    async def _stream(self, outcome: Outcome) -> None:
        prompt, longest = text_of(self._rng, _STREAM_WORDS), {"max_tokens": _STREAM_ANSWER, "ignore_eos": True}
        body = {"model": self._options.chat, "prompt": prompt, "temperature": 0, "stream": True, **longest}
        done = await self._chat.stream("/v1/completions", body, outcome)
        raise ClientError(f"a stream ended early: {done.error or done.finish_reason}")


def of_streams(arrivals: Sequence[Sequence[float]], begun: float, sent: float, now: float) -> dict[str, float]:
    """Return the figures of streams that were alone from `begun` on, and beside texts from `sent` until `now`."""
    gaps = [gap for times in arrivals for gap in pairwise(times)]
    alone = [after - before for before, after in gaps if begun <= before and after <= sent]
    beside = [after - before for before, after in gaps if after > sent and before < now]
    return {
        "gap_p99_s": p99(alone),
        "gap_p99_beside_s": p99(beside),
        "tokens_per_s": sum(begun <= at < sent for times in arrivals for at in times) / (sent - begun),
        "tokens_per_s_beside": sum(sent <= at < now for times in arrivals for at in times) / (now - sent),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `texts`."""
    add_rounds(parser)
    parser.add_argument("--model", required=True, metavar="NAME", help="of every server")
    parser.add_argument("--kind", choices=_PATHS, default="embeddings", help="what is asked; default %(default)s")
    parser.add_argument("--texts", type=positive_int, default=1000, metavar="N", help="a round; default %(default)s")
    parser.add_argument("--words", type=positive_int, default=24, metavar="N", help="of a text; default %(default)s")
    parser.add_argument("--prefix", type=int, default=0, metavar="N", help="words that all begin with")
    parser.add_argument("--batch", type=positive_int, default=32, metavar="N", help="texts a call; default %(default)s")
    parser.add_argument("--clients", type=positive_int, default=4, metavar="N", help="default %(default)s")
    parser.add_argument("--chat", default="", metavar="NAME", help="the model of streams that run beside the texts")
    parser.add_argument("--chat-url", nargs="+", metavar="URL", help="its daemons, if not the same: one for each")
    parser.add_argument("--streams", type=positive_int, default=8, metavar="N", help="that run; default %(default)s")


def run(options: argparse.Namespace) -> int:
    """Measure in turns, print the medians of the rounds."""
    rounds = in_turns(options, lambda url, seed: Drive(url, options, seed).measure())
    medians = [[median(column) for column in zip(*measured, strict=True)] for measured in rounds.values()]
    rows = zip(Figures._fields, *[[f"{figure:.3g}" for figure in each] for each in medians], strict=True)
    print_table(("figure", *rounds), rows)
    return 0
