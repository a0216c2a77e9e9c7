"""The service of docs/guides/rag.md in the real daemon: chat, embedder, reranker and guard of one file, on tiny models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.sources.model_source import find_model
from quire import LLM
from tests.cpu.test_encoders import ENGINE, KINDS, describe, modules, save, speak
from tests.daemon.real_daemon import Daemon, serve

# As Llama Guard's is published, shorter.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "Is the last message safe? First line must read 'safe' or 'unsafe'."
)
LABELS = ("safe", "unsafe")
TEXTS = ["How do I bake bread?", "I will rob a bank.", "Paris is the capital of France.", "unsafe unsafe unsafe"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rag")
    for name in ("embedder", "reranker"):
        (root / name).mkdir()
    save(root / "embedder", KINDS["bert"])
    describe(
        root / "embedder",
        modules=modules("Transformer", "Pooling", "Normalize"),
        config_sentence_transformers={"prompts": {"query": "w9 w8 "}},
        **{"1_Pooling__config": {"pooling_mode": "mean"}},
    )
    save(root / "reranker", KINDS["xlm-roberta"], "ForSequenceClassification", num_labels=1)
    speak(root / "reranker", pair="w5 $A w2 w2 $B w2")
    (root / "guard.jinja").write_text(TEMPLATE)
    model = find_model(None).path
    items: list[dict[str, Any]] = [
        {"model": model, "served-model-name": "chat", "guard": "guard"},
        {"model": model, "served-model-name": "guard", "chat-template": str(root / "guard.jinja")},
        *(
            {"model": str(root / name), "served-model-name": name, "dtype": "float32"}
            for name in ("embedder", "reranker")
        ),
    ]
    settings = {"models": items, "kv-cache-memory-bytes": "32MiB", "device": "cpu", "num-threads": 1, "guard-every": 8}
    (root / "rag.json").write_text(json.dumps(settings))
    return root


@pytest.fixture(scope="module")
def daemon(root: Path) -> Iterator[Daemon]:
    (root / "rag.yaml").write_text((root / "rag.json").read_text())  # JSON is YAML
    with serve("--config", root / "rag.yaml") as daemon:
        yield daemon


def post(daemon: Daemon, path: str, **body: Any) -> dict[str, Any]:
    answer = daemon.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_and_scores_are_those_of_each_model_alone(daemon: Daemon, root: Path) -> None:
    texts = ["w20 w30", "w40 w41 w42", "w50"]
    with LLM(str(root / "embedder"), dtype="float32", **ENGINE) as llm:
        wanted = [each.outputs.embedding for each in llm.embed(texts, input_type="query", progress=False)]
    found = post(daemon, "/v1/embeddings", model="embedder", input=texts, input_type="query")["data"]
    assert [each["embedding"] for each in found] == wanted
    with LLM(str(root / "reranker"), dtype="float32", **ENGINE) as llm:
        ranked = [(each.index, each.score) for each in llm.rerank("w7", texts, top_n=2, progress=False)]
    results = post(daemon, "/v1/rerank", model="reranker", query="w7", documents=texts, top_n=2)["results"]
    assert [(each["index"], each["relevance_score"]) for each in results] == ranked


def verdict(daemon: Daemon, messages: list[dict[str, str]]) -> bool:
    """Whether the guard finds "unsafe" likelier than "safe" behind its template, by the log probabilities it gives."""
    prompt = post(daemon, "/tokenize", model="guard", messages=messages, add_special_tokens=False)["tokens"]
    spelt = [
        post(daemon, "/tokenize", model="guard", prompt="\n\n" + each, add_special_tokens=False)["tokens"]
        for each in LABELS
    ]
    at = next(index for index, pair in enumerate(zip(*spelt, strict=False)) if pair[0] != pair[1])
    fields = {"model": "guard", "max_tokens": 0, "echo": True, "logprobs": 0}
    asked = [post(daemon, "/v1/completions", prompt=prompt + ids[: at + 1], **fields) for ids in spelt]
    safe, unsafe = (each["choices"][0]["logprobs"]["token_logprobs"][-1] for each in asked)
    return bool(unsafe > safe)


def test_a_verdict_is_the_likelier_label(daemon: Daemon) -> None:
    wanted = [verdict(daemon, [{"role": "user", "content": text}]) for text in TEXTS]
    results = post(daemon, "/v1/moderations", model="chat", input=TEXTS)["results"]
    assert [each["flagged"] for each in results] == wanted
    for text, is_unsafe in zip(TEXTS, wanted, strict=True):
        messages = [{"role": "user", "content": text}]
        answer = post(daemon, "/v1/chat/completions", model="chat", messages=messages, max_tokens=20, temperature=0)
        [choice] = answer["choices"]
        said = post(daemon, "/v1/chat/completions", model="guard", messages=messages, max_tokens=1)
        assert said["choices"][0]["finish_reason"] != "content_filter", "the guard itself is not judged"
        if choice["finish_reason"] == "content_filter":
            assert choice["message"]["content"] == ""
        else:
            turns = [*messages, {"role": "assistant", "content": choice["message"]["content"]}]
            assert [is_unsafe, verdict(daemon, turns)] == [False, False]
