"""Measures the cache hits of each eviction policy, by traffic and pool size.

The prefix cache that serves is driven by itself, one request after another: a thousand requests take milliseconds, and
no other part of the daemon runs. A prompt is a list of blocks, each a token.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.core.kv.eviction import EVICTION_POLICIES
from engine.core.kv.prefix_cache import PrefixCache, chain_root
from loadtest.arguments import save_json

Prompts = Iterator[list[int]]

_NUM_REQUESTS = 4000
_POOLS = (100, 300)  # blocks


def _zipf(chance: random.Random, count: int) -> int:
    """From 0, the most likely, with chances as 1 / rank."""
    return chance.choices(range(count), [1 / (rank + 1) for rank in range(count)])[0]


def _fresh(chance: random.Random, count: int) -> list[int]:
    """Return blocks that are new."""
    return [chance.getrandbits(60) for _ in range(count)]


def _named(name: int, count: int) -> list[int]:
    return [name * 10_000 + i for i in range(count)]


def system_prompts(chance: random.Random) -> Prompts:
    """60 system prompts of 4 to 20 blocks, some far more popular than others, each with a question of its own."""
    lengths = [chance.randint(4, 20) for _ in range(60)]
    for _ in range(_NUM_REQUESTS):
        which = _zipf(chance, 60)
        yield _named(which, lengths[which]) + _fresh(chance, chance.randint(1, 4))


def scans(chance: random.Random) -> Prompts:
    """As system_prompts, but every tenth request is a document of 60 blocks that never comes again."""
    for index, prompt in enumerate(system_prompts(chance)):
        yield _fresh(chance, 60) if index % 10 == 0 else prompt


def chats(chance: random.Random) -> Prompts:
    """30 conversations in turns; each turn sends the whole conversation, and one in twelve is the last."""
    talks = [_fresh(chance, 3) for _ in range(30)]
    for _ in range(_NUM_REQUESTS):
        which = chance.randrange(30)
        is_over = chance.random() < 1 / 12 or len(talks[which]) >= 60
        talks[which] = [*([] if is_over else talks[which]), *_fresh(chance, 3)]
        yield talks[which]


def loop(chance: random.Random) -> Prompts:
    """40 documents of 10 blocks asked about in turn: more than either pool holds."""
    for index in range(_NUM_REQUESTS):
        yield _named(index % 40, 10) + _fresh(chance, 1)


def shifting(chance: random.Random) -> Prompts:
    """System prompts as above, but every 500 requests others are the popular ones."""
    for index in range(_NUM_REQUESTS):
        yield _named(_zipf(chance, 60) + index // 500 * 60, 12) + _fresh(chance, 3)


def mixed(chance: random.Random) -> Prompts:
    """Short prompts that are popular and long ones that are less so."""
    for _ in range(_NUM_REQUESTS):
        which = _zipf(chance, 60)
        yield _named(which, 3 + which) + _fresh(chance, 1)


TRAFFIC: tuple[Callable[[random.Random], Prompts], ...] = (system_prompts, scans, chats, loop, shifting, mixed)


def hit_ratio(prompts: list[list[int]], num_blocks: int, eviction: str) -> float:
    """Blocks found, of all."""
    cache, found, root = PrefixCache(num_blocks, 1, eviction), 0, chain_root("")
    pool = cache.pool
    for prompt in prompts:
        chain = [root]
        hits = cache.match(chain, prompt, len(prompt) - 1)
        for block in hits:
            pool.fork(block)
        pool.found(hits)
        blocks = hits + pool.alloc_many(len(prompt) - len(hits))
        cache.register(chain, prompt, blocks, len(hits), len(prompt))
        for block in reversed(blocks):
            pool.free(block)
        found += len(hits)
    return found / sum(map(len, prompts))


def run(options: argparse.Namespace) -> int:
    """Print a table, policies by traffic; write it as JSON if asked."""
    rows: list[dict[str, object]] = []
    print(f"| blocks found, % | pool | {' | '.join(EVICTION_POLICIES)} |")
    print("|---|---|" + "---|" * len(EVICTION_POLICIES))
    for traffic in TRAFFIC:
        prompts = list(traffic(random.Random(1)))
        for num_blocks in _POOLS:
            ratios = {policy: hit_ratio(prompts, num_blocks, policy) for policy in EVICTION_POLICIES}
            rows.append({"traffic": traffic.__name__, "num_blocks": num_blocks, "hit_ratio": ratios})
            shown = " | ".join(f"{100 * ratio:.1f}" for ratio in ratios.values())
            print(f"| {traffic.__name__.replace('_', ' ')} | {num_blocks} | {shown} |")
    save_json(options, {"num_requests": _NUM_REQUESTS, "rows": rows})
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `eviction`."""
    parser.add_argument("--json", type=Path, metavar="FILE")
