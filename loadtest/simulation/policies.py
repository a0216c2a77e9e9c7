"""The policies of real routers, as functions of what a router sees.

Names are the routers': vllm-router has kv_aware, sglang-router cache_aware, both have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from loadtest.simulation.credits import Seen

_CACHE_THRESHOLD = 0.3  # the share of a prompt that must be credited, else the emptiest daemon takes it
_MOST_AHEAD, _MOST_RATIO = 64, 1.5  # open requests beyond the least loaded daemon's

Choose = Callable[[Sequence[Seen], int, int], int]


class Policy(NamedTuple):
    """How a daemon is chosen from what is seen, the prompt's tokens and the number of the request."""

    choose: Choose
    has_events: bool = False  # its credits come from KV events, else from its own routing


def round_robin(seen: Sequence[Seen], _num_tokens: int, count: int) -> int:
    """Return the daemons in turn."""
    return count % len(seen)


def unguided(seen: Sequence[Seen], _num_tokens: int, count: int) -> int:
    """Return any daemon; the same count gives the same one."""
    return crc32(b"%d" % count) % len(seen)


def least_loaded(seen: Sequence[Seen], _num_tokens: int, count: int) -> int:
    """Return the daemon with the fewest open requests; equal ones take turns."""
    num = len(seen)
    return min(range(num), key=lambda place: (seen[place].num_open, (place - count) % num))


def kv_aware(seen: Sequence[Seen], num_tokens: int, count: int) -> int:
    """Return the daemon that would have the fewest prompt tokens to compute."""
    num = len(seen)

    def cost(place: int) -> tuple[int, int, int]:
        each = seen[place]
        return each.num_waiting_tokens + num_tokens - each.credited, each.num_open, (place - count) % num

    return min(range(num), key=cost)


def cache_aware(seen: Sequence[Seen], num_tokens: int, count: int) -> int:
    """Return the daemon with most of the prompt, or the one with the fewest known blocks."""
    num, loads = len(seen), [each.num_open for each in seen]
    if max(loads) - min(loads) > _MOST_AHEAD and max(loads) > _MOST_RATIO * min(loads):
        return least_loaded(seen, num_tokens, count)
    best = max(range(num), key=lambda place: seen[place].credited)
    if seen[best].credited > _CACHE_THRESHOLD * num_tokens:
        return best
    return min(range(num), key=lambda place: (seen[place].num_known, (place - count) % num))


POLICIES: Mapping[str, Policy] = {
    "round_robin": Policy(round_robin),
    "random": Policy(unguided),
    "power_of_two": Policy(least_loaded),  # of two daemons, the less loaded one
    "cache_aware": Policy(cache_aware),
    "kv_aware": Policy(kv_aware, has_events=True),
}
