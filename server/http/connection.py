"""Extends uvicorn's HTTP/1.1 connection: a bound on headers, errors as JSON.

uvicorn's parser accepts a head of any length, so one client could fill the memory before any of our limits applies. It also
stops reading when a second request arrives behind a running one, so it would not notice that the client left, and then
informs only the last request: the first would be computed to its end in vain. Event loop.

Pipelined requests are answered in order. MAX_PIPELINED of them are parsed ahead of the running one; the bytes of the others
wait unparsed, and beyond MAX_UNPARSED_BYTES the socket is not read until some are answered.

An answer may be complete while its request is still being sent: a refusal, or a full disk. Closing would then reset the
connection, and the client would lose the answer. So the rest is read and discarded, for at most LINGER_S.
"""

from __future__ import annotations

import asyncio
import re
import uuid

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024  # of the request line and headers
MAX_PIPELINED = 16  # parsed requests behind one that runs
MAX_UNPARSED_BYTES = 256 * 1024
LINGER_S = 30.0  # for the rest of a request that has been answered already
_PIECE_BYTES = 4096  # parsed in one go; bounds how many requests can be parsed beyond MAX_PIPELINED
_END_OF_AUTHORITY = re.compile(rb"[/?#]")


class _Flow(FlowControl):
    """Keeps reading paused while the connection is full, whatever a request asks."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _AnswerTransport:
    """An answer's transport; the connection decides when to close it."""

    def __init__(self, connection: Connection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.close_once_read


class Connection(HttpToolsProtocol):
    """A connection that carries requests one after another."""

    flow: _Flow
    _is_in_head = False
    _num_head_bytes = 0  # since the last head began, with the bytes before it in the same piece
    _running: RequestResponseCycle | None = None  # the last that began; others may wait behind it
    _refusal: ApiError | None = None  # ends the connection once the requests before it are answered
    _linger: asyncio.TimerHandle | None = None  # while the rest of an answered request is read
    _is_ending = False  # close the connection once that has been read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._unparsed = bytearray()
        self._answer_transport = _AnswerTransport(self)

    def close_once_read(self) -> None:
        """Close the connection, once the rest of an answered request has arrived."""
        self._is_ending = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if not self._is_ending:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes, and parse as many as may be parsed now."""
        if self._refusal is None:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        """Feed the parser; a head that is too long ends the connection."""
        while self._unparsed and len(self.pipeline) < MAX_PIPELINED:
            piece = bytes(self._unparsed[:_PIECE_BYTES])
            del self._unparsed[:_PIECE_BYTES]
            super().data_received(piece)
            self._num_head_bytes += len(piece)
            if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
                message = f"The request's headers are longer than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones."
                self._refuse(ApiError(431, "headers_too_large", message))
            if self._refusal is not None or self.transport.is_closing():
                self._unparsed.clear()
        self.flow.is_full = len(self._unparsed) > MAX_UNPARSED_BYTES
        if self.flow.is_full:
            self.flow.pause_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        target, separator, rest = self.url.partition(b"://")
        if separator and b"/" not in target:  # an absolute target names the host, whatever Host says (RFC 9112)
            authority = _END_OF_AUTHORITY.split(rest)[0]
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", authority))
        super().on_headers_complete()
        self.cycle.transport = self._answer_transport  # type: ignore[assignment]  # the part of one that it uses
        if self.pipeline:
            self.flow.resume_reading()
        else:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        """Begin the next request, and parse others behind it."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = following
        if following is None and self._refusal is not None:
            self._hang_up(self._refusal)
        elif not self.transport.is_closing():
            if self.cycle.response_complete and self.cycle.more_body:
                self._begin_linger()
            self._parse()
            self.flow.resume_reading()

    def _begin_linger(self) -> None:
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
        """Inform the running request, too."""
        if self._linger is not None:
            self._linger.cancel()
        if self._is_answering_another:
            assert self._running is not None
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    @property
    def _is_answering_another(self) -> bool:
        """Return whether the last request waits behind a running one."""
        running = self._running
        return running is not None and running is not self.cycle and not running.response_complete

    def shutdown(self) -> None:
        """Close when the server stops: after running answers, but not half-sent requests."""
        if self._linger is not None:
            self._is_ending = True
            return
        is_half_sent = self.cycle is not None and self.cycle.more_body and not self.cycle.response_started
        if is_half_sent and not self._is_answering_another:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's sentence adds nothing
        """Refuse bytes that are not HTTP."""
        self._refuse(ApiError(400, "invalid_http", "This is not a valid HTTP/1.1 request; check the client or proxy."))

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore a request to change the protocol; uvicorn would log a warning."""

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that cannot be read, after the ones before it, and hang up."""
        if self.pipeline and self.cycle.more_body:  # the body of the last one is unreadable
            self.pipeline.popleft()
        running = self._running
        if running is None or running.response_complete:
            self._hang_up(error)
        elif not running.more_body:
            self._refusal = error
        elif not running.response_started:
            self._hang_up(error)
        else:  # its answer has begun, and cannot be replaced by an error
            self.transport.close()

    def _hang_up(self, error: ApiError) -> None:
        body = error.body()
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (uuid.uuid4().hex.encode(), len(body))
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
