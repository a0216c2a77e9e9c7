"""Calls that must be made are made: whatever the seed, SmolLM2 writes nothing but calls whose arguments are valid."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from engine.core.types import TagIds
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.startup.build import build_engine
from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.limits import ModelLimits
from engine.text.fields.chat import ChatFields
from engine.text.reasoning import ReasoningTags
from engine.text.requests.chat_preprocessor import ChatPreprocessor, PreparedChat
from engine.text.tokenizer_files import load_tokenizer
from engine.text.tools.formats import TOOL_FORMATS
from engine.text.tools.section_calls import KIMI_K2
from server.answers.model import ServedModel
from server.app import create_app
from server.settings.app_config import AppConfig

PATH, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Paris"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
PAINT = {
    "type": "object",
    "properties": {"colour": {"$ref": "#/$defs/colour"}, "coats": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["colour"],
    "$defs": {"colour": {"type": "string", "pattern": "^[a-f0-9]{6}$"}},
}  # fmt: skip
SCHEMAS = {"weather": WEATHER, "paint": PAINT, "stop": {"type": "object", "maxProperties": 0}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "paint", "parameters": PAINT}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    source = find_model(None)
    engine = build_engine(
        EngineConfig(model=source.path, max_model_len=640, max_num_seqs=24, kv_cache_memory_bytes=64 << 20),
        lambda _: None,
    )
    app = create_app(engine, load_tokenizer(source.path), AppConfig(model=source.path, served_model_names=("small",)))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def ask(client: TestClient, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers, in order, to requests that run together."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(
            threads.map(lambda body: client.post(COMPLETIONS if "prompt" in body else PATH, json=body), bodies)
        )
    assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[0].text
    return [answer.json() for answer in answers]


def test_every_forced_call_validates(client: TestClient) -> None:
    asked = {"messages": [{"role": "user", "content": "How is Rome?"}], "tools": TOOLS, "max_tokens": 72}
    named = {"type": "function", "function": {"name": "paint"}}
    bodies = [
        {**asked, "seed": seed, "tool_choice": "required", "parallel_tool_calls": seed % 5 == 0} for seed in range(10)
    ]
    bodies += [{**asked, "seed": seed, "tool_choice": named} for seed in range(2)]
    answers = ask(client, bodies)
    choices = [answer["choices"][0] for answer in answers]
    finished = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert len(finished) > 8
    for choice in finished:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert all(choice["message"]["tool_calls"][0]["function"]["name"] == "paint" for choice in choices[10:])
    assert {call["function"]["name"] for choice in choices for call in choice["message"]["tool_calls"]} > {"paint"}


def test_thoughts_keep_their_budget_and_a_grammar_waits_for_their_end(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 does not reason: two of its tokens play the tags, and it is taken to begin within them."""
    model: ServedModel = client.app.state.models.loaded[0].model  # type: ignore[attr-defined]
    tags = ReasoningTags(name="played", opening="<file_sep>", closing="<jupyter_text>", always=True)
    special = model.tokenizer.special_tokens
    chat_format = ChatFormat(
        tags=tags,
        tag_ids=TagIds(special[tags.opening], special[tags.closing]),
        hidden_ids=frozenset(special.values()) - {special[tags.opening], special[tags.closing]},
    )
    monkeypatch.setattr(model, "preprocessor", ChatPreprocessor(replace(model.limits, chat_format=chat_format)))
    asked = {"messages": [{"role": "user", "content": "How is Rome?"}], "max_tokens": 60, "temperature": 0}
    forced = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**WEATHER, "additionalProperties": False}}}
    bodies = [{**asked, "thinking_token_budget": budget} for budget in (0, 5)]
    bodies += [{**asked, "thinking_token_budget": 7, **forced}]
    bodies += [{**asked, "reasoning_effort": "none", "response_format": schema}, asked]
    bodies += [{"prompt": "Rome or Oslo?", "structured_outputs": {"choice": ["Rome", "Oslo"]}}]  # in the same batch
    *answers, chosen = ask(client, bodies)
    spent = [answer["usage"]["completion_tokens_details"]["reasoning_tokens"] for answer in answers]
    assert spent == [1, 6, 8, 1, 60]  # the closing tag counts; without a budget nobody closes
    messages = [answer["choices"][0]["message"] for answer in answers]
    assert "reasoning" not in messages[0]
    assert messages[4]["content"] is None
    assert messages[4]["reasoning"].startswith(messages[1]["reasoning"])
    jsonschema.validate(json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]), WEATHER)
    jsonschema.validate(json.loads(messages[3]["content"]), WEATHER)
    assert chosen["choices"][0]["text"] in ("Rome", "Oslo")


def test_an_answer_with_a_schema_may_be_a_call_instead(client: TestClient) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"$ref": "#/$defs/n", "$defs": {"n": {"enum": ["sun", "rain"]}}}},
    }
    asked = {"messages": [{"role": "user", "content": "Weather in Rome?"}], "max_tokens": 72, "response_format": schema}
    bodies = [
        {**asked, "tools": TOOLS[:1], "parallel_tool_calls": False, "temperature": 2, "seed": seed}
        for seed in range(12)
    ]
    bodies += [{**body, "tool_choice": "required"} for body in bodies[:1]]
    choices = [answer["choices"][0] for answer in ask(client, bodies)]
    kinds = [choice["finish_reason"] for choice in choices]
    assert set(kinds) == {"stop", "tool_calls"}
    assert kinds[-1] == "tool_calls"
    for choice in choices:
        message = choice["message"]
        if message["content"] is None:
            jsonschema.validate(json.loads(message["tool_calls"][0]["function"]["arguments"]), WEATHER)
        else:
            assert json.loads(message["content"]) in ("sun", "rain")


# Four of SmolLM2's special tokens play Kimi's marks.
PLAYED = {
    "openings": ("<repo_name>",),
    "section_end": "<reponame>",
    "call": ("<file_sep>", "<filename>"),
    "inner": ("<gh_stars>",),
}
FORMATS = {
    "played": dataclasses.replace(
        KIMI_K2, header=KIMI_K2.header.replace(r"<\|tool_call_argument_begin\|>", "<gh_stars>"),
        written=("functions.{name}:", "{number}", "<gh_stars>"), **PLAYED,
    ),
    **{name: TOOL_FORMATS[name] for name in ("glm45", "qwen3_coder", "granite", "pythonic", "olmo3")},
}  # fmt: skip


class EachFormat(ChatPreprocessor):
    """Prepares a request in the format with the number of its seed."""

    def __init__(self, limits: ModelLimits) -> None:
        super().__init__(limits)
        special = limits.tokenizer.special_tokens
        self._each = []
        for tool_format in FORMATS.values():
            hidden = frozenset(token_id for mark, token_id in special.items() if mark not in tool_format.markup)
            chat_format = ChatFormat(tool_format=tool_format, shows_tools=True, hidden_ids=hidden)
            self._each.append(ChatPreprocessor(replace(limits, chat_format=chat_format)))

    def prepare(self, chat: ChatFields, *rest: Any) -> PreparedChat:  # type: ignore[override]
        return self._each[chat.seed or 0].prepare(chat, *rest)


def test_calls_are_forced_in_the_format_of_any_family(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    model: ServedModel = client.app.state.models.loaded[0].model  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "preprocessor", EachFormat(model.limits))
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {
        "messages": [{"role": "user", "content": "How is Rome?"}],
        "tools": [TOOLS[0], TOOLS[2]],
        "max_tokens": 70,
        "parallel_tool_calls": False,
    }
    bodies = [
        {**asked, "seed": seed, "tool_choice": choice} for seed in range(len(FORMATS)) for choice in ("required", named)
    ]
    choices = [answer["choices"][0] for answer in ask(client, bodies)]
    for index, choice in enumerate(choices):
        name, message = list(FORMATS)[index // 2], choice["message"]
        [call] = message["tool_calls"]
        assert (choice["finish_reason"], message["content"]) == ("tool_calls", None), (name, message)
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
        assert call["id"].startswith("functions." if name == "played" else "call_")
        assert call["function"]["name"] == "weather" or not index % 2


def spoiled_turn(city: str, days: int) -> list[dict[str, Any]]:
    """A turn with a call that the schema forbids, for the model to imitate."""
    arguments = json.dumps({"city": city, "days": days, "unit": "C"})
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": f"How is {city} for {days} days?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "Sunny."},
        {"role": "assistant", "content": "Sunny."},
    ]


def is_valid(call: dict[str, str]) -> bool:
    if call["name"] not in SCHEMAS:
        return False
    try:
        jsonschema.validate(json.loads(call["arguments"]), {**SCHEMAS[call["name"]], "additionalProperties": False})
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_a_strict_tool_is_called_rightly_where_calling_is_the_models_choice(client: TestClient) -> None:
    messages = [*spoiled_turn("Berlin", 30), *spoiled_turn("Madrid", 12)]
    asked = {
        "messages": [*messages, {"role": "user", "content": "How is London for 40 days?"}],
        "max_tokens": 64,
        "temperature": 0.7,
    }
    weather = {"name": "weather", "parameters": WEATHER}
    bodies = [
        {**asked, "seed": seed, "tools": [{"type": "function", "function": {**weather, "strict": strict}}, TOOLS[2]]}
        for strict in (True, False)
        for seed in range(12)
    ]
    choices = [answer["choices"][0] for answer in ask(client, bodies)]
    strict, free = (
        [
            is_valid(call["function"])
            for choice in some
            if choice["finish_reason"] != "length"
            for call in choice["message"].get("tool_calls", [])
        ]
        for some in (choices[:12], choices[12:])
    )
    assert len(strict) >= 3
    assert all(strict)
    assert not all(free)  # the same model without the grammar
    assert {choice["finish_reason"] for choice in choices[:12]} >= {"stop", "tool_calls"}  # words stay possible
