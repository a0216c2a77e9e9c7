"""The load of a fleet.

Prefixes together fill more than one daemon's pool and less than the fleet's, so routing decides what stays cached.
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

from loadtest.arguments import positive_float, positive_int
from loadtest.workload import Job, text_of

_TEMPLATE_TOKENS = 16  # of the chat template before a prompt, in whole blocks


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


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a fleet's load."""
    parser.add_argument("--runs", type=positive_int, default=1, metavar="N", help="of each policy, in turns; default 1")
    parser.add_argument("--daemons", type=positive_int, default=2, metavar="N", help="default 2")
    parser.add_argument("--clients", type=positive_int, default=8, metavar="N", help="of the closed loop; default 8")
    parser.add_argument("--requests", type=positive_int, default=200, metavar="N", help="a run; default 200")
    parser.add_argument("--blocks", type=positive_int, default=512, metavar="N", help="of a daemon's pool; default 512")
    parser.add_argument("--block-size", type=positive_int, default=16, metavar="TOKENS", help="default 16")
    parser.add_argument(
        "--overcommit", type=positive_float, default=1.7, metavar="X",
        help="pools that all prefixes together fill; default 1.7",
    )  # fmt: skip
    parser.add_argument("--prefix-words", type=positive_int, default=592, metavar="N", help="default 592")
    parser.add_argument("--own-words", type=positive_int, default=8, metavar="N", help="after the prefix; default 8")
    parser.add_argument("--max-tokens", type=positive_int, default=8, metavar="N", help="of each answer; default 8")
    parser.add_argument("--distinct", action="store_true", help="give every prompt a prefix of its own")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; default 1")


def load_of(options: argparse.Namespace) -> Load:
    """Return the load that the options describe."""
    pool_tokens, num = options.blocks * options.block_size, 0
    if not options.distinct:
        num = prefixes_of(options.overcommit, pool_tokens, options.prefix_words + _TEMPLATE_TOKENS)
    return Load(options.requests, num, options.prefix_words, options.own_words, options.max_tokens)


def prefixes_of(overcommit: float, pool_tokens: int, prefix_words: int) -> int:
    """Return how many prefixes fill a pool so many times."""
    return max(round(overcommit * pool_tokens / prefix_words), 1)


def draw(load: Load, seed: int) -> list[Prompt]:
    """Return the requests of one run: each prefix is chosen uniformly."""
    rng = random.Random(seed)
    shared = [text_of(rng, load.prefix_words) for _ in range(load.num_prefixes)]
    prompts = []
    for _ in range(load.num_requests):
        place = rng.randrange(len(shared)) if shared else -1
        start = shared[place] if shared else text_of(rng, load.prefix_words)
        text = f"{start} {text_of(rng, load.own_words)}"
        prompts.append(Prompt(Job(text, load.max_tokens), f"{seed}-{place}" if shared else ""))
    return prompts
