"""Beam search over HTTP and offline: the n best answers, best first, each whole at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from harness import END, VOCAB_SIZE, parrot
from test_completions import stream

from engine.core.scheduling.beams import Answer, BeamSearch, row_params
from engine.core.types import BeamParams, EarlyStopping, SamplingParams
from loadtest.fake_runner import likeliest

Post = Callable[..., dict[str, Any]]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "hello|"


def searched(
    n: int, *, width: int | None = None, max_tokens: int = 16, min_tokens: int = 0, stops: str = "", **beam: Any
) -> list[Answer]:
    """What the parrot's best answers to PROMPT are."""
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        eos_token_ids=frozenset([END]),
        stop_token_ids=frozenset(stops.encode()),
        beam=BeamParams(width=width or n, **beam),
    )
    search, most = BeamSearch(params), row_params(params).logprobs
    assert most is not None
    beams = [list(PROMPT.encode())]
    while True:
        for place, tokens in enumerate(beams):
            search.put(place, likeliest(parrot(tokens, 0), tokens, most, VOCAB_SIZE))
        if not (continuations := search.advance()):
            return search.finished[:n]
        beams = [[*beams[parent], token] for parent, token in continuations]


def ids_of(answers: list[Answer]) -> list[list[int]]:
    return [[entry.token_id for entry in answer.logprobs] for answer in answers]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"n": 1}, searched(1)),
        ({"n": 3}, searched(3)),
        ({"n": 2, "best_of": 5}, searched(2, width=5)),
        ({"n": 3, "max_tokens": 4}, searched(3, max_tokens=4)),
        ({"n": 3, "length_penalty": 0, "early_stopping": True}, searched(3, length_penalty=0.0, early_stopping=EarlyStopping.YES)),
        ({"n": 3, "early_stopping": "never"}, searched(3, early_stopping=EarlyStopping.NEVER)),
    ],
)  # fmt: skip
def test_the_best_come_first_on_both_endpoints(post: Post, asked: dict[str, Any], expected: list[Answer]) -> None:
    fields = {"use_beam_search": True, "return_token_ids": True, "max_tokens": 16, **asked}
    answers = [post(COMPLETIONS, prompt=PROMPT, **fields)]
    if "best_of" not in fields:
        answers.append(post(CHAT, messages=[{"role": "user", "content": "hello"}], **fields))
    for answer in answers:
        assert [choice["token_ids"] for choice in answer["choices"]] == ids_of(expected)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert [choice["finish_reason"] for choice in answer["choices"]] == [one.reason.value for one in expected]
        assert answer["usage"]["completion_tokens"] == sum(map(len, ids_of(expected))), "of the answers given"


def test_what_belongs_to_a_single_answer_is_honoured_too(post: Post) -> None:
    fields: dict[str, Any] = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "temperature": 0, "echo": True}
    answer = post(COMPLETIONS, **fields, logprobs=2, stop="l", include_metrics=True)
    assert answer["choices"][0]["text"] == PROMPT + "he", "cut where the stop string begins"
    assert answer["choices"][0]["finish_reason"] == "stop"
    told = answer["choices"][0]["logprobs"]
    best = searched(2)[0].logprobs
    num_told = len(told["token_logprobs"]) - len(PROMPT)
    assert told["token_logprobs"][-num_told:] == [entry.logprob for entry in best[:num_told]]
    assert all(len(top) in (2, 3) for top in told["top_logprobs"][-num_told:]), "two, and the token itself"
    assert answer["metrics"]["mean_itl_ms"] is not None


def test_min_tokens_and_stop_tokens_are_honoured(post: Post) -> None:
    fields = {"prompt": PROMPT, "use_beam_search": True, "n": 3, "return_token_ids": True}
    stopped = post(COMPLETIONS, **fields, stop_token_ids=[ord("l")])["choices"]
    assert [choice["token_ids"] for choice in stopped] == ids_of(searched(3, stops="l"))
    assert stopped[0]["stop_reason"] == ord("l")
    late = post(COMPLETIONS, **fields, stop_token_ids=[ord("l")], min_tokens=9)["choices"]
    assert all(len(choice["token_ids"]) >= 9 for choice in late)


def test_each_answer_streams_as_one_chunk(http: httpx.Client) -> None:
    chunks = stream(http, prompt=PROMPT, use_beam_search=True, n=3, best_of=4, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == ids_of(searched(3, width=4))
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    chat = stream(http, CHAT, messages=[{"role": "user", "content": "hello"}], use_beam_search=True, n=2)
    texts = [choice["delta"]["content"] for chunk in chat for choice in chunk["choices"] if choice["delta"]["content"]]
    assert len(texts) == 2


def test_a_search_beside_others_changes_neither(post: Post) -> None:
    both = post(COMPLETIONS, prompt=[PROMPT, "other|"], use_beam_search=True, n=2, return_token_ids=True)
    assert [choice["token_ids"] for choice in both["choices"][:2]] == ids_of(searched(2))
    assert len(both["choices"]) == 4


def test_other_endpoints_say_where_to_search(http: httpx.Client) -> None:
    body = {"input": "hello", "use_beam_search": True}
    error = http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "use_beam_search"
    assert "/v1/chat/completions" in error["message"]
