"""The load of a fleet.

Prefixes together fill more than one daemon's pool and less than the fleet's, so routing decides what stays cached.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from loadtest.workload import WORDS, Job


class Load(NamedTuple):
    """The sizes of a load; words are about a token each."""

    num_requests: int
    num_prefixes: int  # 0: every prompt is distinct
    prefix_words: int
    own_words: int
    max_tokens: int


class Prompt(NamedTuple):
    """A job and the name of its prefix; "" has none."""

    job: Job
    group: str


def prefixes_of(overcommit: float, pool_tokens: int, prefix_words: int) -> int:
    """Return how many prefixes fill a pool so many times."""
    return max(round(overcommit * pool_tokens / prefix_words), 1)


def draw(load: Load, seed: int) -> list[Prompt]:
    """Return the requests of one run: each prefix is chosen uniformly."""
    rng = random.Random(seed)
    shared = [_text(rng, load.prefix_words) for _ in range(load.num_prefixes)]
    prompts = []
    for _ in range(load.num_requests):
        place = rng.randrange(len(shared)) if shared else -1
        start = shared[place] if shared else _text(rng, load.prefix_words)
        text = f"{start} {_text(rng, load.own_words)}"
        prompts.append(Prompt(Job(text, load.max_tokens), f"{seed}-{place}" if shared else ""))
    return prompts


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))
