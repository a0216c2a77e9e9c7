"""Settings that hold for all requests: a path before the routes, and values where a request names none."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from server.http.middleware import RequestScope
from tests.http.harness import Live

SETTINGS: dict[str, Any] = {
    "root_path": "/llm",
    "api_keys": ("k",),
    "enable_force_include_usage": True,
    "return_tokens_as_token_ids": True,
    "default_chat_template_kwargs": {"suffix": "!"},
    "openapi": True,
    "enable_log_requests": False,
}
KEY = {"authorization": "Bearer k"}
CHAT = {"messages": [{"role": "user", "content": "abcdefgh"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(**SETTINGS).serving() as live:
        yield live


def post(live: Live, path: str, **body: Any) -> httpx.Response:
    answer = httpx.post(f"{live.url}{path}", json=body, headers=KEY)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", ["/llm/v1/chat/completions", "/v1/chat/completions", "/llm/v1/chat/completions/"])
def test_routes_are_found_with_the_root_path_and_without(live: Live, path: str) -> None:
    assert post(live, path, **CHAT).json()["object"] == "chat.completion"


@pytest.mark.parametrize("path", ["/llm/v1/models", "/llm//v1/models", "/llm/llm/v1/models", "/llmx/v1/models"])
def test_a_key_is_asked_for_under_the_root_path_too(live: Live, path: str) -> None:
    assert httpx.get(f"{live.url}{path}").status_code == 401
    assert httpx.get(f"{live.url}/llm/health").status_code == 200
    assert httpx.get(f"{live.url}/llm").status_code == httpx.get(f"{live.url}/").status_code == 200


async def test_a_route_that_begins_like_the_root_path_stays_whole() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["path"])

    inner = RequestScope(app, lambda _: None, root_path="/v")
    for path in ("/v1/models", "/v/v1/models"):
        await inner({"type": "http", "method": "GET", "path": path, "headers": []}, AsyncMock(), AsyncMock())
    assert seen == ["/v1/models", "/v1/models"]


def test_the_description_names_the_root_path(live: Live) -> None:
    assert httpx.get(f"{live.url}/llm/openapi.json", headers=KEY).json()["servers"] == [{"url": "/llm"}]


def test_a_stream_ends_with_its_usage_unasked(live: Live) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "ab", "max_tokens": 4})):
        *_, last, done = post(live, path, **body, stream=True).text.split("\n\n")[:-1]
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 4


def test_logprobs_spell_tokens_as_ids(live: Live) -> None:
    content = post(live, "/v1/chat/completions", **CHAT, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [each["token"].startswith("token_id:") for each in content] == [True] * len(content)
    assert content[0]["token"] == f"token_id:{ord('b')}"  # of the prompt "abcdefgh|!"
    tokens = post(live, "/v1/completions", prompt="ab|", max_tokens=2, logprobs=1).json()["choices"][0]["logprobs"][
        "tokens"
    ]
    assert tokens == [f"token_id:{ord('a')}", f"token_id:{ord('b')}"]


def test_variables_of_the_template_hold_where_a_request_names_none(live: Live) -> None:
    def prompt(**more: Any) -> str:
        ids = post(live, "/tokenize", messages=CHAT["messages"], **more).json()["tokens"]
        return bytes(ids).decode()

    assert prompt() == "abcdefgh|!"
    assert prompt(chat_template_kwargs={"suffix": "?"}) == "abcdefgh|?"
    assert prompt(chat_template_kwargs={"other": 1}) == "abcdefgh|!"


def test_answered_requests_have_no_line(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        post(live, "/v1/chat/completions", **CHAT)
    assert not [record for record in caplog.records if record.name == "server.http.middleware"]


def test_the_description_can_be_left_out() -> None:
    with Live(openapi=False).serving() as live:
        assert httpx.get(f"{live.url}/openapi.json").status_code == 404
