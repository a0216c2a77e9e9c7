"""How server.ray_serve carries a request, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from server.http.in_process import Forwarded, Head, Piece, respond
from server.ray_serve.asgi import Answer, Ingress


def request(body: bytes = b"{}") -> Forwarded:
    return Forwarded("POST", "/v1/completions", b"", [], body, None)


async def test_an_answer_is_carried_piece_by_piece() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        for part in (body, b"", b"!"):
            await send({"type": "http.response.body", "body": part, "more_body": True})

    assert [piece async for piece in respond(app, request())] == [Head(200, [(b"x", b"y")]), b"{}", b"!"]


async def test_an_application_hears_that_its_client_has_left() -> None:
    heard = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    pieces = respond(app, request())
    await anext(pieces)
    await pieces.aclose()
    assert heard.is_set()


def client(answer: Answer, most: int = 100) -> httpx.AsyncClient:
    app = Ingress(answer, most)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x")


def answering(*pieces: Piece | Exception) -> Answer:
    async def answer(_: Forwarded) -> AsyncIterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    return answer


STREAM = Head(200, [(b"content-type", b"text/event-stream")])


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/completions", "data: [DONE]\n\n"),
        ("/v1/chat/completions", "data: [DONE]\n\n"),
        ("/v1/messages", ""),
        ("/v1/responses", ""),
    ],
)
async def test_a_lost_daemon_ends_a_stream_with_an_error(path: str, end: str) -> None:
    async with client(answering(STREAM, b"data: {}\n\n", RuntimeError())) as asked:
        answer = await asked.post(path, json={})
    assert answer.status_code == 200
    assert answer.text.endswith(end)
    assert "The daemon that answered was lost" in answer.text
    assert ("event: error" in answer.text) == (not end)


async def test_a_daemon_lost_before_it_answers_is_a_503() -> None:
    async with client(answering(RuntimeError())) as asked:
        answer = await asked.post("/v1/completions", json={})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "daemon_lost"
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("method", "path"), [("GET", "/metrics"), ("POST", "/v1/files"), ("GET", "/v1/completions")])
async def test_what_needs_one_daemons_memory_is_refused(method: str, path: str) -> None:
    async with client(answering(Head(200, []), b"{}")) as asked:
        answer = await asked.request(method, path)
    assert answer.status_code == 404
    assert f"{method} {path} is not served behind Ray" in answer.json()["error"]["message"]


async def test_a_large_body_is_not_collected() -> None:
    async with client(answering(Head(200, []))) as asked:
        answer: Any = await asked.post("/v1/completions", content=b"x" * 101)
    assert answer.status_code == 413
