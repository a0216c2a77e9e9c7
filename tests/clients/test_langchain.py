"""LangChain's ChatOpenAI: answers, streams, tools, structured output by each of its three methods."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.filterwarnings("ignore")  # its own, of versions to come
QUESTION = "What is the capital of Japan?"


class City(BaseModel):
    """A city and where it is."""

    city: str
    country: str


def make(base_url: str, **others: Any) -> Any:
    from langchain_openai import ChatOpenAI

    fields = {"model": "smol", "temperature": 0, "max_tokens": 150, "max_retries": 0}
    return ChatOpenAI(base_url=base_url, api_key="none", **fields, **others)


@pytest.fixture(scope="module")
def llm(base_url: str) -> Any:
    return make(base_url)


@pytest.fixture(scope="module")
def weather() -> Any:
    from langchain_core.tools import tool

    @tool
    def weather(city: str, days: int) -> str:
        """Tell the weather of the coming days."""
        return f"{days} days of sun in {city}"

    return weather


async def test_answers_and_streams(base_url: str, llm: Any) -> None:
    answer = llm.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in llm.stream(QUESTION)) == answer.content
    async with httpx.AsyncClient() as client:  # its own would stay open longer than this loop
        assert (await make(base_url, http_async_client=client).ainvoke(QUESTION)).content == answer.content
    assert [each.content for each in llm.batch([QUESTION, QUESTION])] == [answer.content] * 2


def test_a_tool_is_called_and_answered(llm: Any, weather: Any) -> None:
    bound = llm.bind_tools([weather], tool_choice="weather")
    called = bound.invoke("How will the weather be in Paris for 3 days?")
    assert called.invalid_tool_calls == []
    [call] = called.tool_calls
    told = weather.invoke(call)
    assert "days of sun" in told.content
    chunks = list(bound.stream("How will the weather be in Paris for 3 days?"))
    streamed = sum(chunks[1:], chunks[0])
    assert [each["args"] for each in streamed.tool_calls] == [call["args"]]
    assert llm.bind_tools([weather]).invoke([("user", "How will the weather be?"), called, told]).type == "ai"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(llm: Any, method: str) -> None:
    structured = llm.with_structured_output(City, method=method)
    asked = "Tokyo is in Japan. Answer in JSON with the keys city and country."
    assert isinstance(structured.invoke(asked), City)
