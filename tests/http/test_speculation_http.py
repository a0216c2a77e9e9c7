"""Several tokens a step, as clients see them: the same answers in fewer, larger pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from harness import CONFIG, Live

PROMPT = "the quick brown fox jumps over the lazy dog|"


@pytest.fixture(scope="module")
def answers() -> Iterator[list[Any]]:
    """A function that asks a daemon without drafts, and one with them."""
    with Live().serving() as plain, Live(config=replace(CONFIG, num_speculative_tokens=4)).serving() as drafting:
        with httpx.Client(base_url=plain.url) as one, httpx.Client(base_url=drafting.url) as other:
            yield [one, other]
        assert drafting.engine.stats.spec_accepted_tokens > 0


def chunks(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "stream": True, **fields}
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


def whole(found: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream put together."""
    choices = [choice for chunk in found for choice in chunk["choices"]]
    scores = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    return {
        "text": "".join(choice["text"] for choice in choices),
        "finish": [
            (choice["finish_reason"], choice.get("stop_reason")) for choice in choices if choice["finish_reason"]
        ],
        "scores": {name: [item for score in scores for item in score[name]] for name in (scores[0] if scores else ())},
        "usage": found[-1].get("usage"),
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 2},
        {"stop": ["over the"]},
        {"stop": ["fox j"], "include_stop_str_in_output": True, "logprobs": 1},
        {"max_tokens": 17},
        {"stop_token_ids": [ord("z")]},
        {"temperature": 1, "seed": 3, "n": 2},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_a_stream_says_the_same(answers: list[httpx.Client], fields: dict[str, Any]) -> None:
    plain, drafted = (chunks(http, **fields) for http in answers)
    if fields.get("n"):
        for index in range(2):
            own = [
                [{**c, "choices": [x for x in c["choices"] if x["index"] == index]} for c in s]
                for s in (plain, drafted)
            ]
            assert whole(own[0]) == whole(own[1])
    else:
        assert whole(plain) == whole(drafted)


def test_an_answer_says_the_same(answers: list[httpx.Client]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "logprobs": 1, "stop": ["lazy"]}
    told = [http.post("/v1/completions", json=body).json() for http in answers]
    one, other = ((each["choices"], each["usage"]) for each in told)
    assert one == other


def test_an_answer_tells_its_drafts(answers: list[httpx.Client]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, "include_metrics": True}
    plain, drafted = (http.post("/v1/completions", json=body).json()["metrics"] for http in answers)
    assert (plain["draft_tokens"], plain["accepted_draft_tokens"]) == (0, 0)
    assert 0 < drafted["accepted_draft_tokens"] < drafted["draft_tokens"]
