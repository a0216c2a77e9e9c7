"""One run of a load against a fleet, and its figures."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from statistics import fmean, median
from typing import Any

from loadtest.bench import Asking
from loadtest.client import Client, Outcome, Target
from loadtest.fleet.daemons import Fleet, get_json
from loadtest.fleet.load import Prompt, cacheable
from loadtest.report import percentile, ttfts

_NUM_PROBES = 20
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? ([-+.\deE]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, simulated or real; times are seconds."""

    num_requests: int
    num_failed: int
    prompt_tokens: int
    ideal_tokens: int  # that an endless cache would have served
    cached_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p95_s: float
    duration_s: float
    shares: tuple[int, ...]  # answers of each daemon, or nothing

    @property
    def of_ideal(self) -> float:
        """Return the cached share of the ideal."""
        return self.cached_tokens / self.ideal_tokens if self.ideal_tokens else 0.0

    @classmethod
    def of_times(cls, ttft_s: Sequence[float], e2e_s: Sequence[float], **counts: Any) -> Figures:
        """Return figures with the percentiles of these times."""
        ttft_s, e2e_s = sorted(ttft_s), sorted(e2e_s)
        return cls(
            ttft_mean_s=fmean(ttft_s) if ttft_s else nan,
            ttft_p50_s=percentile(ttft_s, 0.5),
            ttft_p95_s=percentile(ttft_s, 0.95),
            e2e_mean_s=fmean(e2e_s) if e2e_s else nan,
            e2e_p50_s=percentile(e2e_s, 0.5),
            e2e_p95_s=percentile(e2e_s, 0.95),
            **counts,
        )

    @classmethod
    def read(cls, document: dict[str, Any]) -> Figures:
        """Return figures from a file."""
        return cls(**{**document, "shares": tuple(document["shares"])})

    def plain(self) -> dict[str, Any]:
        """Return them as a JSON object."""
        return asdict(self)


def token_ids(port: int, model: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return each prompt as the daemon's tokens, chat template included."""
    return [
        get_json(
            port,
            "/tokenize",
            {"model": model, "messages": [{"role": "user", "content": prompt.job.text}], "add_generation_prompt": True},
        )["tokens"]
        for prompt in prompts
    ]


async def closed_loop(
    port: int,
    model: str,
    prompts: Sequence[Prompt],
    num_clients: int,
    *,
    on_start: Callable[[int], None] = lambda _: None,
) -> list[Outcome]:
    """Send the prompts in order from so many clients; return the outcomes in that order."""
    client = Client(Target.parse(f"http://127.0.0.1:{port}"), timeout_s=120.0)
    asking, places = Asking(model, "chat"), iter(range(len(prompts)))
    outcomes: dict[int, Outcome] = {}

    async def worker() -> None:
        for place in places:
            on_start(place)
            outcomes[place] = await client.stream(asking.path, asking.body(prompts[place].job))

    try:
        await asyncio.gather(*(worker() for _ in range(num_clients)))
    finally:
        client.close()
    return [outcomes[place] for place in range(len(prompts))]


def measure(
    found: Fleet, prompts: Sequence[Prompt], num_clients: int, block_size: int
) -> tuple[Figures, list[Outcome]]:
    """Send a load through the router; return its figures and outcomes."""
    ideal = sum(cacheable(token_ids(found.members[0].port, found.model, prompts), block_size))
    before = [answered(member.port) for member in found.members]
    outcomes = asyncio.run(closed_loop(found.port, found.model, prompts, num_clients))
    shares = tuple(answered(member.port) - past for member, past in zip(found.members, before, strict=True))
    return figures_of(outcomes, ideal, shares), outcomes


def probe(found: Fleet, prompts: Sequence[Prompt]) -> float:
    """Return the TTFT of a cached prompt through the router, one request at a time."""
    outcomes = asyncio.run(closed_loop(found.port, found.model, [prompts[0]] * _NUM_PROBES, 1))
    return median(ttfts(outcomes[2:]))  # both daemons have computed it


def figures_of(outcomes: Sequence[Outcome], ideal: int, shares: tuple[int, ...]) -> Figures:
    """Return the figures of the answers that clients got."""
    good = [outcome for outcome in outcomes if not outcome.error]
    return Figures.of_times(
        ttfts(good),
        [outcome.end_s - outcome.start_s for outcome in good],
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        ideal_tokens=ideal,
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        duration_s=max(outcome.end_s for outcome in outcomes) - min(outcome.start_s for outcome in outcomes),
        shares=shares,
    )


def answered(port: int) -> int:
    """Return the number of requests that a daemon has finished."""
    return int(sum(value for _, value in samples(port, "quire_requests_finished_total")))


def samples(port: int, name: str) -> list[tuple[str, float]]:
    """Return the labels and values of a metric's samples."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return [(labels, float(value)) for found, labels, value in _SAMPLE.findall(text) if found == name]
