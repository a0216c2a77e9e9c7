"""Compares the cached tokens that vllm-router's kv_aware expects of a daemon with those that the daemon reports.

The router writes what it credits into its debug log, in the order of its decisions and without a request's name. With one
client the answers have the same order, so each is compared; with several a prefix may be computed on while its
next request is on its way, and only the sums are compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loadtest.client import Outcome
from loadtest.fleet.daemons import Sizes, fleet
from loadtest.fleet.load import Prompt
from loadtest.fleet.routers import Routing
from loadtest.fleet.runs import measure
from loadtest.output import print_table

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_DECISION = re.compile(r"KV prefix decision .* credited_prefix_tokens=(\d+)")


def compare(routing: Routing, sizes: Sizes, num: int, num_clients: int, prompts: Sequence[Prompt], folder: Path) -> int:
    """Run a load, print; 1 if a request failed, or one client's answers differ."""
    routing = routing._replace(flags=[*routing.flags, "--log-level", "debug"])
    with fleet(routing, sizes, num, folder) as found:
        _, outcomes = measure(found, prompts, num_clients, sizes.block_size)
    expected = credits_in((folder / "router.log").read_text(encoding="utf-8", errors="replace"))[-len(outcomes) :]
    return show(expected, outcomes, is_paired=num_clients == 1)


def credits_in(log: str) -> list[int]:
    """Return the tokens that the router credited, decision by decision."""
    return [int(number) for number in _DECISION.findall(_COLOURS.sub("", log))]


def show(expected: Sequence[int], outcomes: Sequence[Outcome], *, is_paired: bool) -> int:
    """Print both sides; 1 if a request failed, or pairs differ."""
    cached = [outcome.cached_tokens for outcome in outcomes]
    differing = sum(each != found for each, found in zip(expected, cached, strict=True)) if is_paired else None
    print_table(
        ("requests", "credited tokens", "cached tokens", "requests that differ"),
        [(len(outcomes), f"{sum(expected):,}", f"{sum(cached):,}", "" if differing is None else differing)],
    )
    return int(any(outcome.error for outcome in outcomes) or bool(differing))
