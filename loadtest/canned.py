"""A server of ready-made event streams: the fastest thing a client can be pointed at, to find the client's own ceiling.

`python -m loadtest.canned` prints its port and serves until SIGTERM. Like an engine, it sends one
event to every open stream, then the next to every one, so nothing arrives merged that a real server would send apart.
"""

from __future__ import annotations

import asyncio
import json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(choices: list[dict[str, object]], **fields: object) -> bytes:
    body = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "canned", "choices": choices, **fields}
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


TOKEN = _event([{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}])
LAST = _event([{"index": 0, "text": " word", "logprobs": None, "finish_reason": "length"}])


class CannedServer:
    """Answers every POST with as many events as its max_tokens asks for."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Transport, tuple[int, int]] = {}  # tokens still to send, tokens in all
        self._wake = asyncio.Event()

    def open(self, transport: asyncio.Transport, num_tokens: int) -> None:
        """Start a stream."""
        transport.write(HEAD)
        self._left[transport] = (num_tokens, num_tokens)
        self._wake.set()

    def close(self, transport: asyncio.Transport) -> None:
        """Forget a stream whose client has gone."""
        self._left.pop(transport, None)

    async def tick(self) -> None:
        """One event to every open stream, round after round."""
        while True:
            await self._wake.wait()
            for transport, (left, total) in list(self._left.items()):
                if left > 1:
                    transport.write(TOKEN)
                    self._left[transport] = (left - 1, total)
                else:
                    usage = {"prompt_tokens": 1, "completion_tokens": total, "total_tokens": total + 1}
                    end = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
                    transport.write(LAST + _event([], usage=usage) + end)
                    del self._left[transport]
            if not self._left:
                self._wake.clear()
            await asyncio.sleep(0)


class CannedConnection(asyncio.Protocol):
    """Reads requests whose head and body come in one piece or more."""

    def __init__(self, server: CannedServer) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.close(self._transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or b"0")
        if found and len(body) >= length:
            self._buffer = b""
            self._server.open(self._transport, int(json.loads(body)["max_tokens"]))


async def serve() -> None:
    """Print the port and serve."""
    canned = CannedServer()
    server = await asyncio.get_running_loop().create_server(lambda: CannedConnection(canned), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await canned.tick()


if __name__ == "__main__":
    asyncio.run(serve())
