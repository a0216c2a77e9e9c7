"""/v1/completions: every accepted field is honoured, in the shapes that clients rely on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from harness import CONFIG, END, Live

Post = Callable[..., dict[str, Any]]
PATH = "/v1/completions"


def stream(http: httpx.Client, path: str = PATH, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as streams end."""
    with http.stream("POST", path, json={"stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert frames.pop() == "[DONE]"
    return [json.loads(frame) for frame in frames]


def test_an_answer_has_the_shape_that_clients_know(post: Post) -> None:
    answer = post(PATH, model="bird", prompt="hello|", max_tokens=10, temperature=0)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "bird")
    assert answer["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 6,  # the end token is one
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_unless_asked_otherwise(post: Post) -> None:
    choice = post(PATH, prompt="x")["choices"][0]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


def test_cached_tokens_are_told(post: Post) -> None:
    prompt = "a prompt of several blocks, sent once and sent again|"
    post(PATH, prompt=prompt)
    assert post(PATH, prompt=prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    salted = post(PATH, prompt=prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_cached_tokens_of_other_tiers_are_told_apart(serve: Callable[..., Live]) -> None:
    live = serve(config=replace(CONFIG, num_blocks=32, num_host_blocks=64, host_caching=True))

    def details(letter: str) -> dict[str, int]:
        body = {"prompt": letter * 400, "max_tokens": 1}
        return httpx.post(live.url + PATH, json=body).json()["usage"]["prompt_tokens_details"]

    assert details("a") == {"cached_tokens": 0}
    assert details("b") == {"cached_tokens": 0}  # the pool gives up some of the first for it
    told = details("a")
    assert told["cached_tokens"] == 384
    assert 0 < told["cached_tokens_host"] <= 384
    assert told["cached_tokens_disk"] == 0


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("one|", ["one"]),
        (["one|", "two|"], ["one", "two"]),
        (list(b"one|"), ["one"]),
        ([list(b"one|"), list(b"two|")], ["one", "two"]),
        (["one|", list(b"two|")], ["one", "two"]),
    ],
)
def test_prompts_come_in_four_forms(post: Post, prompt: object, texts: list[str]) -> None:
    answer = post(PATH, prompt=prompt, n=2)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == 4 * len(texts)


@pytest.mark.parametrize("text", ["héllo wörld", "日本語", "🙂🙃", "a\u0301e"])
def test_characters_of_several_tokens_are_never_split(http: httpx.Client, text: str) -> None:
    chunks = stream(http, prompt=text + "|", max_tokens=100)
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_short_by_max_tokens_ends_honestly(post: Post) -> None:
    assert post(PATH, prompt="é|", max_tokens=1)["choices"][0]["text"] == "\ufffd"


def test_a_stream_says_what_the_plain_answer_says(http: httpx.Client, post: Post) -> None:
    fields = {"prompt": ["one two|", "three|"], "max_tokens": 30, "n": 2, "logprobs": 1, "return_token_ids": True}
    plain, chunks = post(PATH, **fields), stream(http, **fields)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in plain["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [token for piece in own for token in piece["token_ids"]] == choice["token_ids"]
        for key in choice["logprobs"]:
            assert [entry for piece in own for entry in piece["logprobs"][key]] == choice["logprobs"][key]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_scores_as_the_plain_answer_does(http: httpx.Client, post: Post) -> None:
    fields = {"prompt": ["né|", "abc"], "echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4}
    plain, chunks = post(PATH, **fields), stream(http, **fields)
    for choice in plain["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        for key in choice["logprobs"]:
            assert [entry for piece in own for entry in piece["logprobs"][key]] == choice["logprobs"][key]
        assert [piece["prompt_logprobs"] for piece in own if "prompt_logprobs" in piece] == [choice["prompt_logprobs"]]


def test_a_stream_reports_usage_when_asked(http: httpx.Client) -> None:
    *chunks, last = stream(http, prompt="hello|", stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(http, prompt="hello|", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("stop", "include", "text", "reason"),
    [
        ("lo w", False, "hel", "lo w"),
        ("lo w", True, "hello w", "lo w"),
        (["zzz", "o", "ld"], False, "hell", "o"),
        (["lo", "hello w"], False, "hel", "lo"),
        ("nowhere", False, "hello world", None),
        ("hello world!", False, "hello world", None),  # held back to the end, then given out
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(
    live: Live,
    http: httpx.Client,
    post: Post,
    stop: object,
    include: bool,
    text: str,
    reason: str | None,
    streamed: bool,
) -> None:
    fields = {"prompt": "hello world|", "stop": stop, "include_stop_str_in_output": include, "max_tokens": 100}
    choices = [chunk["choices"][0] for chunk in (stream(http, **fields) if streamed else [post(PATH, **fields)])]
    assert "".join(choice["text"] for choice in choices) == text
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", reason)


def test_a_stop_string_ends_its_own_choice_only_and_at_once(live: Live, post: Post) -> None:
    answer = post(PATH, prompt=["hello|", "world|", "endless"], stop="o", n=2, max_tokens=400)
    assert [choice["text"] for choice in answer["choices"]] == ["hell", "hell", "w", "w", *["hijklmn"] * 2]
    assert answer["usage"]["completion_tokens"] == 2 * (5 + 2 + 8)


def test_a_stop_token_ends_the_text_before_it(post: Post) -> None:
    choice = post(PATH, prompt="hello|", stop_token_ids=[ord("l")])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", ord("l"))
    choice = post(PATH, prompt="hello|", stop_token_ids=[ord("l")], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "hel"


def test_min_tokens_passes_stop_strings_by(post: Post) -> None:
    fields = {"prompt": "hello world|", "stop": "l", "max_tokens": 50}
    assert post(PATH, **fields)["choices"][0]["text"] == "he"
    assert post(PATH, **fields, min_tokens=4)["choices"][0]["text"] == "hello wor"


def test_the_end_token_counts_unless_ignored(post: Post) -> None:
    choice = post(PATH, prompt="hi|", ignore_eos=True, max_tokens=5, skip_special_tokens=False)["choices"][0]
    assert choice["text"] == "hi<end><end><end>"
    assert choice["finish_reason"] == "length"


def test_echo_and_logprobs_line_up(post: Post) -> None:
    choice = post(PATH, prompt="né|", echo=True, logprobs=1, max_tokens=8)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "né|né"
    assert logprobs["tokens"] == ["n", r"bytes:\xc3", r"bytes:\xa9", "|", "n", r"bytes:\xc3", r"bytes:\xa9", "<end>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 4, 5]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * 7
    assert logprobs["top_logprobs"][:2] == [None, {r"bytes:\xc3": -0.5}]


def test_scoring_generates_nothing(post: Post) -> None:
    choice = post(PATH, prompt="abc", echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"c": -0.5}]


def test_scoring_what_is_cached_leaves_nothing_out(post: Post) -> None:
    fields = {"prompt": "scored once, and scored again from the cache", "echo": True, "logprobs": 1, "max_tokens": 1}
    first, second = post(PATH, **fields), post(PATH, **fields)
    assert second["choices"] == first["choices"]
    assert second["choices"][0]["logprobs"]["token_logprobs"].count(None) == 1


def test_tokens_as_ids(post: Post) -> None:
    choice = post(PATH, prompt="ab|", logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:97": -0.5}]


def test_prompt_logprobs_and_token_ids(post: Post) -> None:
    choice = post(PATH, prompt="ab|", prompt_logprobs=1, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == list(b"ab|")
    assert choice["token_ids"] == [*b"ab", END]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}


@pytest.mark.parametrize(("keep", "text"), [(4, "two"), (-1, "one two"), (100, "one two")])
def test_a_prompt_is_truncated_from_the_left(post: Post, keep: int, text: str) -> None:
    assert post(PATH, prompt="one two|", truncate_prompt_tokens=keep)["choices"][0]["text"] == text


def test_truncating_to_what_fits_leaves_room_for_the_answer(post: Post) -> None:
    answer = post(PATH, prompt="x" * 600, truncate_prompt_tokens=-1, max_tokens=12)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (500, 12)


def test_null_means_absent_and_no_ops_are_not_told(http: httpx.Client) -> None:
    fields = {"prompt": "hi|", "suffix": None, "best_of": 1, "n": None, "user": "me", "store": True, "unheard_of": None}
    response = http.post(PATH, json=fields)
    assert response.json()["choices"][0]["text"] == "hi"
    assert "x-quire-ignored-fields" not in response.headers


def test_the_tokenizer_is_described_as_lm_eval_asks(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["vocab_size"], info["model_max_length"]) == (None, 258, 512)
    assert "messages" in info["chat_template"]
