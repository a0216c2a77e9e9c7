"""/v1/embeddings and /v1/score over the fake runner, whose hidden states and log probabilities are known."""

from __future__ import annotations

import math
import struct
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import openai
import pytest
from harness import Live

from engine.core.step import POOLED_UNIT
from loadtest.fake_runner import hidden_state

Post = Callable[..., dict[str, Any]]


def unit(values: Sequence[float]) -> Any:
    length = math.hypot(*values)
    return pytest.approx([value / length for value in values], abs=1e-7)


def last(text: str, dimensions: int = 4) -> Any:
    return unit(hidden_state(text.encode())[:dimensions])


def mean(text: str) -> Any:
    states = [hidden_state(text.encode()[: end + 1]) for end in range(len(text))]
    return unit([sum(column) for column in zip(*states, strict=True)])


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    assert {entry["object"] for entry in answer["data"]} == {"embedding"}
    return [entry["embedding"] for entry in answer["data"]]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "a", "hello"], ["hello", "a", "hello"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [33]], ["hi", "!"]),
        (["x" * 400, "y" * 512], ["x" * 400, "y" * 512]),  # more than a step holds
        (["hi", [33], "hi"], ["hi", "!", "hi"]),
    ],
    ids=["text", "texts", "ids", "lists", "long", "mixed"],
)
def test_embeddings_of_all_that_input_may_be(post: Post, given: Any, texts: list[str]) -> None:
    answer = post("/v1/embeddings", input=given, model="parrot")
    assert answer["object"] == "list"
    assert answer["model"] == "parrot"
    assert vectors(answer) == [last(text) for text in texts]
    num = sum(map(len, texts))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num


def test_the_mean_of_all_states(serve: Callable[..., Live]) -> None:
    """However often the prompt has been seen before."""
    live = serve(pooling="mean")
    for _ in range(2):
        answer = httpx.post(f"{live.url}/v1/embeddings", json={"input": ["hello" * 9, "h" * 300]}).json()
        assert vectors(answer) == [mean("hello" * 9), mean("h" * 300)]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_fewer_dimensions_are_of_length_one_again(post: Post) -> None:
    (short,) = vectors(post("/v1/embeddings", input="hello", dimensions=3))
    assert short == last("hello", 3)
    assert math.hypot(*short) == pytest.approx(1.0, abs=1e-6)


def test_base64_holds_the_same_numbers(post: Post) -> None:
    (plain,) = vectors(post("/v1/embeddings", input="hello"))
    (packed,) = vectors(post("/v1/embeddings", input="hello", encoding_format="base64"))
    assert list(struct.unpack("<4f", b64decode(packed))) == plain  # type: ignore[arg-type]


@pytest.mark.parametrize(("side", "kept"), [("right", "hello"), ("left", "there")])
def test_a_long_text_is_cut_where_the_request_says(post: Post, side: str, kept: str) -> None:
    for given in ("hello, there", list(b"hello, there")):
        answer = post("/v1/embeddings", input=given, truncate_prompt_tokens=5, truncation_side=side)
        assert vectors(answer) == [last(kept)]
        assert answer["usage"]["prompt_tokens"] == 5
    assert len(vectors(post("/v1/embeddings", input="x" * 600, truncate_prompt_tokens=-1))) == 1


def test_the_same_vectors_as_vllms_pooling(post: Post) -> None:
    answer = post("/pooling", input=["hello", "you"], task="embed")
    assert [(entry["object"], entry["data"]) for entry in answer["data"]] == [
        ("pooling", last("hello")),
        ("pooling", last("you")),
    ]
    (bare,) = post("/v1/embeddings", input="hello", normalize=False)["data"]
    assert bare["embedding"] == pytest.approx([each * POOLED_UNIT for each in hidden_state(b"hello")], abs=1e-6)


def test_the_official_sdk(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="parrot", input=["hello", "you"])  # asks for base64 by itself
    assert [entry.embedding for entry in answer.data] == [last("hello"), last("you")]
    with pytest.raises(openai.BadRequestError, match=r"dimensions is 9, but this model's vectors have 4; lower it\."):
        client.embeddings.create(model="parrot", input="hello", dimensions=9)


def test_what_a_request_went_through_is_told(live: Live, http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"input": "hello", "include_metrics": True})
    assert "prefill;dur=" in answer.headers["server-timing"]
    assert answer.json()["metrics"]["generation_time_ms"] == 0
    entry = http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert entry["endpoint"] == "/v1/embeddings"
    assert entry["finish_reasons"] == ["length"]


def test_scores(post: Post, http: httpx.Client) -> None:
    """Each token of the fake model has a log probability of -0.5, and each byte is a token."""
    answer = post("/v1/score", model="bird", text_1="one", text_2=[" two", " and three"], reduction="sum")
    assert answer["object"] == "list"
    assert answer["id"].startswith("score-")
    assert http.get(f"/v1/requests/{answer['id']}").json()["endpoint"] == "/v1/score"
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(0, "score"), (1, "score")]
    assert [entry["score"] for entry in answer["data"]] == [-0.5 * 4, -0.5 * 10]
    assert answer["usage"]["prompt_tokens"] == 3 + 4 + 3 + 10
    answer = post("/score", text_1=["one", "two"], text_2=[" two", " and three"])
    assert [entry["score"] for entry in answer["data"]] == [-0.5, -0.5]


REFUSED = [
    ("/v1/embeddings", {}, "input", "Field required"),
    ("/v1/embeddings", {"input": ""}, "input", "is empty"),
    ("/v1/embeddings", {"input": []}, "input", "it is empty"),
    ("/v1/embeddings", {"input": ["a", "", "b"]}, "input", "item 1 is empty"),
    ("/v1/embeddings", {"input": [[5], []]}, "input", "item 1 is empty"),
    ("/v1/embeddings", {"input": ["a", None]}, "input", "must be a string"),
    ("/v1/embeddings", {"input": [["a"]]}, "input", "must be a string"),
    ("/v1/embeddings", {"input": [[1, 999]]}, "input", "token id 999"),
    ("/v1/embeddings", {"input": "x" * 513}, "input", "At most 512 tokens can be read at once here"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "input", "input has 2049 items; one request may have at most 2048"),
    ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1, not 0"),
    ("/v1/embeddings", {"input": "x", "dimensions": 5}, "dimensions", "vectors have 4"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    ("/v1/embeddings", {"input": "x", "stream": True}, "stream", "stream is not supported"),
    ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "give 1 to 512, or -1"),
    ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "give 1 to 512, or -1"),
    ("/v1/embeddings", {"input": "x", "input_type": "tweet"}, "input_type", "this model has query, document"),
    ("/v1/embeddings", {"input": "x", "return_sparse": True}, "return_sparse", "one dense vector is made of a text"),
    ("/v1/embeddings", {"input": "x", "multi_vector": True}, "multi_vector", "not one of each token"),
    ("/pooling", {"input": "x", "task": "token_embed"}, "task", "several vectors a text"),
    ("/pooling", {"input": "x", "task": "classify"}, "model", "This model scores no labels: it generates text"),
    ("/v1/classify", {"input": "x"}, "model", "This model scores no labels: it generates text"),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}, "model", "This model generates text, and is no reranker"),
    ("/rerank", {"query": "x", "documents": []}, "documents", "at least 1 item"),
    ("/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n", "greater than or equal to 1"),
    ("/rerank", {"query": "x", "documents": ["y", 3]}, "documents.1", "should be a string or an object, not 3"),
    ("/v1/score", {"text_1": 5, "text_2": "b"}, "text_1", "should be a string or a list, not 5"),
    (
        "/v1/score",
        {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5},
        "truncate_prompt_tokens",
        "not supported",
    ),
    ("/v1/embeddings", {"messages": [{"role": "user", "content": "x"}]}, "messages", "send input"),
    ("/v1/classify", {"input": "x", "messages": []}, "messages", "send input"),
    ("/v1/classify", {"input": "x", "softmax": False}, "softmax", "send use_activation"),
    ("/v1/embeddings", {"input": "x", "prompt_name": "query"}, "prompt_name", "send input_type"),
    ("/v1/embeddings", {"input": "x", "task": "retrieval.query"}, "task", "send input_type"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "Find"}, "instruction", "into the text"),
    ("/rerank", {"query": "x", "documents": ["y"], "top_k": 1}, "top_k", "send top_n"),
    ("/rerank", {"query": "x", "documents": ["y"], "raw_scores": True}, "raw_scores", "send use_activation"),
    ("/v1/score", {"text_1": "a"}, "text_2", "Field required"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2", "at least 1 item"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "text_2 has an empty text"),
    ("/v1/score", {"text_1": "", "text_2": "b"}, "text_1", "text_1 has no token before text_2's first"),
    ("/v1/score", {"text_1": ["a"] * 3, "text_2": ["b"] * 2}, "text_1", "text_1 has 3 texts and text_2 2"),
    ("/v1/score", {"text_1": "a" * 300, "text_2": "b" * 300}, "text_2", ", but text_2 has 600"),
    ("/v1/score", {"text_1": "a" * 600, "text_2": ["b", "b"]}, "text_1", "At most 512 tokens"),
    ("/v1/score", {"text_1": ["a", "a" * 600], "text_2": ["b", "b"]}, "text_1", "Item 1 of 2: At most 512 tokens"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "b" * 600, "b"]}, "text_2", "Item 1 of 3: At most 512 tokens"),
    ("/v1/embeddings", {"input": ["b", "b", "b" * 600]}, "input", "Item 2 of 3: At most 512 tokens"),
    ("/v1/embeddings", {"input": [[5], [5, 999_999]]}, "input", "Item 1 of 2: input has the token id 999999"),
    ("/v1/completions", {"prompt": [[5], [5, 999_999]]}, "prompt", "Item 1 of 2: prompt has the token id 999999"),
    ("/v1/completions", {"prompt": ["a", "a" * 9999]}, "prompt", "Item 1 of 2: This model's maximum context"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "reduction": "max"}, "reduction", "'mean' or 'sum'"),
]


@pytest.mark.parametrize(("path", "fields", "param", "sentence"), REFUSED)
def test_what_cannot_be_read_is_refused(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, sentence: str
) -> None:
    response = http.post(path, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert sentence in error["message"]


def test_what_is_repeated_counts(serve: Callable[..., Live]) -> None:
    live = serve(max_body_bytes=5000)
    fields = {"text_1": "a" * 400, "text_2": ["b"] * 13}
    message = httpx.post(f"{live.url}/v1/score", json=fields).json()["error"]["message"]
    assert message.startswith("The pairs have 5213 characters, text_1 repeated; one request may have 5000")
    fields["text_2"] = ["b"] * 12
    assert httpx.post(f"{live.url}/v1/score", json=fields).status_code == 200


def test_one_that_fails_is_an_error(serve: Callable[..., Live]) -> None:
    live = serve(fail=lambda piece: "made to fail" if piece.tokens[0] == ord("!") else None)
    response = httpx.post(f"{live.url}/v1/embeddings", json={"input": ["fine", "!"]})
    assert response.status_code == 500
    assert "made to fail" in response.json()["error"]["message"]
