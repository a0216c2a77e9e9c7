"""Responses that are kept so that a client can go on from them, in memory alone.

Bounded by count, by bytes and by age; the one used longest ago goes first, and going on from one uses all that it
continues. Event loop. Knows bytes and ids, nothing of what is in them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from server.errors import ApiError, shorten

MAX_BYTES = 64 * 1024 * 1024
TTL_S = 24 * 3600.0  # since last used


class StoredResponse(NamedTuple):
    """What was asked and answered in one turn, as JSON."""

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


class ResponseStore:
    """put, find and delete responses; `chain` is a conversation, first turn first."""

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
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # used longest ago first
        self._num_bytes = 0

    @property
    def is_open(self) -> bool:
        """False where nothing is ever kept."""
        return self._max_responses > 0

    def put(self, stored: StoredResponse) -> None:
        """Keep it, and forget others where there is no more room."""
        self._kept[stored.response_id] = _Kept(stored, self._clock())
        self._num_bytes += stored.num_bytes
        self._expire()
        while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def find(self, response_id: str) -> StoredResponse:
        """Raises a 404 if it is not, or no longer, kept."""
        self._expire()
        return self._use(response_id, "response_id")

    def delete(self, response_id: str) -> None:
        """Raises a 404 if it is not, or no longer, kept."""
        self.find(response_id)
        self._forget(response_id)

    def chain(self, response_id: str) -> list[StoredResponse]:
        """A response after all that it continues. Raises a 404 if any of them is not, or no longer, kept."""
        self._expire()
        turns: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            turns.append(self._use(wanted, "previous_response_id"))
            wanted = turns[-1].previous_id
        return turns[::-1]

    def _use(self, response_id: str, param: str) -> StoredResponse:
        kept = self._kept.get(response_id)
        if kept is None:
            raise self._unknown(response_id, param)
        self._kept[response_id] = kept._replace(used_s=self._clock())
        self._kept.move_to_end(response_id)
        return kept.stored

    def _expire(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._kept and next(iter(self._kept.values())).used_s < oldest_s:
            self._forget(next(iter(self._kept)))

    def _forget(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).stored.num_bytes

    def _unknown(self, response_id: str, param: str) -> ApiError:
        if self.is_open:
            why = f"it was deleted, never stored, or forgotten: the last {self._max_responses} are kept, for a day"
        else:
            why = "this server stores none (--max-stored-responses)"
        message = f"There is no response {shorten(response_id)!r} here: {why}; send the conversation in input instead."
        return ApiError(404, f"{param.removesuffix('_id')}_not_found", message, param)
