"""The parts of server.ray_serve that need no Ray: which replica a prompt goes to, and how a request is carried."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from engine.sources.model_source import find_model
from engine.text.tokenizer import load_tokenizer
from server.ray_serve.asgi import Answer, Forwarded, Head, Ingress, Piece, respond
from server.ray_serve.prefix_index import PrefixIndex
from server.ray_serve.prompt_blocks import BLOCK_TOKENS, PromptBlocks

A, B = "a", "b"


def blocks(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


@pytest.fixture
def index() -> PrefixIndex[str]:
    found: PrefixIndex[str] = PrefixIndex()
    found.hold_to({A: 8, B: 8})
    return found


def test_a_prompt_goes_where_its_beginning_is(index: PrefixIndex[str]) -> None:
    index.begin("1", B, blocks("hello"))
    index.end("1")
    assert index.rank([A, B], blocks("hello world")) == [B, A]
    assert index.rank([A, B], blocks("other")) == [A, B]  # A has fewer blocks


def test_not_behind_more_work_than_it_saves(index: PrefixIndex[str]) -> None:
    index.begin("1", B, blocks("hey"))
    index.end("1")
    index.begin("2", B, blocks("x" * 8))
    assert index.rank([A, B], blocks("hey")) == [A, B]
    index.end("2")
    index.hold_to({A: 8, B: 16})
    assert index.rank([A, B], blocks("xxxx"))[0] == B


def test_what_was_used_longest_ago_is_forgotten(index: PrefixIndex[str]) -> None:
    for number, text in enumerate(("first", "later")):
        index.begin(str(number), A, blocks(text))
        index.end(str(number))
    assert index.rank([B, A], blocks("later"))[0] == A
    assert index.rank([A, B], blocks("first"))[0] == A  # three of its blocks are left
    assert index.rank([A, B], blocks("firs"))[0] == A
    index.hold_to({B: 8})
    assert index.rank([A, B], blocks("later")) == [A, B]


def test_a_request_that_moved_is_counted_once(index: PrefixIndex[str]) -> None:
    index.begin("1", A, blocks("abc"))
    index.begin("1", B, blocks("abc"))
    assert index.rank([A, B], blocks("zzz")) == [A, B]
    index.end("1")
    index.end("1")
    index.hold_to({A: 8})
    index.begin("2", B, ())
    index.end("2")


@pytest.fixture(scope="module")
def named() -> PromptBlocks:
    return PromptBlocks(load_tokenizer(find_model(None).path))


def test_the_same_prompt_has_the_same_names_wherever_it_is_asked(named: PromptBlocks) -> None:
    text = "one two three four five " * 20
    messages = [{"role": "user", "content": text}]
    chat = named.of("/v1/chat/completions", json.dumps({"messages": messages}).encode())
    assert len(chat) > 80 // BLOCK_TOKENS
    assert chat == named.of("/v1/messages", json.dumps({"model": None, "messages": messages, "max_tokens": 9}).encode())
    longer = named.of(
        "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": text + text}]}).encode()
    )
    assert longer[: len(chat) - 1] == chat[:-1]


@pytest.mark.parametrize("more", [{"cache_salt": "s"}, {"model": "adapter"}])
def test_salts_models_and_keys_keep_names_apart(named: PromptBlocks, more: dict[str, str]) -> None:
    body = {"prompt": list(range(100, 200))}
    plain = named.of("/v1/completions", json.dumps(body).encode())
    assert len(plain) == 100 // BLOCK_TOKENS
    other = named.of("/v1/completions", json.dumps({**body, **more}).encode())
    assert not set(plain) & set(other)
    assert not set(plain) & set(named.of("/v1/completions", json.dumps(body).encode(), "Bearer key"))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"prompt": 7}', b'{"prompt": null}', b'{"prompt": ["a"], "n": 0}']
)
def test_a_wrong_body_has_no_blocks(named: PromptBlocks, body: bytes) -> None:
    assert named.of("/v1/completions", body) == []
    assert named.of("/v1/chat/completions", body) == []


# -- one request -------------------------------------------------------------------------------------------------------


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
    app = Ingress(answer, lambda *_: [], most)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x")


def answering(*pieces: Piece | Exception) -> Answer:
    async def answer(_: Forwarded, __: list[bytes]) -> AsyncIterator[Piece]:
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
