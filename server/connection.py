"""One HTTP/1.1 connection: uvicorn's, with a bound on what comes before a body, and our envelope where none was readable.

uvicorn's parser keeps a head of any length, so that one client could fill the memory before any limit of ours is asked.
And it stops reading when a second request comes behind one that runs, so that it would not see a client leave, and tells
of that only the last request: the first would be computed to its end for nobody. Event loop.
"""

from __future__ import annotations

import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers, as far as they come in pieces
MAX_PIPELINED = 16  # requests behind one that runs


class Connection(HttpToolsProtocol):
    """A connection, over which requests come one after another."""

    _is_in_head = False
    _num_head_bytes = 0
    _running: RequestResponseCycle | None = None  # the last that began; others may have come behind it

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a head that goes on for too long ends the connection."""
        super().data_received(data)
        self._num_head_bytes = self._num_head_bytes + len(data) if self._is_in_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            message = f"The request's headers are longer than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones."
            self._refuse(ApiError(431, "headers_too_large", message))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        elif len(self.pipeline) > MAX_PIPELINED:
            self.transport.close()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The request that came next begins."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = following

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever runs hears of it, too."""
        if self._is_answering_another:
            assert self._running is not None
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    @property
    def _is_answering_another(self) -> bool:
        """True while the request that came last waits behind one that runs."""
        running = self._running
        return running is not None and running is not self.cycle and not running.response_complete

    def shutdown(self) -> None:
        """The server leaves: answers are waited for, but not a request that is still being sent."""
        is_half_sent = self.cycle is not None and self.cycle.more_body and not self.cycle.response_started
        if is_half_sent and not self._is_answering_another:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's sentence says no more
        """What came is no HTTP."""
        self._refuse(ApiError(400, "invalid_http", "This is not a valid HTTP/1.1 request; check the client or proxy."))

    def _unsupported_upgrade_warning(self) -> None:
        """A wish to change the protocol may be passed over; uvicorn's warning asks the operator to install something."""

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (uuid.uuid4().hex.encode(), len(body))
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
