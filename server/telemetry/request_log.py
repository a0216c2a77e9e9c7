"""Keeps what GET /v1/requests shows: open requests, the last RECENT generating ones, and the last of each owner.

Batch lines have a separate bound of the same size. A request is found by the answer's id or by the `x-request-id` of its
headers, within the owner's account; if an owner used an id twice, the later request is found. Of each owner the last LISTED
HTTP requests are listed: those that ask for work, and every refused one. Nothing has a prompt, an answer or a key; why a prefix
ended (prefix_ends.py) refers to prompts while those are remembered elsewhere. Event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from server.telemetry.events import Event, HttpAnswered, RequestEnded, RequestOpened, RequestRecord
from server.tenancy.tenancy import DEFAULT

RECENT = 1000  # about a kilobyte each
LISTED = 50
MAX_ENDED = 256  # sequences whose ends are known, a few hundred bytes each
_STRANGERS = ""  # owns the requests that were refused before their owner was known
_LISTED_STRANGERS = 5  # a scan by clients without a key must not displace the operator's requests
_UNKNOWN = (401, 403)
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "score-")


class EndedSequence(NamedTuple):
    """The end of a sequence, which is in no snapshot. Seconds as in Spans."""

    at_s: float  # engine's clock
    owner: str
    request_id: str  # in the engine
    choice: int
    num_tokens: int  # of prompt and answer
    num_preemptions: int
    queue_s: float | None  # None if it was never scheduled
    prefill_s: float
    decode_s: float
    finish_reason: str | None  # None if the client left


class RequestLog:
    """A listener. Beyond a bound, the owner with most records loses its oldest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` is the engine's."""
        self._clock = clock
        self._records: dict[tuple[str, str], RequestRecord] = {}  # by owner and each of their names
        # By owner: of clients, and of the background.
        self._ended: tuple[dict[str, deque[RequestRecord]], dict[str, deque[RequestRecord]]] = {}, {}
        self._answered: dict[str, deque[HttpAnswered]] = {}  # by owner
        self._sequences: deque[EndedSequence] = deque(maxlen=MAX_ENDED)  # that ended

    def observe(self, event: Event) -> None:
        """Take an event; closes the record of a request that ended, so this listener is the last."""
        if isinstance(event, RequestOpened):
            self._records.update(dict.fromkeys(event.record.names, event.record))
        elif isinstance(event, RequestEnded):
            self._close(event.record, event.status, event.seconds)
        elif isinstance(event, HttpAnswered) and event.is_notable and event.caller is not None:
            is_stranger = event.caller.tenant is None and event.status in _UNKNOWN
            owner = _STRANGERS if is_stranger else event.caller.tenant or DEFAULT
            length = _LISTED_STRANGERS if is_stranger else LISTED
            self._answered.setdefault(owner, deque(maxlen=length)).append(event)

    def _close(self, record: RequestRecord, status: int, seconds: float) -> None:
        """Close a record; beyond RECENT, forget the oldest that ended."""
        if record.generation is None:
            return
        now, choices = self._clock(), record.generation.timeline.choices
        n = len(choices) // len(record.requests)
        for index, times in enumerate(choices[:MAX_ENDED]):
            request, finish = record.requests[index // n], times.finish_reason
            self._sequences.append(
                EndedSequence(
                    now,
                    record.owner,
                    request.request_id,
                    index % n,
                    len(request.prompt) + times.num_tokens,
                    times.num_preemptions or 0,
                    times.queue_s,
                    times.prefill_s,
                    times.decode_s,
                    None if finish is None else finish.value,
                )
            )
        record.close(status, seconds)
        ended = self._ended[record.is_background]
        ended.setdefault(record.owner, deque()).append(record)
        if sum(map(len, ended.values())) <= RECENT:
            return
        oldest = max(ended.values(), key=len).popleft()
        for name in oldest.names:
            if self._records.get(name) is oldest:
                del self._records[name]

    def ended(self, since_s: float) -> list[EndedSequence]:
        """Return the last sequences that ended after a time of the engine's clock, oldest first."""
        return [each for each in self._sequences if each.at_s > since_s]

    def find(self, owner: str, name: str) -> RequestRecord | None:
        """Return an owner's record by the request's id, or by the answer's."""
        bare = next((name[len(prefix) :] for prefix in _PREFIXES if name.startswith(prefix)), name)
        return self._records.get((owner, name)) or self._records.get((owner, bare))

    def latest(self, owner: str) -> list[RequestRecord | HttpAnswered]:
        """Return the last requests that an owner may see, newest first; the operator sees all."""
        is_operator = owner == DEFAULT
        found: list[RequestRecord | HttpAnswered] = [
            record for record in self._open() if record.caller is not None and (is_operator or record.owner == owner)
        ]
        for answered in self._answered.values() if is_operator else [self._answered.get(owner, ())]:
            found.extend(answered)
        return sorted(found, key=_begun_s, reverse=True)[:LISTED]

    def _open(self) -> dict[RequestRecord, None]:
        """Return the open records, each once."""
        return dict.fromkeys(record for record in self._records.values() if record.end is None)


def _begun_s(entry: RequestRecord | HttpAnswered) -> float:
    assert entry.caller is not None, "only requests of HTTP are listed"
    return entry.caller.begun_s
