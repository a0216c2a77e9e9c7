"""Clients that send or read slowly, or not at all: raw sockets against the real application."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from harness import Live, eventually

from server.http import connection as connection_module
from server.http.connection import Connection
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


class Watched:
    """A server, and the server's ends of its connections, which look at what has arrived when a test says so."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.ends: list[Connection] = []

    def call(self, function: Callable[[], None]) -> None:
        """Call a function on the event loop, and wait for its end."""
        loop, is_done = self.live.context.client._loop, threading.Event()
        assert loop is not None
        loop.call_soon_threadsafe(lambda: (function(), is_done.set()))
        assert is_done.wait(PATIENCE_S)

    @contextmanager
    def sent(self, data: bytes) -> Iterator[tuple[socket.socket, Connection]]:
        """Send the beginning of a request, and wait until the server has it."""
        host, port = self.live.url.removeprefix("http://").split(":")
        self.ends.clear()
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(data)
            eventually(lambda: bool(self.ends) and self.ends[0]._num_arrived == len(data))
            yield connection, self.ends[0]


@pytest.fixture
def watched(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched, made = Watched(serve()), Connection.connection_made

    def note(self: Connection, transport: asyncio.Transport) -> None:
        made(self, transport)
        watched.ends.append(self)

    monkeypatch.setattr(Connection, "connection_made", note)
    return watched


def read_to_end(connection: socket.socket) -> bytes:
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0",
        HEAD + b"content-length: 100\r\n\r\n",
        HEAD + b'content-length: 100\r\n\r\n{"prompt": ',
        HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\n',
    ],
)
def test_a_request_of_which_no_more_arrives_is_a_408(watched: Watched, sent: bytes) -> None:
    with watched.sent(sent) as (connection, end):
        watched.call(end._check_arrival)
        connection.sendall(b"1")
        eventually(lambda: end._num_arrived == len(sent) + 1)
        watched.call(end._check_arrival)  # a byte has come since the last look
        assert not end.transport.is_closing()
        watched.call(end._check_arrival)
        answer = read_to_end(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert f"Only {len(sent) + 1} bytes of the request arrived in 0 s" in error["message"]


def test_a_connection_without_a_request_is_closed(watched: Watched) -> None:
    with watched.sent(b"") as (connection, end):
        watched.call(end._check_arrival)
        assert read_to_end(connection) == b""


def test_an_idle_connection_stays_longer_than_a_proxy_keeps_it(watched: Watched) -> None:
    with watched.sent(b"GET /health HTTP/1.1\r\n\r\n") as (_, end):
        eventually(lambda: end.timeout_keep_alive_task is not None)
        assert end.timeout_keep_alive_task is not None
        assert end.timeout_keep_alive_task.when() - end.loop.time() > 120


def check_as_if_owed_for(end: Connection, seconds: float) -> None:
    end._owed_s = end.loop.time() - seconds  # a moment passes until it is compared
    end._check_arrival()


def test_a_body_that_arrives_too_slowly_is_a_408(watched: Watched) -> None:
    with watched.sent(HEAD + b"content-length: 9999999\r\n\r\n") as (connection, end):
        before = end._num_arrived
        connection.sendall(b" " * 5000)
        eventually(lambda: end._num_arrived == before + 5000)
        watched.call(lambda: check_as_if_owed_for(end, connection_module.GRACE_S))
        assert not end.transport.is_closing(), "the time of grace is over, and enough has come"
        connection.sendall(b" ")
        eventually(lambda: end._num_arrived == before + 5001)
        watched.call(lambda: check_as_if_owed_for(end, connection_module.GRACE_S + 1))
        assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")


def test_nothing_is_owed_once_a_request_has_arrived(watched: Watched) -> None:
    body = b'{"prompt": "a|"}'
    with watched.sent(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body[:5])) as (connection, end):
        assert end._arrival is not None
        connection.sendall(body[5:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert end._arrival is None
        watched.call(end._check_arrival)
        connection.sendall(HEAD)
        eventually(lambda: end._arrival is not None)


def test_a_408_waits_for_the_answer_before_it(watched: Watched) -> None:
    live = watched.live
    live.gate.close()
    body = b'{"prompt": "a|"}'
    with watched.sent(HEAD + b"content-length: %d\r\n\r\n%sPOST /v1/comp" % (len(body), body)) as (connection, end):
        eventually(lambda: live.context.client.num_open == 1)
        for _ in range(2):
            watched.call(end._check_arrival)
        live.gate.open()
        answers = read_to_end(connection)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 408 ") == 1


def test_a_client_that_does_not_read_is_left(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    live, body = watched.live, b'{"prompt": "x", "max_tokens": 400, "stream": true}'
    live.gate.close()
    with watched.sent(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)) as (connection, end):
        eventually(lambda: live.context.client.num_open == 1)
        watched.call(end.pause_writing)  # as when the socket's buffers are full
        watched.call(end.resume_writing)
        assert end._reading is not None
        assert end._reading.cancelled()
        monkeypatch.setattr(connection_module, "READING_S", 0.0)
        watched.call(end.pause_writing)
        eventually(lambda: live.context.client.num_open == 0)
        live.gate.open()
        with suppress(ConnectionResetError):
            assert b"[DONE]" not in read_to_end(connection)


# -- accounts --------------------------------------------------------------------------------------------------------------


@contextmanager
def connect(live: Live) -> Iterator[socket.socket]:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        yield connection


@pytest.fixture
def tenants(serve: Serve, tmp_path: Path) -> Live:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "tenants: [{name: a, key: a-key, max_concurrent_requests: 1}, {name: poor, key: poor-key, tokens_per_minute: 30},"
        " {name: other, key: other-key}]"
    )
    return serve(tenants=path)


def head(key: str, path: str = "/v1/completions", num_bytes: int = 1_000_000) -> bytes:
    return HEAD.replace(b"/v1/completions", path.encode()) + (
        b"x-api-key: %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (key.encode(), num_bytes)
    )


ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score")


@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_account_at_a_limit_is_refused_before_its_body_is_read(tenants: Live, path: str) -> None:
    """The body of the first request never ends; those of the refused ones are not even begun."""
    account = tenants.context.tenancy.find(["a-key"])
    poor = tenants.context.tenancy.find(["poor-key"])
    assert account is not None
    assert poor is not None
    with connect(tenants) as unfinished:
        unfinished.sendall(head("a-key", path) + b"{")
        eventually(lambda: account.num_open == 1)
        with connect(tenants) as refused:
            refused.sendall(head("a-key", path))
            answer = read_to_end(refused)
        assert b"HTTP/1.1 429 " in answer
        assert b"Tenant a has 1 requests open" in answer
        assert httpx.get(tenants.url + "/v1/models", headers={"x-api-key": "a-key"}).status_code == 200
    eventually(lambda: account.num_open == 0)
    poor.charge(10_000)
    with connect(tenants) as refused:
        refused.sendall(head("poor-key", path))
        answer = read_to_end(refused)
    assert b"used up its 30 tokens a minute" in answer


def test_what_does_not_run_the_engine_counts_on_no_account(tenants: Live) -> None:
    poor = tenants.context.tenancy.find(["poor-key"])
    assert poor is not None
    poor.charge(10_000)
    answer = httpx.post(tenants.url + "/tokenize", json={"prompt": "abc"}, headers={"x-api-key": "poor-key"})
    assert answer.status_code == 200


def test_tokens_that_were_spent_while_a_body_arrived_refuse_it(tenants: Live) -> None:
    poor = tenants.context.tenancy.find(["poor-key"])
    assert poor is not None
    body = b'{"prompt": "a|"}'
    with connect(tenants) as connection:
        connection.sendall(head("poor-key", num_bytes=len(body)) + body[:3])
        eventually(lambda: poor.num_open == 1)
        poor.charge(10_000)
        connection.sendall(body[3:])
        assert b"HTTP/1.1 429 " in connection.recv(65536)
    assert poor.num_open == 0
