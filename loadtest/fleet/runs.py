"""One run of a load against a fleet, and its figures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from loadtest.bench import Asking, closed_loop
from loadtest.client import Client, Outcome, Target
from loadtest.daemon import get_json, total
from loadtest.fleet.daemons import Fleet
from loadtest.fleet.load import Prompt
from loadtest.report import ttfts
from loadtest.simulation.credits import cacheable
from loadtest.simulation.fleet_figures import Figures


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


async def send_all(port: int, model: str, prompts: Sequence[Prompt], num_clients: int) -> list[Outcome]:
    """Send the prompts in order from so many clients; return the outcomes in that order."""
    with closing(Client(Target.local(port), timeout_s=120.0)) as client:
        return await closed_loop(client, Asking(model, "chat"), [prompt.job for prompt in prompts], num_clients)


def measure(
    found: Fleet, prompts: Sequence[Prompt], num_clients: int, block_size: int
) -> tuple[Figures, list[Outcome]]:
    """Send a load through the router; return its figures and outcomes."""
    ideal = sum(cacheable(token_ids(found.members[0].port, found.model, prompts), block_size))
    before = [answered(member.port) for member in found.members]
    outcomes = asyncio.run(send_all(found.port, found.model, prompts, num_clients))
    shares = tuple(answered(member.port) - past for member, past in zip(found.members, before, strict=True))
    return figures_of(outcomes, ideal, shares), outcomes


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
    return total(port, "quire_requests_finished_total")
