"""A fast HTTP/1.1 client that records when the chunks of event streams arrive.

It is written on asyncio's transports, because a general client spends more time on a chunk than the server. Each piece
of the socket's data gets a timestamp before it is parsed. Connections are kept alive and reused.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loadtest.errors import LoadtestError

DONE = b"[DONE]"

OnData = Callable[[float, bytes], None]  # arrival time of a piece of the body, and the piece


class ClientError(LoadtestError):
    """The exchange failed; the message is one sentence."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a request; `chunks` are the times at which text arrived."""

    start_s: float
    end_s: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int | None = None  # None: the server sent no usage
    finish_reason: str = ""
    error: str = ""


class Target(NamedTuple):
    """The address of a server, and the key for it."""

    host: str
    port: int
    authority: str  # host and port as in the URL
    tls: bool
    prefix: str  # path before "/v1"
    api_key: str = ""

    @classmethod
    def parse(cls, base_url: str, api_key: str = "") -> Target:
        """Read http(s)://host[:port][/v1]. Raises ClientError."""
        try:
            url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
            host, port = url.hostname, url.port
        except ValueError:
            host = None
        if not host or url.scheme not in ("http", "https"):
            raise ClientError(f"--base-url is {base_url!r}; write it as http://host:port.")
        tls = url.scheme == "https"
        prefix = url.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), url.netloc.rpartition("@")[2], tls, prefix, api_key)

    @classmethod
    def local(cls, port: int) -> Target:
        """Return a server of this machine."""
        return cls.parse(f"127.0.0.1:{port}")

    def head(self, method: str, path: str, length: int) -> bytes:
        """Return the request line and the headers."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.authority}",
            "Accept: text/event-stream, application/json",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Connection(asyncio.Protocol):
    """One keep-alive connection, for one exchange at a time on the event loop."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.received = False  # any byte of this exchange's answer
        self._done: asyncio.Future[int] | None = None

    async def exchange(self, request: bytes, on_data: OnData) -> int:
        """Send a request, pass each piece of the body to `on_data`, return the status.

        Raises ClientError if the connection ends early or the answer cannot be read.
        """
        assert self.transport is not None
        self.received = False
        if self.closed:
            raise ClientError("the connection was closed")
        self._on_data = on_data
        self._buffer = b""
        self._status = 0
        self._chunked = False
        self._remaining: int | None = None  # bytes of a body of known length; None: up to the connection's end
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        self.closed = True
        if self._done is None or self._done.done():
            return
        if self._status and not self._chunked and self._remaining is None:
            self._done.set_result(self._status)
        else:
            self._done.set_exception(ClientError("the connection was lost before the answer's end"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.received = True
        if self._done is None or self._done.done():
            return
        self._buffer += data
        try:
            if not self._status and not self._read_head():
                return
            complete = self._read_chunks(now) if self._chunked else self._read_plain(now)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            what = f"the answer is not what the API promises ({type(error).__name__}: {error})"
            self._done.set_exception(ClientError(what))
            return
        if complete:
            self._done.set_result(self._status)

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        lines = head.lower().split(b"\r\n")
        self._status = int(lines[0].split(b" ", 2)[1])
        headers = dict(line.split(b":", 1) for line in lines[1:])
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
        if b"content-length" in headers:
            self._remaining = int(headers[b"content-length"])
        self._buffer = rest
        return True

    def _read_plain(self, now: float) -> bool:
        piece, self._buffer = self._buffer, b""
        self._on_data(now, piece)
        if self._remaining is None:
            return False
        self._remaining -= len(piece)
        return self._remaining <= 0

    def _read_chunks(self, now: float) -> bool:
        buffer, position, pieces = self._buffer, 0, []
        while (end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:end].partition(b";")[0], 16)
            if len(buffer) < end + 4 + size:
                break
            pieces.append(buffer[end + 2 : end + 2 + size])
            position = end + 4 + size
        self._buffer = buffer[position:]
        if not pieces:
            return False
        self._on_data(now, b"".join(pieces))
        return not pieces[-1]


class EventReader:
    """Splits the body of an answer into events, and records them in an Outcome."""

    def __init__(self, outcome: Outcome, on_event: Callable[[Any], None] = lambda _: None) -> None:
        self.outcome, self._on_event = outcome, on_event
        self.tail = b""  # the rest without a blank line; all of the body if it is not a stream

    def feed(self, now: float, data: bytes) -> None:
        *events, self.tail = (self.tail + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and (payload := line[5:].strip()) != DONE:
                    self._note(now, json.loads(payload))

    def _note(self, now: float, event: dict[str, Any]) -> None:
        outcome = self.outcome
        self._on_event(event)
        if error := event.get("error"):
            outcome.error = _sentence(error)
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.completion_tokens = usage["completion_tokens"]
            outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            if delta.get("content") or delta.get("text") or delta.get("reasoning_content"):
                outcome.chunks.append(now)
            if reason := choice.get("finish_reason"):
                outcome.finish_reason = reason


def _sentence(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


class Client:
    """Sends requests to one target over a pool of connections, on the event loop."""

    def __init__(self, target: Target, timeout_s: float = 600.0) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def stream(
        self,
        path: str,
        body: dict[str, Any],
        outcome: Outcome | None = None,
        on_event: Callable[[Any], None] = lambda _: None,
    ) -> Outcome:
        """POST a streaming request and time its answer; an error is in `Outcome.error`.

        A given `outcome` is filled while the answer arrives, for callers that cancel the request. `on_event` gets the
        documents of the stream.
        """
        payload = json.dumps(body).encode()
        request = self.target.head("POST", path, len(payload)) + payload
        outcome = outcome or Outcome(start_s=time.perf_counter())
        reader = EventReader(outcome, on_event)
        try:
            status = await asyncio.wait_for(self._exchange(request, reader.feed), self.timeout_s)
            if status != 200:
                outcome.error = f"HTTP {status}: {_body_sentence(reader.tail)}"
            elif not outcome.finish_reason and not outcome.error:
                outcome.error = "the stream ended without a finish_reason"
        except asyncio.TimeoutError:
            outcome.error = f"no complete answer within {self.timeout_s:g} s"
        except (ClientError, OSError) as error:
            outcome.error = str(error)
        outcome.end_s = time.perf_counter()
        return outcome

    async def get(self, path: str) -> Any:
        """GET a JSON document. Raises ClientError."""
        return await self._json("GET", path, b"")

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """POST one JSON document for another. Raises ClientError."""
        return await self._json("POST", path, json.dumps(body).encode())

    async def _json(self, method: str, path: str, payload: bytes) -> Any:
        pieces: list[bytes] = []
        request = self.target.head(method, path, len(payload)) + payload
        try:
            status = await self._exchange(request, lambda _, piece: pieces.append(piece))
        except OSError as error:
            raise ClientError(
                f"{self.target.host}:{self.target.port} cannot be reached ({error}); start the server, or correct its address."
            ) from None
        body = b"".join(pieces)
        if status != 200:
            raise ClientError(f"{method} {path} answered HTTP {status}: {_body_sentence(body)}")
        try:
            return json.loads(body)
        except ValueError:
            raise ClientError(f"{method} {path} did not answer with JSON.") from None

    async def _exchange(self, request: bytes, on_data: OnData) -> int:
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                status = await connection.exchange(request, on_data)
            except BaseException as error:
                connection.close()
                if reused and isinstance(error, ClientError) and not connection.received:
                    continue  # the server closed the idle connection before it answered
                raise
            if not connection.closed:
                self._idle.append(connection)
            return status

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.target.host, self.target.port, ssl=self._tls)
        return connection

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _body_sentence(body: bytes) -> str:
    try:
        return _sentence(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace").strip() or "no body"
