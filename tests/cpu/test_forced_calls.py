"""Calls that must be made are made: whatever the seed, SmolLM2 writes nothing but calls whose arguments are valid."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import pytest

from engine.build import build_engine
from engine.core.config import EngineConfig
from server.app import create_app
from server.app_config import AppConfig
from server.model_source import find_model
from server.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
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
def app() -> Any:
    source = find_model(None)
    engine = build_engine(EngineConfig(model=source.path, max_model_len=512, max_num_seqs=16), lambda _: None)
    return create_app(engine, load_tokenizer(source.path), AppConfig(model=source.path, served_model_names=("small",)))


async def ask(app: Any, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", timeout=300) as client,
    ):
        answers = await asyncio.gather(*(client.post(PATH, json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * len(bodies), answers[0].text
    return [answer.json()["choices"][0] for answer in answers]


def test_every_forced_call_validates(app: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "How is Rome?"}], "tools": TOOLS, "max_tokens": 72}
    named = {"type": "function", "function": {"name": "paint"}}
    choices = asyncio.run(
        ask(
            app,
            [
                {**asked, "seed": seed, "tool_choice": "required", "parallel_tool_calls": seed % 10 == 0}
                for seed in range(20)
            ]
            + [{**asked, "seed": seed, "tool_choice": named} for seed in range(4)],
        )
    )
    finished = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert len(finished) > 18
    for choice in finished:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert all(choice["message"]["tool_calls"][0]["function"]["name"] == "paint" for choice in choices[20:])
    assert {call["function"]["name"] for choice in choices for call in choice["message"]["tool_calls"]} > {"paint"}
