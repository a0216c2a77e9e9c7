"""Scoring with the real model in float32, through HTTP and offline, against transformers' own forward in float64.

The requests are those of lm-eval's local-completions client (0.4.13): token ids in, `echo`, `logprobs` 1 and `max_tokens`
1, so that the answer holds the prompt's log probabilities and those of one token more, which it cuts off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from torch import Tensor

from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.startup.build import build_engine
from engine.text.tokenizer_files import load_tokenizer
from quire import LLM, SamplingParams
from server.app import create_app
from server.settings.app_config import AppConfig

PATH = Path(find_model(None).path)
CONTEXT = "Question: Which of these is the capital of a country on an island, written in its own language?\nAnswer:"
CONTINUATIONS = (" Tokyo", " 東京, naïvely 🙂", " the city of Paris, which is in France")
CLOSE = 1e-3  # of a whole continuation, as the client sums it
POOL = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}


class Oracle:
    """transformers' own model, every number of it in float64."""

    def __init__(self, theirs: Any) -> None:
        self._model = deepcopy(theirs).double()
        self._states: dict[tuple[int, ...], Tensor] = {}

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """Final hidden states [positions, hidden], normed."""
        key = tuple(ids)
        if key not in self._states:
            with torch.inference_mode():
                self._states[key] = self._model.model(torch.tensor([key])).last_hidden_state[0]
        return self._states[key]

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Row i is the distribution of the token after position i."""
        with torch.inference_mode():
            return torch.log_softmax(self._model.lm_head(self.hidden(ids)), dim=-1)


@pytest.fixture(scope="module")
def oracle(transformers_smollm2: Any) -> Oracle:
    return Oracle(transformers_smollm2)


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    engine = build_engine(EngineConfig(model=str(PATH), dtype="float32", **POOL), lambda progress: None)
    app = AppConfig(model=str(PATH), served_model_names=("smol",), shutdown_timeout_s=0.0)
    served = create_app(engine, load_tokenizer(str(PATH)), app)
    with TestClient(served, base_url="http://127.0.0.1") as client:
        yield client


def post(http: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def encode(http: TestClient, text: str) -> list[int]:
    return post(http, "/tokenize", prompt=text, add_special_tokens=False)["tokens"]


def test_log_likelihoods_as_lm_eval_asks_for_them(http: TestClient, oracle: Oracle) -> None:
    """Twice: the second time everything is in the prefix cache, and nothing may be missing."""
    context = encode(http, CONTEXT)
    prompts = [context + encode(http, text) for text in CONTINUATIONS]
    expected = [oracle.logprobs(prompt) for prompt in prompts]
    for _ in range(2):
        answer = post(
            http, "/v1/completions", model="smol", prompt=prompts, temperature=0, max_tokens=1, logprobs=1,
            seed=1234, echo=True,
        )  # fmt: skip
        for choice, prompt, rows in zip(answer["choices"], prompts, expected, strict=True):
            scored = choice["logprobs"]
            assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
            assert len(scored["token_logprobs"]) == len(prompt) + 1
            places = range(len(context), len(prompt))
            ours = sum(scored["token_logprobs"][len(context) : -1])
            assert ours == pytest.approx(sum(rows[i - 1, prompt[i]].item() for i in places), abs=CLOSE)
            greedy = [
                token == max(top.values())
                for token, top in zip(scored["token_logprobs"][1:-1], scored["top_logprobs"][1:-1], strict=True)
            ]
            assert greedy == (rows[:-1].argmax(dim=-1) == torch.tensor(prompt[1:])).tolist()


def test_best_of_gives_the_likeliest_of_those_it_draws(http: TestClient) -> None:
    """By mean log probability a token, whatever was echoed, and beside another prompt."""
    fields = {
        "prompt": [CONTEXT, "Once"],
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 8,
        "echo": True,
        "ignore_eos": True,
    }
    every = post(http, "/v1/completions", n=5, logprobs=0, **fields)
    best = post(http, "/v1/completions", n=2, best_of=5, **fields)
    for prompt in range(2):

        def mean(choice: dict[str, Any]) -> float:
            drawn = choice["logprobs"]["token_logprobs"][-8:]
            return sum(drawn) / len(drawn)

        drawn = every["choices"][5 * prompt : 5 * prompt + 5]
        expected = [choice["text"] for choice in sorted(drawn, key=mean, reverse=True)[:2]]
        assert len({choice["text"] for choice in drawn}) == 5
        assert expected != [choice["text"] for choice in drawn[:2]]
        assert [choice["text"] for choice in best["choices"][2 * prompt : 2 * prompt + 2]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in best["choices"]} == {None}
    assert best["usage"] == {**every["usage"], "prompt_tokens_details": best["usage"]["prompt_tokens_details"]}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_scores_are_log_likelihoods_of_continuations(http: TestClient, oracle: Oracle, reduction: str) -> None:
    """The second context ends within a word: what both texts share a token of is scored with the second."""
    contexts, shares = [CONTEXT, CONTEXT + " Hono", CONTEXT], []
    continuations = [CONTINUATIONS[0], "lulu, in Hawaii", CONTINUATIONS[1]]
    answer = post(http, "/v1/score", text_1=contexts, text_2=continuations, reduction=reduction)
    for context, continuation, entry in zip(contexts, continuations, answer["data"], strict=True):
        alone, whole = encode(http, context), encode(http, context + continuation)
        first = next(at for at, pair in enumerate(zip([*alone, -1], whole, strict=False)) if pair[0] != pair[1])
        rows = oracle.logprobs(whole)
        values = [rows[at - 1, whole[at]].item() for at in range(first, len(whole))]
        expected = sum(values) / (len(values) if reduction == "mean" else 1)
        assert entry["score"] == pytest.approx(expected, abs=CLOSE)
        shares.append(first < len(alone))
    assert shares == [False, True, False]


@pytest.mark.parametrize("dimensions", [None, 64])
def test_embeddings_are_the_last_hidden_state(http: TestClient, oracle: Oracle, dimensions: int | None) -> None:
    texts = [CONTEXT, CONTINUATIONS[1], CONTEXT + CONTINUATIONS[2]]
    answer = post(http, "/v1/embeddings", input=texts, dimensions=dimensions)
    for text, entry in zip(texts, answer["data"], strict=True):
        expected = torch.nn.functional.normalize(oracle.hidden(encode(http, text))[-1][:dimensions], dim=0)
        assert torch.tensor(entry["embedding"]) == pytest.approx(expected, abs=1e-5)


def test_embeddings_are_the_mean_hidden_state(http: TestClient, oracle: Oracle) -> None:
    config = http.app.state.models.entries[0].config  # type: ignore[attr-defined]
    http.app.state.models.entries[0].config = replace(config, pooling="mean")  # type: ignore[attr-defined]
    try:
        (entry,) = post(http, "/v1/embeddings", input=CONTEXT)["data"]
    finally:
        http.app.state.models.entries[0].config = config  # type: ignore[attr-defined]
    expected = torch.nn.functional.normalize(oracle.hidden(encode(http, CONTEXT)).mean(0), dim=0)
    assert torch.tensor(entry["embedding"]) == pytest.approx(expected, abs=1e-5)


def test_offsets_point_into_the_text(http: TestClient) -> None:
    prompt = CONTEXT + CONTINUATIONS[1]
    choice = post(http, "/v1/completions", prompt=prompt, max_tokens=8, temperature=0, logprobs=0, echo=True)[
        "choices"
    ][0]
    text, scored = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    for token, begin, end in zip(
        scored["tokens"], scored["text_offset"], [*scored["text_offset"][1:], len(text)], strict=True
    ):
        if not token.startswith("bytes:"):
            assert text[begin:end] == token
    assert any(token.startswith("bytes:") for token in scored["tokens"]), "no character is split over tokens here"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_sampled_tokens_in_chat(http: TestClient, oracle: Oracle, temperature: float) -> None:
    """What is told is the model's own distribution, whatever the sampling made of it; bytes join to the text."""
    fields = {"temperature": temperature, "top_k": 50, "presence_penalty": 1.0, "seed": 7, "max_tokens": 12}
    messages = [{"role": "user", "content": "Write about 東京 with many emojis."}]
    answer = post(
        http, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=3, return_token_ids=True, **fields
    )
    choice = answer["choices"][0]
    prompt, drawn = answer["prompt_token_ids"], choice["token_ids"]
    rows = oracle.logprobs(prompt + drawn)[len(prompt) - 1 : -1]
    content = choice["logprobs"]["content"]
    for token, drawn_id, row in zip(content, drawn, rows, strict=True):
        assert token["logprob"] == pytest.approx(row[drawn_id].item(), abs=1e-4)
        best = row.topk(3).values.tolist()
        assert [top["logprob"] for top in token["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    told = b"".join(bytes(token["bytes"]) for token in content)
    ending = b"<|im_end|>" if choice["finish_reason"] == "stop" else b""
    assert told.removesuffix(ending).decode(errors="replace") == choice["message"]["content"]


def test_prompt_logprobs_offline(oracle: Oracle) -> None:
    with LLM(dtype="float32", **POOL) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, logprobs=1, prompt_logprobs=2)
        outputs = llm.generate([CONTEXT + text for text in CONTINUATIONS], params, progress=False)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        rows = oracle.logprobs(prompt + answer.token_ids)
        assert answer.token_ids == rows[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        assert output.prompt_logprobs is not None
        assert answer.logprobs is not None
        entries = zip([*prompt[1:], *answer.token_ids], [*output.prompt_logprobs[1:], *answer.logprobs], strict=True)
        for (token, entry), row in zip(entries, rows, strict=False):
            assert entry is not None
            assert entry[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert entry[token].rank == 1 + int((row > row[token]).sum())
            assert {row.topk(1).indices.item()} <= entry.keys()
