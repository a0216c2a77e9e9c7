"""Several requests on one connection, sent before the first is answered: raw sockets against the real application."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest
from harness import Live, eventually

from engine.core.types import AbortCause
from server.http.connection import MAX_PIPELINED, MAX_UNPARSED_BYTES, Connection
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
ID = re.compile(rb"x-request-id: (\S+)")


@contextmanager
def connect(live: Live) -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


def get(name: int | str, path: str = "/version") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: {name}\r\n\r\n".encode()


def post(**fields: object) -> bytes:
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-request-id: post\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read(connection: socket.socket, num_answers: int) -> bytes:
    """What is answered, up to the last answer's body or the server's hanging up."""
    answers = b""
    while len(STATUS.findall(answers)) < num_answers or not answers.endswith((b"}", b"0\r\n\r\n")):
        piece = connection.recv(65536)
        if not piece:
            break
        answers += piece
    return answers


@pytest.mark.parametrize("num", [MAX_PIPELINED + 1, MAX_PIPELINED + 2, 40, 1000, 5000])
def test_every_pipelined_request_is_answered_in_order(live: Live, num: int) -> None:
    with connect(live) as connection:
        connection.sendall(b"".join(get(name) for name in range(num)))
        answers = read(connection, num)
        assert STATUS.findall(answers) == [b"200"] * num
        assert ID.findall(answers) == [str(name).encode() for name in range(num)]
        connection.sendall(get("again"))  # the connection is in order
        assert ID.findall(read(connection, 1)) == [b"again"]


def test_requests_that_come_byte_by_byte_behind_one_that_runs_are_answered_in_order(serve: Serve) -> None:
    live = serve()
    live.gate.close()
    with connect(live) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(post(prompt="x", max_tokens=3))
        eventually(lambda: live.context.client.num_open == 1)
        for byte in b"".join(get(name) for name in range(2)) + post(prompt="y|", max_tokens=2):
            connection.sendall(bytes([byte]))
        live.gate.open()
        answers = read(connection, 4)
    assert ID.findall(answers) == [b"post", b"0", b"1", b"post"]
    assert answers.index(b"text_completion") < answers.index(b'"version"') < answers.rindex(b"text_completion")


def test_bodies_behind_one_another_are_read_whole(live: Live) -> None:
    """More of them, and longer ones, than are parsed ahead."""
    texts = ["a" * 30_000 + str(index) for index in range(MAX_PIPELINED + 5)]
    with connect(live) as connection:
        connection.sendall(
            b"".join(post(prompt=text) for text in texts)
        )  # too long for the model: a 400 that counts them
        answers = read(connection, len(texts))
    assert STATUS.findall(answers) == [b"400"] * len(texts)


def test_a_flood_behind_one_that_runs_is_not_read_into_memory(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    connections, data_received = set(), Connection.data_received
    num_received = 0

    def count(self: Connection, data: bytes) -> None:
        nonlocal num_received
        connections.add(self)
        num_received += len(data)
        data_received(self, data)

    monkeypatch.setattr(Connection, "data_received", count)
    live = serve()
    live.gate.close()
    flood = get("flood") * (64 * MAX_UNPARSED_BYTES // len(get("flood")))
    with connect(live) as connection:
        connection.sendall(post(prompt="x", max_tokens=3))
        eventually(lambda: live.context.client.num_open == 1)
        (served,) = connections
        sender = threading.Thread(target=send_until_closed, args=(connection, flood))
        sender.start()
        eventually(lambda: served.flow.is_full or num_received >= len(flood))
        assert num_received < len(flood) / 16
        live.gate.open()
        answers = read(connection, 100)
        connection.shutdown(socket.SHUT_RDWR)
        sender.join(PATIENCE_S)
    assert ID.findall(answers)[:100] == [b"post", *[b"flood"] * 99]


def send_until_closed(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        connection.sendall(data)


@pytest.mark.parametrize("num_behind", [1, MAX_PIPELINED + 20])
def test_a_client_that_leaves_with_requests_behind_one_that_runs_frees_it(serve: Serve, num_behind: int) -> None:
    live = serve(step_s=0.05)
    with connect(live) as connection:
        connection.sendall(post(prompt="endless", max_tokens=500))
        eventually(lambda: live.engine.stats.num_running == 1)
        connection.sendall(get("behind") * num_behind)
    eventually(lambda: live.engine.stats.num_running == 0)
    live.check_idle()
    assert live.engine.stats.aborted[AbortCause.DISCONNECT] == 1


@pytest.mark.parametrize(
    "broken",
    [
        b"\x16\x03\x01 no http\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nx-endless: " + b"a" * 80_000,
    ],
)
@pytest.mark.parametrize("num", [1, 3, 40])
def test_what_cannot_be_read_is_refused_after_the_answers_before_it(live: Live, broken: bytes, num: int) -> None:
    with connect(live) as connection:
        connection.sendall(b"".join(get(name) for name in range(num)) + broken)
        answers = read(connection, num + 1)
    assert STATUS.findall(answers) == [b"200"] * num + [b"431" if b"endless" in broken else b"400"]
    assert answers.count(b"connection: close") == 1


def test_a_stream_is_not_cut_by_what_cannot_be_read_behind_it(serve: Serve) -> None:
    live = serve()
    live.gate.close()
    with connect(live) as connection:
        connection.sendall(post(prompt="hello|", stream=True) + b"\x16\x03\x01 no http\r\n\r\n")
        eventually(lambda: live.context.client.num_open == 1)
        live.gate.open()
        answers = read(connection, 2)
    assert STATUS.findall(answers) == [b"200", b"400"]
    assert answers.index(b"data: [DONE]") < answers.index(b"400 Bad Request")


def test_a_long_upload_is_read_in_pieces(live: Live) -> None:
    """The parser takes small pieces; a body of megabytes still arrives, and the next request behind it."""
    body = json.dumps({"prompt": "a" * 5_000_000})
    with httpx.Client(base_url=live.url) as http:
        refused = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert refused.status_code == 400
        assert http.get("/version").status_code == 200
