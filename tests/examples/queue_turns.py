"""A policy with state: tenants take turns, whatever each of them has queued."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.queues.keyed import KeyedQueue, fcfs
from engine.core.sequence import Sequence


class TurnsQueue(KeyedQueue):
    """The next request is the first one of the tenant whose last turn was longest ago."""

    def __init__(self) -> None:
        super().__init__(fcfs)
        self._last_turn: dict[str, int] = {}
        self._num_turns = 0

    def _turn(self, seq: Sequence) -> tuple[int, tuple[float, ...]]:
        return self._last_turn.get(seq.request.tenant, 0), seq.order

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit."""
        return min(self._waiting, key=self._turn, default=None)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._waiting, key=self._turn))

    def started(self, seq: Sequence) -> None:
        """Note that this tenant had its turn."""
        self._num_turns += 1
        self._last_turn[seq.request.tenant] = self._num_turns
