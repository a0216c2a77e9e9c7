"""The events of telemetry, and the sink that passes them to listeners.

Routes, middleware and the tenants' accounts emit events, never one per token. Event loop, unless an event says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from server.telemetry.request_log import Caller, RequestLog, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from server.protocol.errors import ApiError


class RequestOpened(NamedTuple):
    """A generating request was submitted to the engine."""

    record: RequestRecord


class RequestEnded(NamedTuple):
    """A request's answer has ended: sent, failed or abandoned by its client."""

    record: RequestRecord  # still with its generation
    status: int
    seconds: float
    is_batch: bool = False  # a line of a batch


class HttpAnswered(NamedTuple):
    """An HTTP request was answered. Emitted before RequestEnded."""

    request_id: str
    route: str  # the route's template, never a raw path
    method: str
    status: int
    seconds: float
    record: RequestRecord | None  # of a generating request
    span: Span | None = None  # if it is traced
    caller: Caller | None = None
    error: ApiError | None = None  # which was the answer
    ignored_fields: Sequence[str] = ()

    @property
    def is_notable(self) -> bool:
        """Return whether it is logged and listed: polls that succeed are too frequent."""
        return self.method == "POST" or self.status >= 400


class TenantRefused(NamedTuple):
    """A request exceeded a limit of --tenants."""

    tenant: str
    limit: str


class FieldIgnored(NamedTuple):
    """A request field was let through without effect."""

    name: str


class PrefillDelegated(NamedTuple):
    """The decode daemon asked the prefill daemon for a prompt."""

    outcome: str


Event = RequestOpened | RequestEnded | HttpAnswered | TenantRefused | FieldIgnored | PrefillDelegated
Listener = Callable[[Event], None]


class Telemetry:
    """Passes events to listeners, then to the request log, which closes a record."""

    def __init__(self, requests: RequestLog, *listeners: Listener) -> None:
        self._requests, self._listeners = requests, listeners

    def emit(self, event: Event) -> None:
        """Pass an event to every listener. Any thread, where the event says so."""
        for listen in self._listeners:
            listen(event)
        if isinstance(event, RequestOpened):
            self._requests.open(event.record)
        elif isinstance(event, RequestEnded):
            self._requests.close(event.record, event.status, event.seconds)
