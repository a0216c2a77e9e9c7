"""Stored responses, which later requests may continue, in memory only.

Bounded by count, bytes and age; the least recently used one is dropped first, and continuing a response uses all before
it. Each belongs to an owner (server/tenancy/tenancy.py); other owners cannot see it. Event loop. Knows bytes and ids, not
their content.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from engine.core.shown import shorten
from server.protocol.errors import ApiError

MAX_BYTES = 64 * 1024 * 1024
TTL_S = 24 * 3600.0  # since last used


class StoredResponse(NamedTuple):
    """The input and the answer of one turn, as JSON, and the ids of the items of both."""

    response_id: str
    previous_id: str | None
    input_items: bytes
    document: bytes
    item_ids: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return len(self.input_items) + len(self.document)


class ResponseStore:
    """Stores responses by owner; `chain` returns a conversation, first turn first.

    The bounds cover all owners. Beyond them, the owner that stores most loses its oldest.
    """

    def __init__(
        self,
        max_responses: int,
        *,
        max_bytes: int = MAX_BYTES,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # (owner, id) -> the response and when it was last used; the least recently used first
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        self._counts: Counter[str] = Counter()  # by owner
        self._bytes: Counter[str] = Counter()

    @property
    def is_open(self) -> bool:
        """Return whether anything is stored at all."""
        return self._max_responses > 0

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, and drop others beyond the bounds."""
        self._kept[owner, stored.response_id] = stored, self._clock()
        self._counts[owner] += 1
        self._bytes[owner] += stored.num_bytes
        self._expire()
        for used, most in ((self._counts, self._max_responses), (self._bytes, self._max_bytes)):
            while used.total() > most:
                largest = max(used, key=used.__getitem__)
                self._forget(next(key for key in self._kept if key[0] == largest))

    def find(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Return a response. Raises a 404 if the owner does not have it."""
        self._expire()
        key = owner, response_id
        if key not in self._kept:
            raise self._unknown("response", response_id, param, f"{param.removesuffix('_id')}_not_found")
        return self._use(key)

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises a 404 if the owner does not have it."""
        self.find(owner, response_id)
        self._forget((owner, response_id))

    def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response after all that it continues. Raises a 404 if one is gone."""
        turns: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            turns.append(self.find(owner, wanted, "previous_response_id"))
            wanted = turns[-1].previous_id
        return turns[::-1]

    def holding(self, owner: str, item_ids: Iterable[str]) -> list[StoredResponse]:
        """Return responses of the owner that have these items, the latest first. Raises a 404 if an item is in none."""
        self._expire()
        missing, found = set(item_ids), []
        for (of, _), (stored, _) in reversed(self._kept.items()):
            if of == owner and not missing.isdisjoint(stored.item_ids):
                missing -= stored.item_ids
                found.append(stored)
        if missing:
            raise self._unknown("item", min(missing), "input", "item_not_found")
        return [self._use((owner, stored.response_id)) for stored in found]

    def _use(self, key: tuple[str, str]) -> StoredResponse:
        stored, _ = self._kept[key]
        self._kept[key] = stored, self._clock()
        self._kept.move_to_end(key)
        return stored

    def _forget(self, key: tuple[str, str]) -> None:
        stored, _ = self._kept.pop(key)
        self._counts[key[0]] -= 1
        self._bytes[key[0]] -= stored.num_bytes

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._kept and (key := next(iter(self._kept))) and self._kept[key][1] < oldest_s:
            self._forget(key)

    def _unknown(self, kind: str, unknown_id: str, param: str, code: str) -> ApiError:
        if self.is_open:
            why = f"it was deleted, never stored, or forgotten: the last {self._max_responses} are kept, for a day"
        else:
            why = "this server stores none (--max-stored-responses)"
        message = f"There is no {kind} {shorten(unknown_id)!r} here: {why}; send the conversation in input instead."
        return ApiError(404, code, message, param)
