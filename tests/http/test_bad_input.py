"""What nobody should send: one short, typed sentence, always in the same envelope, and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness import Live

from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT_OR_LIST = "Input should be a string or a list, not 5"
TEXT = {"prompt": "x|"}
HELLO = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "a"}}
CALLED = {"role": "assistant", "content": "x", "tool_calls": [TOOL]}
PART = {"type": "text", "text": "x"}
CALLS = [{"id": "b", "index": 0, "x": 1, "function": {"name": "a", "arguments": "{}"}}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, after checking that the envelope is whole."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) < 4000
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    assert error["message"].strip()
    return error


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": ["x", ""]}, "prompt", "invalid_value"),
        ({"prompt": ["x", 1]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_value"),
        ({"prompt": ["x"] * 1025}, "prompt", "invalid_value"),
        ({"prompt": ["x"] * 513, "n": 2}, "prompt", "invalid_value"),
        ({"prompt": [258]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [10**30]}, "prompt", "invalid_value"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 600}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x" * 513}, "prompt", "context_length_exceeded"),
        ({"min_tokens": 17}, "min_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", "request_too_large"),
        ({"n": 10**9}, "n", "invalid_value"),
        ({"best_of": 3, "n": 4}, "best_of", "invalid_value"),
        ({"best_of": 0}, "best_of", "invalid_value"),
        ({"best_of": 10**9}, "best_of", "invalid_value"),
        ({"best_of": 2, "stream": True}, "best_of", "invalid_value"),
        ({"prompt": ["x"] * 513, "best_of": 2}, "prompt", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"stop": ""}, "stop.0", "invalid_value"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": "x" * 2000}, "stop.0", "invalid_value"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "invalid_value"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": -1}, "logprobs", "invalid_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "invalid_value"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "invalid_value"),
        ({"guided_choice": ["a", "a"]}, "guided_choice", "invalid_value"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [97, 98], "bad_words": ["a", "b"]}, "allowed_token_ids", "invalid_value"),
        ({"bad_words": [""]}, "bad_words.0", "invalid_value"),
        ({"bad_words": ["x"] * 513}, "bad_words", "invalid_value"),
        ({"bad_words": ["x" * 1000] * 9}, "bad_words", "invalid_value"),
        ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words", "invalid_value"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids", "invalid_value"),
        ({"beam_width": 2}, "beam_width", "unsupported_parameter"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty", "invalid_value"),
        ({"use_beam_search": True, "early_stopping": "often"}, "early_stopping", "invalid_value"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "invalid_value"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias", "invalid_value"),
        ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty", "invalid_value"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "invalid_value"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of", "invalid_value"),
        ({"use_beam_search": True, "n": 20}, "n", "request_too_large"),
        ({"use_beam_search": True, "best_of": 20}, "best_of", "request_too_large"),
        ({"use_beam_search": True, "structured_outputs": {"regex": "a+"}}, "use_beam_search", "invalid_value"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "unsupported_parameter"),
    ],
)
def test_a_completion_that_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    body = fields if "prompt" in fields or not fields else {**TEXT, **fields}
    error = error_of(http.post(COMPLETIONS, json=body), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing_required_parameter"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:,"}]}]},
            "messages",
            "unsupported_parameter",
        ),
        *[
            ({"messages": [{"role": "assistant", name: value}]}, f"messages.0.{name}", "unsupported_parameter")
            for name, value in (("function_call", {"name": "f"}), ("refusal", "no"), ("audio", {"id": "a"}))
        ],
        ({"messages": [{"role": "user", "text": "hello"}]}, "messages.0", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content", "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 512}]}, "messages", "context_length_exceeded"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 600}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing_required_parameter"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}, {"type": "custom"}]}, "tools", "unsupported_parameter"),
        ({"tools": [TOOL | {"function": {"name": "a b"}}]}, "tools.0.function.name", "invalid_value"),
        (
            {"tools": [TOOL | {"function": {"name": "a", "parameters": []}}]},
            "tools.0.function.parameters",
            "invalid_type",
        ),
        (
            {"tools": [TOOL | {"function": {"name": "a", "parameters": {"type": "string"}}}]},
            "tools.0.function",
            "invalid_value",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tools": [TOOL | {"strict": True}]}, "tools.0.strict", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "b"}}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs", "invalid_value"),
        (
            {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "invalid_value",
        ),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "invalid_value"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "invalid_value"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
        ({"functions": [{}]}, "functions", "unsupported_parameter"),
        ({"n": 2, "best_of": 2}, "best_of", "unsupported_parameter"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ({"audio": {"voice": "a"}}, "audio", "unsupported_parameter"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"continue_final_message": True, "messages": [*HELLO["messages"], CALLED]},
            "continue_final_message",
            "invalid_value",
        ),
    ],
)
def test_a_conversation_that_cannot_be_is_a_400_that_names_the_field(
    http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    error = error_of(http.post(CHAT, json={**HELLO, **fields}), 400)
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("path", "raw", "message"),
    [
        (CHAT, "[]", "Input should be an object, not a list"),
        (CHAT, " ", "The body is empty; send a JSON object."),
        (CHAT, '{"messages": []}', "messages: List should have at least 1 item, not 0"),
        (CHAT, '{"messages": "hi"}', "messages: Input should be a valid list, not a string"),
        (CHAT, '{"messages": [{"content": 5, "role": "user"}]}', "messages.0.content: " + TEXT_OR_LIST),
        (CHAT, '{"messages": [{"content": "x", "role": "user"}], "stop": 5}', "stop: " + TEXT_OR_LIST),
        ("/v1/responses", '{"input": 5}', "input: " + TEXT_OR_LIST),
        (CHAT, '{"messages": [5]}', "messages.0: Input should be an object, not 5"),
        (CHAT, '{"mesages": []}', "messages: Field required; mesages was sent instead"),
        (CHAT, '{"prompt": "x"}', "messages: Field required; prompt was sent instead"),
        (CHAT, '{"model": "parrot"}', "messages: Field required"),
        (COMPLETIONS, '{"messages": []}', "prompt: Field required; messages was sent instead"),
        (
            COMPLETIONS,
            '{"prompt": "x", "max_tokens": "5"}',
            "max_tokens: Input should be a valid integer, not a string",
        ),
    ],
)
def test_a_body_of_the_wrong_form_is_a_plain_sentence(http: httpx.Client, path: str, raw: str, message: str) -> None:
    error = error_of(http.post(path, content=raw, headers={"content-type": "application/json"}), 400)
    assert error["message"] == message


def test_a_chat_that_is_too_long_names_its_messages(http: httpx.Client) -> None:
    fields = {"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 5}
    assert error_of(http.post(CHAT, json=fields), 400)["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completion", "; did you mean /v1/chat/completions?"),
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/completions", "; did you mean /v1/completions?"),
        ("/models/", "; did you mean /v1/models?"),
        ("/v1/v1/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/model", "; did you mean /v1/models?"),
        ("/docs", ". docs/reference/api.md lists the routes."),
        ("/" + "a/" * 5000, ". docs/reference/api.md lists the routes."),
    ],
)
def test_a_path_that_is_not_served_names_the_nearest(http: httpx.Client, path: str, hint: str) -> None:
    assert error_of(http.post(path, json={}), 404)["message"].endswith(f" here{hint}")


def test_a_misspelt_field_is_logged_with_the_one_that_was_meant(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    answer = http.post(CHAT, json={**HELLO, "max_token": 3, "zzz": 1})
    assert answer.headers["x-quire-ignored-fields"] == "max_token, zzz"
    assert "ignored fields: max_token, zzz. Did you mean max_tokens for max_token?" in caplog.text


def test_the_context_length_is_told_with_its_numbers(http: httpx.Client) -> None:
    message = error_of(http.post(COMPLETIONS, json={"prompt": "x" * 500, "max_tokens": 20}), 400)["message"]
    assert all(number in message for number in ("512", "520", "500", "20"))


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"{'prompt': 1}", b'{"prompt": "x"} trailing', b"[" * 100_000,
        b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": "x\\udc00y"}', b'{"prompt": "x", "stop": "\\ud83d"}',
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "top_p": -Infinity}', b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "max_tokens": ' + b"9" * 4300 + b"}", b'{"prompt": [' + b"9" * 4300 + b"]}",
        b'{"prompt": "x", "min_tokens": ' + b"9" * 4300 + b"}", b'{"prompt": "x", "logprobs": ' + b"9" * 4300 + b"}",
        b'{"prompt": "x", "logit_bias": {"1": NaN}}', b'{"\\ud800": 1, "prompt": "x"}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_request(http: httpx.Client, raw: bytes) -> None:
    error = error_of(http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"}), 400)
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 2561}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", "x" * 2561]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2561}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 2561}, "prompt"),
    ],
)
def test_a_text_that_cannot_fit_whatever_its_tokens_are_is_refused_before_it_is_encoded(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(http.post(path, json=fields), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert all(number in error["message"] for number in ("512 tokens", "2560 characters", "has 256"))
    assert http.post("/tokenize", json={"prompt": "x" * 2560}).json()["count"] == 2560


def test_a_value_out_of_range_is_told(http: httpx.Client) -> None:
    for value, shown in ((3, "3"), (-0.5, "-0.5"), (True, "true")):
        error = error_of(http.post(COMPLETIONS, json={**TEXT, "temperature": value}), 400)
        assert error["message"].startswith("temperature: ")
        assert error["message"].endswith(f", not {shown}")


def test_a_compressed_body_is_refused_by_name(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error = error_of(http.post(COMPLETIONS, content=gzip.compress(json.dumps(TEXT).encode()), headers=headers), 400)
    assert error["code"] == "unsupported_media_type"
    assert "gzip" in error["message"]


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = http.post(COMPLETIONS, content=json.dumps(TEXT), headers={"content-type": media_type})
        assert error_of(response, 400)["code"] == "unsupported_media_type"


def test_a_byte_order_mark_is_passed_over(http: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    for text, status in ((json.dumps(TEXT), 200), ("", 400)):
        assert http.post(COMPLETIONS, content=b"\xef\xbb\xbf" + text.encode(), headers=json_type).status_code == status


def test_a_long_list_of_faults_is_told_in_short(http: httpx.Client) -> None:
    messages = [{"role": "x" * 10_000, "content": index} for index in range(1000)]
    message = error_of(http.post(CHAT, json={"messages": messages}), 400)["message"]
    assert "messages.0.role" in message
    assert "messages.1" not in message
    fields = (
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "n",
        "user",
        "stream",
        "stop",
    )
    faults: dict[str, Any] = {name: {} for name in (*fields, "cache_salt")}
    assert "and 2 more" in error_of(http.post(CHAT, json={**HELLO, **faults}), 400)["message"]


def test_unknown_models_routes_and_methods(http: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, TEXT), (CHAT, HELLO), ("/tokenize", {"prompt": "x"})):
        error = error_of(http.post(path, json={**body, "model": "gpt-9"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "parrot" in error["message"]
    assert error_of(http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert error_of(http.post("/v1/images/generations", json={}), 404)["code"] == "not_found"
    assert error_of(http.get("/v1/" + "x" * 5000), 404)["code"] == "not_found"
    response = http.get(COMPLETIONS)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "GET is not allowed on /v1/completions; use POST."


def test_a_body_too_large_is_refused_announced_or_not(serve: Serve) -> None:
    live = serve(max_body_bytes=1000)
    big = json.dumps({"prompt": "x" * 2000}).encode()
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=live.url) as http:
        assert error_of(http.post(COMPLETIONS, content=big, headers=headers), 413)["code"] == "request_too_large"
        pieces = (big[start : start + 100] for start in range(0, len(big), 100))
        assert error_of(http.post(COMPLETIONS, content=pieces, headers=headers), 413)["code"] == "request_too_large"
        assert http.post(COMPLETIONS, json=TEXT).status_code == 200


TOOLS = [TOOL, {"type": "web_search"}, {"type": "custom", "custom": {"name": "a"}}]
HINTS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"priority": 1}, "priority"),
    (COMPLETIONS, {"length_penalty": 2.0}, "length_penalty"),
    (COMPLETIONS, {"early_stopping": "never"}, "early_stopping"),
    (COMPLETIONS, {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    (COMPLETIONS, {"stream_interval": 4}, "stream_interval"),
    (COMPLETIONS, {"thinking_token_budget": 5}, "thinking_token_budget"),
    (COMPLETIONS, {"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    (COMPLETIONS, {"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"enable_thinking": True}, "enable_thinking"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"tools": TOOLS, "tool_choice": "none"}, "tools.custom, tools.web_search"),
    ("/v1/embeddings", {"input": "x", "priority": 1}, "priority"),
    ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ("/v1/responses", {"input": "x", "reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ("/v1/responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("/v1/responses", {"input": "x", "priority": 1, "stream_options": {}}, "priority, stream_options"),
    ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 3, "priority": 1}, "priority"),
    ("/v1/responses", {"input": "x", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ("/v1/responses", {"input": "x", "include": ["reasoning.encrypted_content", "all"]}, "include.all"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{**PART, "cache_control": {}}] * 2, "name": "of the template"}]},
        "messages.content.cache_control",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": CALLS}], "tools": [{**TOOLS[0], "x": 1}]},
        "messages.tool_calls.x",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}], "phase": "z", "status": "?"}
            ]
        },
        "input.content.y, input.phase",
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{**PART, "citations": [], "x": 1}], "y": 1}], "max_tokens": 3},
        "messages.y, messages.content.x",
    ),
    (
        "/v1/messages",
        {**HELLO, "max_tokens": 3, "tools": [{"name": "a", "input_schema": {}, "input_examples": [{}]}]},
        "tools.input_examples",
    ),
    ("/v1/responses", {"input": "x", "context_management": [{"type": "compaction"}]}, "context_management"),
]


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    with Live(strict_fields=True).serving() as live:
        yield live


@pytest.mark.parametrize(("path", "fields", "names"), HINTS)
def test_a_hint_that_cannot_be_followed_is_dropped_and_named(
    live: Live, strict: Live, path: str, fields: dict[str, Any], names: str
) -> None:
    """And refused by that name where fields without effect are."""
    body = {COMPLETIONS: {**TEXT, **fields}, CHAT: {**HELLO, **fields}}.get(path, fields)
    response = httpx.post(live.url + path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-quire-ignored-fields"] == names
    refused = httpx.post(strict.url + path, json=body)
    assert refused.status_code == 400
    assert f"Fields without effect: {names};" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "functions": []},
        {"tools": [], "tool_choice": "auto"},
        {"tool_choice": "auto"},
        {"tools": [], "response_format": {"type": "json_object"}},
        {"top_logprobs": 0},
        {"verbosity": "medium"},
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"priority": 0, "length_penalty": 1.0},
    ],
)
def test_what_asks_for_nothing_is_taken_without_a_word(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = http.post(CHAT, json={**HELLO, **fields})
    assert response.status_code == 200, response.text
    assert "x-quire-ignored-fields" not in response.headers


def test_answers_are_taken_back_whole(strict: Live) -> None:
    """Where fields without effect are refused."""
    with httpx.Client(base_url=strict.url) as http:
        said = http.post("/v1/responses", json={"input": "x", "include": ["message.output_text.logprobs"]}).json()
        items = [{"role": "user", "content": "x"}, *said["output"], {"role": "user", "content": "y"}]
        assert http.post("/v1/responses", json={"input": items}).status_code == 200
        block = http.post("/v1/messages", json={**HELLO, "max_tokens": 3}).json()
        turns = [*HELLO["messages"], {"role": "assistant", "content": block["content"]}, *HELLO["messages"]]
        assert http.post("/v1/messages", json={"messages": turns, "max_tokens": 3}).status_code == 200
        message = http.post(CHAT, json=HELLO).json()["choices"][0]["message"]
        assert http.post(CHAT, json={"messages": [*HELLO["messages"], message]}).status_code == 200


def test_a_field_that_nobody_knows_is_told(live: Live, http: httpx.Client) -> None:
    response = http.post(CHAT, json={**HELLO, "frobnicate": 1, "naïve\r\nx-evil": 2, "user": "me"})
    assert response.status_code == 200
    assert response.headers["x-quire-ignored-fields"] == r"frobnicate, na\xefve\r\nx-evil"
    assert "x-evil" not in response.headers
    assert 'quire_ignored_fields_total{field="frobnicate"} 1.0' in http.get("/metrics").text


def test_of_many_unknown_fields_the_rest_is_counted(http: httpx.Client) -> None:
    unknown = {f"field{number:02}": number for number in range(25)}
    response = http.post(COMPLETIONS, json={**TEXT, **unknown})
    assert response.headers["x-quire-ignored-fields"] == ", ".join([*sorted(unknown)[:20], "and 5 more"])


def test_strict_fields_refuses_it(serve: Serve) -> None:
    live = serve(strict_fields=True)
    options = {"stream": True, "stream_options": {"includ_usage": True}}
    for fields, name in (({"frobnicate": 1}, "frobnicate"), (options, "stream_options.includ_usage")):
        error = error_of(httpx.post(live.url + COMPLETIONS, json={**TEXT, **fields}), 400)
        assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert httpx.post(live.url + COMPLETIONS, json={**TEXT, "user": "me"}).status_code == 200


@pytest.mark.parametrize("fields", [{"tokens": [999]}, {"tokens": "x"}, {}])
def test_detokenize_refuses_what_is_no_token(http: httpx.Client, fields: dict[str, Any]) -> None:
    error_of(http.post("/detokenize", json=fields), 400)


@pytest.mark.parametrize("fields", [{}, {"prompt": "x", **HELLO}])
def test_tokenize_wants_one_of_two(http: httpx.Client, fields: dict[str, Any]) -> None:
    error_of(http.post("/tokenize", json=fields), 400)


def exchange(live: Live, *pieces: bytes) -> tuple[bytes, dict[str, Any]]:
    """The status line and the error of what is answered to raw bytes, after which the server hangs up."""
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"BREW /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: abc\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_answered_in_the_envelope(live: Live, raw: bytes) -> None:
    status, error = exchange(live, raw)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert error["code"] == "invalid_http"


def test_a_head_without_end_is_refused(live: Live, http: httpx.Client) -> None:
    status, error = exchange(live, b"GET /health HTTP/1.1\r\nx-endless: " + b"a" * 60_000, b"a" * 6_000)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert error["code"] == "headers_too_large"
    for _ in range(3):  # what counts is one head, not all of a connection's
        assert http.get("/health", headers={"x-long": "a" * 30_000}).status_code == 200


def test_an_unknown_upgrade_is_passed_over_in_silence(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"connection": "Upgrade", "upgrade": "websocket"}
    assert httpx.get(live.url + "/health", headers=headers).status_code == 200
    body = json.dumps(TEXT).encode()
    headers |= {"upgrade": "h2c", "content-type": "application/json"}  # as Java's client sends each request
    with httpx.Client(base_url=live.url, headers=headers) as http:
        for content in (body, iter([body[:5], body[5:]]), body):
            assert http.post(COMPLETIONS, content=content).status_code == 200
        assert error_of(http.post(COMPLETIONS), 400)["message"].startswith("The body is empty")
    assert {record.levelname for record in caplog.records} <= {"INFO"}
