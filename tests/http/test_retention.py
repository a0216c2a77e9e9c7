"""Prompts that clients, or the operator, want to stay cached: what is asked, and what is told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.http.harness import CONFIG, Live

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(140))
PINNING = replace(CONFIG, pinned_share=0.25)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(config=PINNING, template=TEMPLATE, tool_call_parser="hermes").serving() as served:
        yield served


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "parrot", "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def scan(http: httpx.Client) -> None:
    """More of the pool than there is, of prompts that have nothing in common."""
    for index in range(12):
        post(http, "/v1/completions", prompt=[(index * 37 + i * i) % 256 for i in range(480)])


@pytest.mark.parametrize("fields", [{"prompt_cache_retention": "24h"}, {"prompt_cache_options": {"ttl": "30m"}}])
def test_a_prompt_is_retained_and_told(http: httpx.Client, fields: dict[str, Any]) -> None:
    asked = [len(str(fields)), *range(99)]
    details = post(http, "/v1/completions", prompt=asked, **fields)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "pinned_tokens": 96}
    scan(http)
    details = post(http, "/v1/completions", prompt=asked)["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 96}
    assert pinned_blocks(http.get("/metrics").text) >= 6


def test_what_retains_nothing(http: httpx.Client) -> None:
    for fields in (
        {"prompt_cache_retention": "in_memory"},
        {"prompt_cache_retention": "in-memory"},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"prompt_cache_options": {"mode": "implicit"}},
    ):
        answer = post(http, "/v1/completions", prompt=[7] * 40, **fields)
        assert "pinned_tokens" not in answer["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_retention": "1h"},
        {"prompt_cache_options": {"ttl": "1h"}},
        {"prompt_cache_options": "24h"},
    ],
)
def test_what_is_no_time(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"model": "parrot", "prompt": "x", **fields})
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["error"]["param"]


def test_responses_pass_it_on(http: httpx.Client) -> None:
    body = {"model": "parrot", "input": SYSTEM[::-1], "max_output_tokens": 16, "prompt_cache_retention": "24h"}
    before = http.get("/metrics").text
    assert http.post("/v1/responses", json=body).status_code == 200
    assert pinned_blocks(http.get("/metrics").text) > pinned_blocks(before)


def pinned_blocks(metrics: str) -> float:
    return next(
        float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("quire_pinned_blocks") and "pool" in line
    )


CONTROL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_cache_control_retains_up_to_its_block(http: httpx.Client) -> None:
    words = [f"{name}{SYSTEM[:60]}" for name in "pqr"]
    messages = [
        {"role": "user", "content": [text(words[0])]},
        {"role": "assistant", "content": [text(words[1], **CONTROL)]},
        {"role": "user", "content": [text(words[2] + "q" * 100)]},
    ]
    usage = post(http, "/v1/messages", system=[text("m" + SYSTEM, **HOUR)], messages=messages)["usage"]
    prompt = f"<system>m{SYSTEM}<user>{words[0]}<assistant>{words[1]}<user>"
    retained = len(prompt) // 16 * 16
    whole = len(prompt) + len(words[2]) + 100 + len("<assistant>")
    assert usage["cache_creation_input_tokens"] == retained
    assert usage["cache_read_input_tokens"] == 0
    assert usage["input_tokens"] == whole - retained
    scan(http)
    usage = post(http, "/v1/messages", system=[text("m" + SYSTEM, **HOUR)], messages=messages)["usage"]
    assert usage["cache_read_input_tokens"] == retained
    assert usage["cache_creation_input_tokens"] == 0


def test_cache_control_within_a_message_retains_no_more_than_up_to_its_block(http: httpx.Client) -> None:
    first, second = f"u{SYSTEM}", "v" * 90
    messages = [{"role": "user", "content": [text(first, **CONTROL), text(second)]}, {"role": "assistant", "content": "x"},
                {"role": "user", "content": "y"}]  # fmt: skip
    usage = post(http, "/v1/messages", messages=messages)["usage"]
    assert usage["cache_creation_input_tokens"] == len(f"<user>{first}") // 16 * 16
    system = [text(f"w{SYSTEM}", **CONTROL), text(second)]
    usage = post(http, "/v1/messages", system=system, messages=messages[2:])["usage"]
    assert usage["cache_creation_input_tokens"] == len(f"<system>w{SYSTEM}") // 16 * 16


def test_cache_control_within_what_a_tool_gave(http: httpx.Client) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text(f"k{SYSTEM}", **CONTROL), text("v" * 90)]}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        {"role": "user", "content": [result, text("y")]},
    ]
    usage = post(http, "/v1/messages", messages=messages)["usage"]
    assert usage["cache_creation_input_tokens"] == len(f"<user>q<assistant>look<tool>k{SYSTEM}") // 16 * 16


def test_what_nobody_knows_in_a_mark_is_told(http: httpx.Client) -> None:
    mark = {"cache_control": {"type": "ephemeral", "colour": 1}}
    messages = [{"role": "user", "content": [text("x", **mark), text("y", **mark)]}]
    body = {"model": "parrot", "max_tokens": 1, "messages": messages, **mark}
    told = http.post("/v1/messages", json=body).headers["x-quire-ignored-fields"]
    assert sorted(told.replace(" ", "").split(",")) == ["cache_control.colour", "messages.content.cache_control.colour"]


@pytest.mark.parametrize("where", ["top", "tool", "last"])
def test_cache_control_wherever_it_stands(http: httpx.Client, where: str) -> None:
    mark = {name: CONTROL if name == where else {} for name in ("top", "tool", "last")}
    tool = {"name": f"look_up_{where}" + "x" * 40, "input_schema": {"type": "object"}, **mark["tool"]}
    messages = [{"role": "user", "content": [text(SYSTEM, **mark["last"])]}]
    usage = post(http, "/v1/messages", system="s", tools=[tool], messages=messages, **mark["top"])["usage"]
    whole = len(f"{tool['name']}<system>s<user>{SYSTEM}<assistant>")
    beginning = len(f"{tool['name']}<system>s<user>") if where == "tool" else whole
    assert usage["cache_creation_input_tokens"] == beginning // 16 * 16


def test_a_mark_that_is_none(http: httpx.Client) -> None:
    body = {"model": "parrot", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    answer = http.post("/v1/messages", json={**body, "cache_control": {"type": "ephemeral", "ttl": "2h"}})
    assert answer.status_code == 400
    assert "cache_control" in answer.json()["error"]["message"]
