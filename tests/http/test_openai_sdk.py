"""OpenAI's own client works unchanged and raises its own errors. Streams and tools: tests/clients/test_openai_python.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import openai
import pytest
from harness import CONFIG, Live, eventually

from engine.overload import QueueLimits
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=HELLO, seed=1, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == 6
    assert answer._request_id


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="parrot", prompt=["one|", "two|"], echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["one|one", "two|two"]
    assert answer.choices[0].logprobs.text_offset == list(range(8))
    stream = client.completions.create(model="parrot", prompt="one|", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "one"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["parrot", "bird"]
    assert client.models.retrieve("bird").id == "bird"


async def test_leaving_an_async_stream_early_frees_it(serve: Serve) -> None:
    live = serve(step_s=0.05)
    async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        stream = await client.completions.create(model="parrot", prompt="endless", max_tokens=500, stream=True)
        async for _ in stream:
            break
        await stream.close()
    live.check_idle()


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="parrot", messages=HELLO, max_tokens=1000)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (unknown.value.code, unknown.value.type) == ("model_not_found", "invalid_request_error")


def test_keys_and_overload_are_the_sdks_own(serve: Serve) -> None:
    live = serve(
        config=replace(CONFIG, max_num_seqs=1), limits=QueueLimits(max_requests=0), api_keys=("right",), step_s=0.05
    )
    with openai.OpenAI(base_url=live.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        right = client.with_options(api_key="right")
        with right.completions.create(model="parrot", prompt="endless", max_tokens=500, stream=True):
            eventually(lambda: live.engine.stats.num_running == 1)
            with pytest.raises(openai.RateLimitError) as full:
                right.completions.create(model="parrot", prompt="x")
            assert full.value.code == "rate_limit_exceeded"


def test_a_failure_within_a_stream_is_raised(serve: Serve) -> None:
    live = serve(fail=lambda piece: "This prompt broke the model." if piece.start > 6 else None)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        stream = client.completions.create(model="parrot", prompt="hello|", stream=True)
        with pytest.raises(openai.APIError, match="broke the model"):
            list(stream)


def test_a_full_server_is_asked_again_when_it_says(serve: Serve) -> None:
    live = serve(config=replace(CONFIG, max_num_seqs=1), limits=QueueLimits(max_requests=0), step_s=0.01)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=3) as client:
        stream = client.completions.create(model="parrot", prompt="endless", max_tokens=40, stream=True)
        eventually(lambda: live.engine.stats.num_running == 1)
        answer = client.completions.with_raw_response.create(model="parrot", prompt="x|")
        assert answer.retries_taken == 1
        assert answer.parse().choices[0].text == "x"
        assert len(list(stream)) > 1


def test_a_server_that_leaves_is_an_error_of_its_own(serve: Serve) -> None:
    live = serve()
    loop = live.context.client._loop
    asyncio.run_coroutine_threadsafe(live.context.client.stop(0.0), loop).result(PATIENCE_S)
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError) as leaving:
            client.completions.create(model="parrot", prompt="x|")
        assert (leaving.value.status_code, leaving.value.code) == (503, "shutting_down")
