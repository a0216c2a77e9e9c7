"""Checkpoints without an LM head, as large embedders are published: vectors are served, and generation is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from engine.core.errors import ConfigError, HeadlessModelError, ModelLoadError
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from engine.startup.model_check import check_model
from engine.text.tokenizer_files import load_tokenizer
from quire import LLM
from server.app import create_app
from server.settings.app_config import AppConfig
from tests.cpu.served_models import save_tokenizer, say
from tests.cpu.test_models_families import Case
from tests.daemon.real_daemon import refused

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 8 << 20, "device": "cpu"}
KINDS = {  # the class of the body, its config, whether the config names the causal class, as Qwen3-Embedding-8B's does
    "qwen3": ("Qwen3Model", Case("Qwen3Config", {"head_dim": 32}), False),
    "qwen3-named-causal": ("Qwen3Model", Case("Qwen3Config", {"head_dim": 32}), True),
    "mistral": ("MistralModel", Case("MistralConfig", {"sliding_window": 8}), False),
    "llama": ("LlamaModel", Case("LlamaConfig"), False),
}
TEXTS = [say(torch.arange(3, 25)), "w9", say(torch.arange(60, 90))]
GENERATING = {
    "/v1/completions": {"prompt": "w5 w6"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}]},
    "/v1/responses": {"input": "w5"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "w5"}]},
}


def save(folder: Path, name: str, prefix: str = "") -> Any:
    body, case, is_causal = KINDS[name]
    torch.manual_seed(0)
    model = getattr(transformers, body)(case.build()).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == [body]
    assert values.get("tie_word_embeddings", False) is False
    if is_causal:
        values["architectures"] = [body.replace("Model", "ForCausalLM")]
        (folder / "config.json").write_text(json.dumps(values))
    change(folder, lambda tensors: {prefix + key: value for key, value in tensors.items()})
    return model


def change(folder: Path, edit: Any) -> None:
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


def expected(model: Any, text: str) -> list[float]:
    ids = [2 if word == "</s>" else int(word[1:]) for word in text.split()]
    with torch.no_grad():
        state = model(torch.tensor([ids])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(state, dim=0).tolist()


@pytest.fixture
def http(tmp_path: Path) -> Iterator[tuple[TestClient, Any]]:
    model = save(tmp_path, "qwen3")
    engine = build_engine(EngineConfig(model=str(tmp_path), **SETTINGS), lambda _: None)
    app = AppConfig(model=str(tmp_path), served_model_names=("body",), shutdown_timeout_s=0.0)
    with TestClient(create_app(engine, load_tokenizer(str(tmp_path)), app), base_url="http://127.0.0.1") as client:
        yield client, model


def test_vectors_are_served_and_generation_is_refused(http: tuple[TestClient, Any]) -> None:
    client, model = http
    data = client.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    for text, entry in zip(TEXTS, data, strict=True):
        assert entry["embedding"] == pytest.approx(expected(model, text), abs=1e-5)
    for path, body in GENERATING.items():
        for more in ({}, {"stream": True}):
            answer = client.post(path, json=body | more)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, str(HeadlessModelError()))
    scored = client.post("/v1/completions", json={"prompt": "w5 w6", "echo": True, "max_tokens": 0, "logprobs": 1})
    assert scored.status_code == 400
    assert client.get("/model_info").json()["is_generation"] is False
    assert client.get("/health").status_code == 200


def test_a_score_is_the_cosine_of_two_vectors(http: tuple[TestClient, Any]) -> None:
    client, model = http
    first, *seconds = (torch.tensor(expected(model, text)) for text in TEXTS)
    cosines = [float(first @ second) for second in seconds]
    for texts in (TEXTS[0], [TEXTS[0]] * 2):
        answer = client.post("/v1/score", json={"text_1": texts, "text_2": TEXTS[1:]}).json()
        assert [entry["score"] for entry in answer["data"]] == pytest.approx(cosines, abs=1e-5)
    refused = client.post("/v1/score", json={"text_1": "w5", "text_2": "w6", "reduction": "sum"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "reduction")


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", KINDS)
def test_offline_and_with_either_spelling_of_tensors(name: str, prefix: str, tmp_path: Path) -> None:
    model = save(tmp_path, name, prefix)
    if prefix and KINDS[name][2]:  # a causal model's own layout: its head is missing
        with pytest.raises(ModelLoadError, match=r"it lacks 'lm_head\.weight'"):
            check_model(EngineConfig(model=str(tmp_path)))
        return
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for found, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
            assert found.outputs.embedding == pytest.approx(expected(model, text), abs=1e-5)
        with pytest.raises(HeadlessModelError):
            llm.generate("w5")
        with pytest.raises(HeadlessModelError):
            llm.chat([{"role": "user", "content": "w5"}])
        first, second = (torch.tensor(expected(model, text)) for text in TEXTS[:2])
        assert llm.score(TEXTS[0], TEXTS[1])[0].outputs.score == pytest.approx(float(first @ second), abs=1e-5)


def test_a_body_tied_to_its_embedding_generates(tmp_path: Path) -> None:
    case = Case("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True})
    torch.manual_seed(0)
    transformers.Qwen3Model(case.build()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert len(llm.generate("w5 w6")[0].outputs[0].token_ids) > 0


def test_nothing_is_drafted_for_a_model_without_a_head(tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    ngrams = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="has no LM head, so it generates none"):
        build_engine(EngineConfig(model=str(tmp_path), speculative_config=ngrams, **SETTINGS), lambda _: None)


LACKING = {
    "layers.1.self_attn.q_proj.weight": "it lacks 'model.layers.1.self_attn.q_proj'",
    "layers.2": "it lacks 'model.layers.2.",
    "embed_tokens": r"it lacks 'model.embed_tokens.weight'",
    "norm.weight": r"it lacks 'model.norm.weight'",
}


@pytest.mark.parametrize("name", LACKING)
def test_missing_tensors_are_named_before_torch(name: str, tmp_path: Path) -> None:
    save(tmp_path, "qwen3")
    change(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if not key.startswith(name)})
    with pytest.raises(ModelLoadError) as error:
        check_model(EngineConfig(model=str(tmp_path)))
    assert LACKING[name] in str(error.value)


def test_the_daemon_refuses_a_checkpoint_without_its_head_before_torch(tmp_path: Path) -> None:
    save(tmp_path, "qwen3-named-causal", "model.")
    status, written = refused(str(tmp_path), PYTHONPROFILEIMPORTTIME="1")
    assert status != 0
    assert "it lacks 'lm_head.weight'" in written
    assert "import time" in written
    assert re.search(r"\| +torch\n", written) is None
