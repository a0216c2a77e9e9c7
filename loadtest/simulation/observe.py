"""Sends requests to a real daemon and records the times that clients see.

Prompts are made of common words, about a token each; lengths are those that the server counted.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

from loadtest.bench import Asking, first_model, open_loop
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.simulation.trace import TraceRequest
from loadtest.workload import WORDS, Job

_NUM_WARM_UP = 50  # requests, over ten seconds

OnAnswer = Callable[[], None]


class Observed(NamedTuple):
    """A request with its observed arrival, lengths, TTFT and TPOT."""

    row: TraceRequest
    ttft_s: float
    tpot_s: float  # NaN for an answer of one token


async def observe(port: int, rows: Sequence[TraceRequest], *, seed: int, on_answer: OnAnswer) -> list[Observed]:
    """Send every request at its arrival. Raises ClientError if one fails."""
    with closing(Client(Target.local(port))) as client:
        asking = Asking(await first_model(client))
        jobs = [Job(_text(row, f"{seed} {index}"), row.output_tokens, row.arrival_s) for index, row in enumerate(rows)]
        begun = time.perf_counter()
        outcomes = await open_loop(client, asking, jobs, lambda _: on_answer())
        return [_observed(row, outcome, begun) for row, outcome in zip(rows, outcomes, strict=True)]


async def warm_up(port: int) -> None:
    """Send traffic before measuring: a daemon is slower in its first seconds."""
    rows = [TraceRequest(index * 0.2, 100, 64) for index in range(_NUM_WARM_UP)]
    await observe(port, rows, seed=-1, on_answer=lambda: None)


def _observed(row: TraceRequest, outcome: Outcome, begun: float) -> Observed:
    if outcome.error or not outcome.chunks or not outcome.completion_tokens:
        raise ClientError(f"a request failed: {outcome.error or 'the answer is empty'}")
    prompt_tokens, output_tokens = outcome.prompt_tokens, outcome.completion_tokens
    prefix_tokens = min(row.prefix_tokens, prompt_tokens)
    seen = row._replace(
        arrival_s=outcome.start_s - begun,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_tokens=prefix_tokens,
    )
    gaps = output_tokens - 1
    tpot_s = (outcome.chunks[-1] - outcome.chunks[0]) / gaps if gaps else math.nan
    return Observed(seen, outcome.chunks[0] - outcome.start_s, tpot_s)


def _text(row: TraceRequest, own: str) -> str:
    shared = random.Random(row.prefix_group).choices(WORDS, k=row.prefix_tokens)
    return " ".join([*shared, *random.Random(own).choices(WORDS, k=row.prompt_tokens - row.prefix_tokens)])
