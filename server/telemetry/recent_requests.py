"""Keeps the last HTTP requests of each owner, for GET /v1/requests: those that ask for work, and every refused one.

Open generating requests are listed too. An entry has no prompt, no answer and no key. Event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from server.telemetry.events import Event, HttpAnswered, RequestEnded, RequestOpened
from server.telemetry.request_log import RequestRecord
from server.tenancy.tenant_file import DEFAULT

LISTED = 50
_STRANGERS = ""  # owns the requests that were refused before their owner was known
_LISTED_STRANGERS = 5  # a scan by clients without a key must not displace the operator's requests
_UNKNOWN = (401, 403)


class RecentRequests:
    """A listener; each owner has a bounded list."""

    def __init__(self) -> None:
        self._open: dict[RequestRecord, None] = {}
        self._answered: dict[str, deque[HttpAnswered]] = {}

    def observe(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RequestOpened) and event.record.caller is not None:
            self._open[event.record] = None
        elif isinstance(event, RequestEnded):
            self._open.pop(event.record, None)
        elif isinstance(event, HttpAnswered) and event.is_notable and event.caller is not None:
            is_stranger = event.caller.tenant is None and event.status in _UNKNOWN
            owner = _STRANGERS if is_stranger else event.caller.tenant or DEFAULT
            length = _LISTED_STRANGERS if is_stranger else LISTED
            self._answered.setdefault(owner, deque(maxlen=length)).append(event)

    def latest(self, owner: str) -> list[RequestRecord | HttpAnswered]:
        """Return the last requests that an owner may see, newest first; the operator sees all."""
        is_operator = owner == DEFAULT
        found: list[RequestRecord | HttpAnswered] = [
            record for record in self._open if is_operator or record.owner == owner
        ]
        lists: Iterable[deque[HttpAnswered]] = (
            self._answered.values() if is_operator else [self._answered.get(owner, deque())]
        )
        for answered in lists:
            found.extend(answered)
        return sorted(found, key=_begun_s, reverse=True)[:LISTED]


def _begun_s(entry: RequestRecord | HttpAnswered) -> float:
    assert entry.caller is not None, "only requests of HTTP are listed"
    return entry.caller.begun_s
