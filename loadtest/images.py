"""Measures questions about images, on running servers in turns.

    python -m loadtest images http://127.0.0.1:8001 http://127.0.0.1:8002 --rounds 3 --beside 60

Each round drives every server once: a new image, two more questions about it, a text as long as the first; then clients
that ask about an image of their own. With `--beside`, streams of text run alone, and while new images of a megapixel arrive,
one each second unless `--every` says otherwise. No image comes twice, so that nothing is cached but what was asked about before.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from io import BytesIO
from math import ceil, nan
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from PIL import Image

from loadtest.arguments import not_negative, positive_float, positive_int
from loadtest.bench import first_model
from loadtest.beside import add_rounds, cancel, in_turns, p99, split_gaps
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.output import print_table
from loadtest.workload import text_of

_CLIENTS, _QUESTIONS, _ANSWER = 8, 4, 32  # of the clients; an answer is so many tokens
_STREAM_ANSWER, _BEGIN_S, _ALONE_S = 4000, 8.0, 15.0
_LARGE = 1024  # pixels of a side of an image beside streams


class Figures(NamedTuple):
    """One round; seconds are to the first token."""

    first_s: float  # a new image and 50 words
    text_s: float  # words, as many tokens as that
    again_10_s: float  # 10 words about the same image
    again_50_s: float
    tokens_per_s: float  # of clients with four questions each about their image
    gap_p99_s: float = nan  # of streams alone
    gap_p99_beside_s: float = nan  # with new images
    large_s: float = nan  # the first token about an image of a megapixel, alone
    large_beside_s: float = nan  # the median of those that were answered beside streams
    num_beside: float = nan  # of those


class Drive:
    """One server and its load."""

    def __init__(self, url: str, model: str | None, side: int, seed: int) -> None:
        self._client, self._model, self._side = Client(Target.parse(url)), model, side
        self._rng = random.Random(seed)

    async def measure(self, beside_s: float, every_s: float) -> Figures:
        """Drive one round."""
        with closing(self._client):
            self._model = self._model or await first_model(self._client)
            await self._ask(self._image(self._side), 5, 1)  # a warm-up
            image = self._image(self._side)
            first = await self._ask(image, 50, 2)
            text = await self._ask(None, first.prompt_tokens - 30, 2)
            again = [await self._ask(image, num_words, 2) for num_words in (10, 50)]
            begun = time.perf_counter()
            answered = await asyncio.gather(*[self._clients_turns() for _ in range(_CLIENTS)])
            seconds = time.perf_counter() - begun
            first_s, text_s, again_10_s, again_50_s = [_ttft(outcome) for outcome in (first, text, *again)]
            figures = Figures(first_s, text_s, again_10_s, again_50_s, sum(answered) / seconds)
            return figures._replace(**await self._beside(beside_s, every_s)) if beside_s else figures

    async def _clients_turns(self) -> int:
        """Ask several questions about an image of one's own; return the tokens of the answers."""
        image = self._image(self._side)
        outcomes = [await self._ask(image, 20, _ANSWER) for _ in range(_QUESTIONS)]
        return sum(outcome.completion_tokens or 0 for outcome in outcomes)

    async def _beside(self, seconds: float, every_s: float) -> dict[str, float]:
        """Run streams alone, and beside images that arrive."""
        large = _ttft(await self._ask(self._image(_LARGE), 10, 1))
        arriving = [self._image(_LARGE) for _ in range(ceil(seconds / every_s))]  # now, as that takes time of a core
        streams = [Outcome(time.perf_counter()) for _ in range(_CLIENTS)]
        tasks = [asyncio.ensure_future(self._ask(None, 30, _STREAM_ANSWER, outcome)) for outcome in streams]
        await asyncio.sleep(_BEGIN_S)
        begun = time.perf_counter()
        await asyncio.sleep(_ALONE_S)
        sent, outcomes = time.perf_counter(), list[Outcome]()
        for number, image in enumerate(arriving, 1):
            outcomes.append(Outcome(time.perf_counter()))
            tasks.append(asyncio.ensure_future(self._ask(image, 10, 1, outcomes[-1])))
            await asyncio.sleep(sent + min(number * every_s, seconds) - time.perf_counter())
        now = time.perf_counter()
        await cancel(tasks)
        alone, beside = split_gaps([outcome.chunks for outcome in streams], begun, sent, now)
        answered = [_ttft(outcome) for outcome in outcomes if outcome.chunks]
        return {
            "gap_p99_s": p99(alone),
            "gap_p99_beside_s": p99(beside),
            "large_s": large,
            "large_beside_s": median(answered) if answered else nan,
            "num_beside": len(answered),
        }

    async def _ask(self, url: str | None, num_words: int, num_tokens: int, outcome: Outcome | None = None) -> Outcome:
        """Ask about an image, or in words alone. Raises ClientError."""
        content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}] if url else []
        content.append({"type": "text", "text": text_of(self._rng, num_words)})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        done = await self._client.stream("/v1/chat/completions", body, outcome)
        if done.error:
            raise ClientError(f"a question failed: {done.error}")
        done.chunks = done.chunks or [done.end_s]  # a token may have no text
        return done

    def _image(self, side: int) -> str:
        """Return a new photo, as far as its size in bytes goes."""
        pixels, file = Image.frombytes("RGB", (64, 64), self._rng.randbytes(3 * 64 * 64)), BytesIO()
        pixels.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _ttft(outcome: Outcome) -> float:
    return outcome.chunks[0] - outcome.start_s


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `images`."""
    add_rounds(parser)
    parser.add_argument("--model", metavar="NAME", help="of every server; default: the first that /v1/models lists")
    parser.add_argument("--side", type=positive_int, default=512, metavar="PIXELS", help="default %(default)s")
    parser.add_argument(
        "--beside", type=not_negative, default=0, metavar="S", help="how long images arrive beside streams; default 0"
    )
    parser.add_argument(
        "--every", type=positive_float, default=1.0, metavar="S", help="between two of them; default %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Measure in turns, print the medians of the rounds."""
    rounds = in_turns(
        options,
        lambda url, seed: Drive(url, options.model, options.side, seed).measure(options.beside, options.every),
    )
    print_table(("figure", *rounds), _rows(list(rounds.values())))
    return 0


def _rows(rounds: Sequence[Sequence[Figures]]) -> list[tuple[str, ...]]:
    ratios = (
        ("again_10_s", "first_s"),
        ("again_50_s", "first_s"),
        ("gap_p99_beside_s", "gap_p99_s"),
        ("large_beside_s", "large_s"),
    )

    def row(title: str, figure: Callable[[Figures], float]) -> tuple[str, ...]:
        return title, *[f"{median(map(figure, measured)):.3g}" for measured in rounds]

    def ratio(one: str, other: str) -> tuple[str, ...]:
        return row(f"{one} / {other}", lambda each: getattr(each, one) / getattr(each, other))

    return [row(name, attrgetter(name)) for name in Figures._fields] + [ratio(*pair) for pair in ratios]
