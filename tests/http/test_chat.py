"""/v1/chat/completions, /tokenize and /detokenize: conversations become prompts, answers keep the chat shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import Live
from test_completions import stream

Post = Callable[..., dict[str, Any]]
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_an_answer_has_the_shape_that_clients_know(post: Post) -> None:
    answer = post(PATH, messages=HELLO)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "parrot")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 6)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(http: httpx.Client) -> None:
    chunks = stream(http, PATH, messages=HELLO, n=2)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in own) == "hello"
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_an_empty_answer_still_streams_its_role(http: httpx.Client) -> None:
    chunks = stream(http, PATH, messages=[{"role": "user", "content": ""}])
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {"content": ""}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_rest_of_the_context_unless_asked_otherwise(post: Post) -> None:
    endless = post(PATH, messages=HELLO, add_generation_prompt=False)
    assert endless["usage"]["total_tokens"] == 512
    assert post(PATH, messages=HELLO, max_completion_tokens=2)["choices"][0]["message"]["content"] == "he"
    assert post(PATH, messages=HELLO, max_tokens=2)["choices"][0]["message"]["content"] == "he"
    long = [{"role": "user", "content": "x" * 600}]
    for name in ("max_tokens", "max_completion_tokens"):
        usage = post(PATH, messages=long, truncate_prompt_tokens=-1, **{name: 12})["usage"]
        assert usage["prompt_tokens"] == 500


def test_logprobs_carry_bytes(post: Post) -> None:
    messages = [{"role": "user", "content": "é"}]
    content = post(PATH, messages=messages, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]) == "é<end>".encode()
    assert [len(token["top_logprobs"]) for token in content] == [2, 2, 2]
    assert content[0] == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "\ufffd", "logprob": -1.5, "bytes": [0xC4]},
        ],
    }
    assert post(PATH, messages=messages, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_content_parts_are_joined(post: Post) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    answer = post(PATH, messages=[{"role": "user", "content": parts}])
    assert answer["choices"][0]["message"]["content"] == "one\ntwo"


def test_a_final_message_is_continued(post: Post) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "|hel"}]
    answer = post(PATH, messages=messages, continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == "lo"


def test_template_arguments_reach_the_template(post: Post) -> None:
    answer = post(PATH, messages=HELLO, chat_template_kwargs={"suffix": "he"})
    assert answer["choices"][0]["message"]["content"] == "llo"


def test_what_is_told_about_the_prompt(post: Post) -> None:
    answer = post(PATH, messages=HELLO, return_token_ids=True, prompt_logprobs=0)
    assert answer["prompt_token_ids"] == list(b"hello|")
    assert answer["choices"][0]["token_ids"] == [*b"hello", 256]
    assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(byte)] for byte in b"ello|"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "né"}, "né"),
        ({"messages": HELLO, "chat_template": ""}, "hello|"),
        ({"prompt": "x" * 2500}, "x" * 2500),
    ],
)
def test_tokenize_and_back(post: Post, fields: dict[str, Any], text: str) -> None:
    answer = post("/tokenize", **fields, return_token_strs=True)
    assert answer["tokens"] == list(text.encode())
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    assert post("/detokenize", tokens=answer["tokens"]) == {"prompt": text}


LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [LOOK_UP]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"suffix": "he"}},
        {"messages": [*HELLO, {"role": "assistant", "content": "he"}], "continue_final_message": True},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_tokenize_sees_the_prompt_that_chat_sees(serve: Callable[..., Live], fields: dict[str, Any]) -> None:
    live = serve(tool_call_parser="hermes")
    asked = {"messages": HELLO, **fields}
    told = httpx.post(f"{live.url}/tokenize", json=asked).json()
    chat = httpx.post(live.url + PATH, json={**asked, "max_tokens": 1, "return_token_ids": True}).json()
    assert told["tokens"] == chat["prompt_token_ids"]
    assert told["tokens"] != list(b"hello|")
