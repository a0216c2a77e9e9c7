"""Remembers which replica has computed which beginnings of prompts, and chooses a replica for the next prompt.

A replica's cache is not asked: the index holds what was sent to it, as many blocks as its KV pool, and forgets what was
used longest ago, as the pool does. Event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

Replica = TypeVar("Replica", bound=Hashable)

_TWICE = 4
MAX_BLOCKS = 1 << 15  # of a replica that does not say how large its pool is


class _Known:
    """What one replica has, and what it is doing."""

    __slots__ = ("backlog", "blocks", "num_open", "room")

    def __init__(self, room: int) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()  # the one used longest ago first
        self.room = room
        self.num_open = 0
        self.backlog = 0  # blocks that open requests had to compute


class PrefixIndex(Generic[Replica]):
    """The replicas' blocks and open requests."""

    def __init__(self) -> None:
        self._known: dict[Replica, _Known] = {}
        self._open: dict[str, tuple[Replica, int]] = {}  # a request's replica, and the blocks it computes there

    def hold_to(self, rooms: dict[Replica, int]) -> None:
        """Know these replicas and no others, each with the number of blocks that it holds."""
        for gone in self._known.keys() - rooms.keys():
            del self._known[gone]
        for replica, room in rooms.items():
            self._known.setdefault(replica, _Known(room)).room = room

    def rank(self, replicas: Iterable[Replica], blocks: Sequence[bytes]) -> list[Replica]:
        """Return the replicas, the one that begins to answer first in front.

        A replica computes the blocks that it lacks after those of its open requests; every open request slows it by
        about a block. Blocks that are computed a second time also displace others, so they count several times. Among equals the one with the fewest blocks comes first, so that new prompts spread.
        """

        def cost(replica: Replica) -> tuple[int, int, int]:
            known = self._known.get(replica) or _Known(0)
            missing = len(blocks) - _count_found(known, blocks)
            return _TWICE * missing + known.backlog + known.num_open, known.num_open, len(known.blocks)

        return sorted(replicas, key=cost)

    def begin(self, request_id: str, replica: Replica, blocks: Sequence[bytes]) -> None:
        """Note that a replica computes a prompt; if the request was noted elsewhere, it has moved."""
        if self._open.get(request_id, (None, 0))[0] == replica:
            return
        self.end(request_id)
        known = self._known.setdefault(replica, _Known(MAX_BLOCKS))
        missing = len(blocks) - _count_found(known, blocks)
        known.num_open += 1
        known.backlog += missing
        self._open[request_id] = replica, missing
        for block in reversed(blocks):  # the first ones are forgotten last
            known.blocks[block] = None
            known.blocks.move_to_end(block)
        while len(known.blocks) > known.room:
            known.blocks.popitem(last=False)

    def end(self, request_id: str) -> None:
        """Note that a request is over; one that is not known has no effect."""
        replica, missing = self._open.pop(request_id, (None, 0))
        known = None if replica is None else self._known.get(replica)
        if known is not None:
            known.num_open -= 1
            known.backlog -= missing


def _count_found(known: _Known, blocks: Sequence[bytes]) -> int:
    """Return how many blocks at the beginning are known."""
    return next((at for at, block in enumerate(blocks) if block not in known.blocks), len(blocks))
