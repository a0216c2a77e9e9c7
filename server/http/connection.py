"""Extends uvicorn's HTTP/1.1 connection: bounds on headers and on waiting for the client, errors as JSON.

uvicorn's parser accepts a head of any length, so one client could fill the memory before any of our limits applies. It also
stops reading when a second request arrives behind a running one, so it would not notice that the client left, and then
informs only the last request: the first would be computed to its end in vain. Event loop.

The bytes of all connections are parsed in pieces, connections in rotation, as many in a turn of the loop as make TURN_CALLS calls
of the parser: a body of tiny chunks makes a call for each.

Pipelined requests are answered in order. MAX_PIPELINED of them are parsed ahead of the running one; the bytes of the others
wait unparsed, and beyond MAX_UNPARSED_BYTES the socket is not read until some are answered.

uvicorn waits for ever for the first request, for the rest of one, and for a client that does not read its answer. Here a
request ends with a 408 when nothing of it arrives for ARRIVAL_S, or less than BYTES_A_S after GRACE_S; the connection of an
answer of which nothing is read for READING_S is closed. uvicorn closes an idle connection after 5 s, and loses a request that
a proxy sends at that moment; here the client closes it first.

An answer may be complete while its request is still being sent: a refusal, or a full disk. Closing would then reset the
connection, and the client would lose the answer. So the rest is read and discarded, for at most LINGER_S.

httptools parses no body of a request that asks for another protocol, as Java's client asks for HTTP/2 in each. No protocol
is changed here, so a second parser reads on: it gets the fields that tell where the body ends as a head that begins no request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.protocol.errors import ApiError
from server.telemetry.logs import LineBudget

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

logger = logging.getLogger(__name__)
_refusals = LineBudget(logger)

MAX_HEAD_BYTES = 64 * 1024  # of the request line and headers
MAX_PIPELINED = 16  # parsed requests behind one that runs
MAX_UNPARSED_BYTES = 256 * 1024
LINGER_S = 30.0  # for the rest of a request that has been answered already
ARRIVAL_S = 30.0  # looked at this often, so it ends within twice the time
GRACE_S = 60.0
BYTES_A_S = 64 * 1024  # on average; the largest body, 32 MiB, may take ten minutes
READING_S = 300.0
IDLE_S = 150  # longer than clients keep connections: nginx and AWS's balancers for 60 s, Go for 90 s, Caddy for 120 s
TURN_CALLS = 512  # about 3 ms
_PIECE_BYTES = 4096  # parsed in one go; bounds how many requests can be parsed beyond MAX_PIPELINED
_FRAMING = (b"content-length", b"transfer-encoding")
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


CHUNKS = "quire.chunks"  # the ASGI extension whose "writer" is a ChunkWriter


class ChunkWriter:
    """Writes the chunks of an answer whose head was sent, without a coroutine and a message for each."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._flow, self._cycle, self._write = connection.flow, cycle, connection.transport.write

    @property
    def is_free(self) -> bool:
        """Return whether a chunk can be written now; else `send` waits for the client, or knows that there is none."""
        cycle = self._cycle
        return not self._flow.write_paused and bool(cycle.chunked_encoding) and not cycle.disconnected

    def write(self, body: bytes) -> None:
        """Write a chunk, as uvicorn's `send` does; an empty one would end the answer."""
        if body:
            self._write(b"%x\r\n%b\r\n" % (len(body), body))


class _Unchunked:
    """An answer to HTTP/1.0, which knows no chunks: one of unknown length ends with its connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._is_endless = cycle, cycle.send, False

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message as uvicorn does, which takes what comes for the length that was announced."""
        if message["type"] == "http.response.start":
            self._is_endless = b"content-length" not in [name.lower() for name, _ in message["headers"]]
            if self._is_endless:
                self._cycle.chunked_encoding = False
        elif self._is_endless and message["type"] == "http.response.body":
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._send(message)


class _Parsing:
    """The connections of a loop whose bytes wait to be parsed."""

    _of_loops: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Parsing]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._num_calls = 0  # in this turn
        self._waiting: dict[Connection, None] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Parsing:
        return cls._of_loops.setdefault(loop, cls(loop))

    def parse(self, connection: Connection) -> None:
        """Parse the bytes of a connection, now or in a later turn."""
        if self._num_calls == 0 and not self._waiting:
            self._loop.call_soon(self._begin_turn)
        self._waiting[connection] = None
        if len(self._waiting) == 1:
            self._parse_some()

    def _begin_turn(self) -> None:
        self._num_calls = 0
        if self._waiting:
            self._loop.call_soon(self._begin_turn)
            self._parse_some()

    def _parse_some(self) -> None:
        while self._waiting and self._num_calls < TURN_CALLS:
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            self._num_calls += connection.parse_piece()
            if connection.can_parse:
                self._waiting[connection] = None


class Connection(HttpToolsProtocol):
    """A connection that carries requests one after another."""

    flow: _Flow
    _is_in_head = False
    _is_reading_on = False  # the head is that of a request whose body the parser before left
    _num_calls = 0  # of the parser
    _num_head_bytes = 0  # since the last head began, with the bytes before it in the same piece
    _running: RequestResponseCycle | None = None  # the last that began; others may wait behind it
    _refusal: ApiError | None = None  # ends the connection once the requests before it are answered
    _linger: asyncio.TimerHandle | None = None  # while the rest of an answered request is read
    _is_ending = False  # close the connection once that has been read
    _arrival: asyncio.TimerHandle | None = None  # while the client owes bytes of a request
    _owed_s = 0.0  # when that began
    _num_arrived = _num_seen = 0  # bytes since then, and at the last look
    _reading: asyncio.TimerHandle | None = None  # while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.timeout_keep_alive = IDLE_S
        self.flow = _Flow(transport)
        self._unparsed = bytearray()
        self._parsing = _Parsing.of(self.loop)
        self._answer_transport = _AnswerTransport(self)
        self._watch_arrival(0)

    def close_once_read(self) -> None:
        """Close the connection, once the rest of an answered request has arrived."""
        self._is_ending = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if not self._is_ending:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Buffer the bytes, and parse as many as may be parsed now."""
        if self._refusal is None:
            self._num_arrived += len(data)
            self._unparsed += data
            self._parse()
            self._watch_arrival(len(data))

    def _parse(self) -> None:
        if self.can_parse:
            self._parsing.parse(self)
        self._limit_flow()

    @property
    def can_parse(self) -> bool:
        """Return whether there are bytes, and room for another request."""
        return bool(self._unparsed) and len(self.pipeline) < MAX_PIPELINED

    def parse_piece(self) -> int:
        """Feed the parser, and return how often it called; a head that is too long ends the connection."""
        if self._refusal is not None or self.transport.is_closing():
            self._unparsed.clear()
            return 1
        before = self._num_calls
        piece = bytes(self._unparsed[:_PIECE_BYTES])
        del self._unparsed[:_PIECE_BYTES]
        self._unset_keepalive_if_required()
        self._feed(piece)
        self._num_head_bytes += len(piece)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            message = f"The request's headers are longer than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones."
            self._refuse(ApiError(431, "headers_too_large", message))
        if self._refusal is not None or self.transport.is_closing():
            self._unparsed.clear()
        self._limit_flow()
        return self._num_calls - before + 1

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            framing = [field for field in self.cycle.scope["headers"] if field[0] in _FRAMING]
            self.parser, self._is_reading_on = httptools.HttpRequestParser(self), True
            self._feed(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in framing]))
            self._is_reading_on = False
            self._feed(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _limit_flow(self) -> None:
        """Read no more from the socket while much waits to be parsed."""
        was_full, self.flow.is_full = self.flow.is_full, len(self._unparsed) > MAX_UNPARSED_BYTES
        if self.flow.is_full:
            self.flow.pause_reading()
        elif was_full:
            self.flow.resume_reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_calls += 1
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._num_calls += 1
        super().on_body(body)

    @property
    def _is_owed(self) -> bool:
        """Return whether the client has begun a request, or must begin its first, and has not sent all of it."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or self._is_in_head or (cycle.more_body and not cycle.response_complete)

    def _watch_arrival(self, num_bytes: int) -> None:
        """Begin to watch the arrival of what these bytes are a part of, or end to watch."""
        if not self._is_owed:
            self._unwatch()
        elif self._arrival is None:
            self._owed_s, self._num_arrived, self._num_seen = self.loop.time(), num_bytes, num_bytes
            self._arrival = self.loop.call_later(ARRIVAL_S, self._check_arrival)

    def _unwatch(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _check_arrival(self) -> None:
        """End a request that does not arrive, unless this server does not read it."""
        self._unwatch()
        owed_s = self.loop.time() - self._owed_s
        is_late = self._num_arrived == self._num_seen or self._num_arrived < (owed_s - GRACE_S) * BYTES_A_S
        if not self._is_owed:
            return
        if not is_late or self.flow.read_paused:
            self._num_seen = self._num_arrived
            self._arrival = self.loop.call_later(ARRIVAL_S, self._check_arrival)
        elif not self._num_arrived:
            self.transport.close()
        else:
            message = f"Only {self._num_arrived} bytes of the request arrived in {owed_s:.0f} s; send it again, faster."
            self._refuse(ApiError(408, "request_timeout", message, type="timeout_error"))

    def pause_writing(self) -> None:
        """Wait for the client to read, but not for ever."""
        super().pause_writing()
        self._reading = self.loop.call_later(READING_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._num_head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._is_reading_on:
            return
        target, separator, rest = self.url.partition(b"://")
        if separator and b"/" not in target:  # an absolute target names the host, whatever Host says (RFC 9112)
            authority = _END_OF_AUTHORITY.split(rest)[0]
            self.headers[:] = [(name, value) for name, value in self.headers if name != b"host"]
            self.headers.append((b"host", authority))
        super().on_headers_complete()
        self.cycle.transport = self._answer_transport  # type: ignore[assignment]  # the part of one that it uses
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _Unchunked(self.cycle).send  # type: ignore[method-assign]
        self.scope["extensions"] = {CHUNKS: {"writer": ChunkWriter(self, self.cycle)}}
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
        if self.parser.should_upgrade():
            return  # another parser reads on
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
        self._unparsed.clear()
        for waiting in (self._linger, self._arrival, self._reading):
            if waiting is not None:
                waiting.cancel()
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
        request_id = uuid.uuid4().hex
        head = (
            b"content-type: application/json\r\nconnection: close\r\n"
            b"x-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (request_id.encode(), len(body))
        )
        if _refusals.take():
            fields = {"request_id": request_id, "status": error.status, "code": error.code, "error": error.logged}
            words = (error.status, request_id, error.code, error.logged)
            logger.info("no request %d, request %r, %s: %s", *words, extra=fields)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
