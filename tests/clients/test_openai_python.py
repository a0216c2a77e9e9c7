"""OpenAI's client for Python and a real model: structured answers, tools, cancellation. Errors: tests/http/test_openai_sdk.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

MODEL = "smol"
QUESTION: Any = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0}
ENDLESS: Any = {**GREEDY, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}


class City(BaseModel):
    name: str
    continent: Literal["Asia", "Europe"]
    is_capital: bool


class Weather(BaseModel):
    """Tell the weather of the coming days."""

    city: str
    days: int


TOOL = openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture(scope="module")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_is_the_same_in_every_way_to_ask(client: openai.OpenAI) -> None:
    ask = {**GREEDY, "max_tokens": 12}
    text = client.chat.completions.create(**ask).choices[0].message.content
    assert text
    stream = client.chat.completions.create(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    with client.chat.completions.stream(**ask) as helper:
        assert helper.get_final_completion().choices[0].message.content == text
    raw = client.chat.completions.with_raw_response.create(**ask)
    assert raw.parse().choices[0].message.content == text
    with client.chat.completions.with_streaming_response.create(**ask, stream=True) as lines:
        assert lines.headers["x-request-id"]
        assert [line for line in lines.iter_lines() if line][-1] == "data: [DONE]"


def test_words_are_ruled_out_of_streams(client: openai.OpenAI) -> None:
    """Each choice of a stream, and before the host knows the last token."""
    ask = {**GREEDY, "max_tokens": 12, "n": 2, "stream": True}
    texts = ["", ""]
    for chunk in client.chat.completions.create(**ask, extra_body={"bad_words": ["Tokyo", "The capital"]}):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert all(texts)
    assert not any(word in text for word in ("Tokyo", "The capital") for text in texts)
    with pytest.raises(openai.BadRequestError, match="allow more"):
        client.chat.completions.create(**GREEDY, extra_body={"allowed_token_ids": [504], "bad_words": ["The"]})


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**GREEDY, response_format=City, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, City)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**GREEDY, response_format=City, max_tokens=3)


def test_the_stream_helper_parses_while_it_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        **GREEDY, response_format=City, max_tokens=200, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    parsed = [event.parsed for event in events if event.type == "content.delta"]
    assert parsed[-1] == final.choices[0].message.parsed.model_dump()
    assert {"content.done", "logprobs.content.delta", "logprobs.content.done"} <= {event.type for event in events}
    assert len(final.choices[0].logprobs.content) == final.usage.completion_tokens


def test_a_conversation_with_a_tool(client: openai.OpenAI) -> None:
    ask: Any = {**GREEDY, "tools": [TOOL], "max_tokens": 200}
    answer = client.chat.completions.parse(**ask, tool_choice="required", parallel_tool_calls=False)
    choice = answer.choices[0]
    call = choice.message.tool_calls[0]
    assert choice.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Weather)
    told = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    ask["messages"] = [*QUESTION, choice.message, told]
    assert client.chat.completions.create(**ask).choices[0].message.role == "assistant"


def test_a_streamed_call_comes_in_pieces(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(**GREEDY, tools=[TOOL], tool_choice=named, max_tokens=200) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    call = final.message.tool_calls[0].function
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == json.loads(call.arguments)
    assert isinstance(call.parsed_arguments, Weather)


async def test_many_at_once_and_one_that_is_cancelled(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        endless = asyncio.create_task(client.chat.completions.create(**ENDLESS))
        ask = {**GREEDY, "max_tokens": 8}
        answers = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(6)))
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        await _until_idle(base_url)


async def test_who_waits_no_longer_costs_nothing(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**ENDLESS)
        await _until_idle(base_url)


async def _until_idle(base_url: str) -> None:
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1")) as http:
        for _ in range(10_000):
            if (await http.get("/load")).json() == {"server_load": 0}:
                return
            await asyncio.sleep(0.01)
    raise AssertionError("a request that nobody waits for is still open")
