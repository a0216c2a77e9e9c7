"""What a router knows of each daemon: open requests, and the blocks that it credits to a cache.

A router learns of blocks in one of two ways: from the daemons' KV events, which arrive with a delay and include
evictions, or from its own routing, which is immediate and forgets nothing. Neither sees a scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.core.kv.prefix_cache import chain_root, name_block


class Seen(NamedTuple):
    """A daemon in the router's eyes, when a request arrives."""

    num_open: int  # requests
    num_waiting_tokens: int  # prompt tokens that it was sent, without those credited, whose answers have not begun
    credited: int  # tokens of this request's prompt
    num_known: int  # blocks, in all


class Credits:
    """The blocks of one daemon that the router believes to be cached. A Listener of its prefix cache."""

    def __init__(self, clock: Callable[[], float], delay_s: float) -> None:
        self._clock, self._delay_s = clock, delay_s
        self._names: set[bytes] = set()
        self._under_way: deque[tuple[float, bytes, bool]] = deque()

    def appeared(self, name: bytes, block: int) -> None:  # noqa: ARG002
        """Send an event: a block can be found."""
        self._under_way.append((self._clock() + self._delay_s, name, True))

    def leaves(self, name: bytes, block: int) -> None:  # noqa: ARG002
        """Send an event: a block is evicted."""
        self._under_way.append((self._clock() + self._delay_s, name, False))

    def pass_by(self, name: bytes) -> None:
        """Send nothing: only tiers below the pool ask what a block is worth."""

    def receive(self, now: float) -> None:
        """Take the events that have arrived."""
        events = self._under_way
        while events and events[0][0] <= now:
            _, name, is_there = events.popleft()
            if is_there:
                self._names.add(name)
            else:
                self._names.discard(name)

    def routed(self, names: Sequence[bytes]) -> None:
        """Note blocks without an event: a prompt was sent there."""
        self._names.update(names)

    def num_credited(self, names: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are credited."""
        return next((place for place, name in enumerate(names) if name not in self._names), len(names))

    def __len__(self) -> int:
        return len(self._names)


def names_of(prompt: Sequence[int], block_size: int) -> list[bytes]:
    """Return the names of a prompt's full blocks, as a daemon names them."""
    chain = [chain_root("")]
    return [name_block(chain, prompt, index, block_size) for index in range(len(prompt) // block_size)]


def cacheable(prompts: Iterable[Sequence[int]], block_size: int) -> list[int]:
    """Return each prompt's tokens that an endless cache would have served; only whole blocks are shared.

    The last token of a prompt is computed, as the daemon does.
    """
    known: set[bytes] = set()
    counts = []
    for prompt in prompts:
        names = names_of(prompt, block_size)
        shared = next((place for place, name in enumerate(names) if name not in known), len(names))
        counts.append(min(shared, (len(prompt) - 1) // block_size) * block_size)
        known.update(names)
    return counts
