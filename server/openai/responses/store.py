"""Stored responses, which later requests may continue, in memory only.

Bounded by count, bytes and age; the least recently used one is dropped first, and continuing a response uses all before
it. Each belongs to an owner (server/tenancy/tenancy.py); other owners cannot see it. Event loop. Knows bytes and ids, not
their content.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from engine.core.errors import shorten
from server.errors import ApiError

MAX_BYTES = 64 * 1024 * 1024
TTL_S = 24 * 3600.0  # since last used


class StoredResponse(NamedTuple):
    """The input and the answer of one turn, as JSON."""

    response_id: str
    previous_id: str | None
    input_items: bytes
    document: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input_items) + len(self.document)


class _Kept(NamedTuple):
    stored: StoredResponse
    used_s: float


class _OwnersResponses:
    """One owner's responses."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, _Kept] = OrderedDict()  # least recently used first
        self.num_bytes = 0

    def put(self, stored: StoredResponse, now_s: float) -> None:
        self.kept[stored.response_id] = _Kept(stored, now_s)
        self.num_bytes += stored.num_bytes

    def forget(self, response_id: str) -> None:
        self.num_bytes -= self.kept.pop(response_id).stored.num_bytes

    def forget_oldest(self) -> None:
        self.forget(next(iter(self.kept)))


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
        self._by_owner: defaultdict[str, _OwnersResponses] = defaultdict(_OwnersResponses)

    @property
    def is_open(self) -> bool:
        """Return whether anything is stored at all."""
        return self._max_responses > 0

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Store a response, and drop others beyond the bounds."""
        self._by_owner[owner].put(stored, self._clock())
        self._expire()
        owners = self._by_owner.values()
        while sum([len(owned.kept) for owned in owners]) > self._max_responses:
            max(owners, key=lambda owned: len(owned.kept)).forget_oldest()
        while sum([owned.num_bytes for owned in owners]) > self._max_bytes:
            max(owners, key=lambda owned: owned.num_bytes).forget_oldest()

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises a 404 if the owner does not have it."""
        self._expire()
        return self._use(owner, response_id, "response_id")

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises a 404 if the owner does not have it."""
        self.find(owner, response_id)
        self._by_owner[owner].forget(response_id)

    def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response after all that it continues. Raises a 404 if one is gone."""
        self._expire()
        turns: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            turns.append(self._use(owner, wanted, "previous_response_id"))
            wanted = turns[-1].previous_id
        return turns[::-1]

    def _use(self, owner: str, response_id: str, param: str) -> StoredResponse:
        owned = self._by_owner[owner]
        kept = owned.kept.get(response_id)
        if kept is None:
            raise self._unknown(response_id, param)
        owned.kept[response_id] = kept._replace(used_s=self._clock())
        owned.kept.move_to_end(response_id)
        return kept.stored

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        for owned in self._by_owner.values():
            while owned.kept and next(iter(owned.kept.values())).used_s < oldest_s:
                owned.forget_oldest()

    def _unknown(self, response_id: str, param: str) -> ApiError:
        if self.is_open:
            why = f"it was deleted, never stored, or forgotten: the last {self._max_responses} are kept, for a day"
        else:
            why = "this server stores none (--max-stored-responses)"
        message = f"There is no response {shorten(response_id)!r} here: {why}; send the conversation in input instead."
        return ApiError(404, f"{param.removesuffix('_id')}_not_found", message, param)
