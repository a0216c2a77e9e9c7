"""One HTTP/1.1 connection: uvicorn's, with a bound on what comes before a body, and our envelope where none was readable.

uvicorn's parser keeps a head of any length, so that one client could fill the memory before any limit of ours is asked.
And it stops reading when a second request comes behind one that runs, so that it would not see a client leave, and tells
of that only the last request: the first would be computed to its end for nobody. Event loop.

An answer may be complete while its request is still being sent: a refusal, or a disk that is full. Closing then would reset
the connection, and the client would lose the answer. So the rest is read and thrown away, for at most LINGER_S.
"""

from __future__ import annotations

import asyncio
import uuid

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers, as far as they come in pieces
MAX_PIPELINED = 16  # requests behind one that runs
LINGER_S = 30.0  # for the rest of a request that has been answered already


class _AnswerTransport:
    """What an answer is written to: the connection decides when it may be closed."""

    def __init__(self, connection: Connection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_once_read


class Connection(HttpToolsProtocol):
    """A connection, over which requests come one after another."""

    _is_in_head = False
    _num_head_bytes = 0
    _running: RequestResponseCycle | None = None  # the last that began; others may have come behind it

    _linger: asyncio.TimerHandle | None = None  # while the rest of an answered request is read
    _is_ending = False  # close the connection once that has been read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answer_transport = _AnswerTransport(self)

    def close_once_read(self) -> None:
        """Close the connection; if the request that was answered is still being sent, once all of it has come."""
        self._is_ending = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if not self._is_ending:
            self.transport.close()

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
        self.cycle.transport = self._answer_transport  # type: ignore[assignment]  # the part of one that it uses
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
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)
            if self._is_ending and self.transport.can_write_eof():
                self.transport.write_eof()  # a client that reads to the end has its answer

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._linger is None:
            return
        self._linger.cancel()
        self._linger = None
        if self._is_ending:
            self.transport.close()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever runs hears of it, too."""
        if self._linger is not None:
            self._linger.cancel()
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
        if self._linger is not None:
            self._is_ending = True
            return
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
