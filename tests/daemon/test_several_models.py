"""One daemon of several models: each request goes to the one it names, and each answer is what that one gives alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.system.cache_folder import cache_folder
from quire import LLM, SamplingParams
from tests.cpu.served_models import save_servable, say
from tests.cpu.test_models_families import Case
from tests.daemon.real_daemon import Daemon, refusal, serve
from tests.patience import eventually

KINDS = {"llama": Case("LlamaConfig"), "wide": Case("LlamaConfig", {"head_dim": 32})}
PROMPTS = [say(torch.arange(3 + i, 23 + i)) for i in range(0, 40, 4)]
SHARED = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "8MiB")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in KINDS}
    for name, case in KINDS.items():
        save_servable(case, made[name])
    (made["wide"] / "chat_template.jinja").write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    return made


@pytest.fixture(scope="module")
def daemon(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("config")
    file, fitted = root / "quire.yaml", root / "quire" / "foreseen.json"
    fitted.parent.mkdir()
    for each in cache_folder().glob("compiled-*"):
        (fitted.parent / each.name).symlink_to(each)
    fitted.write_text(json.dumps({str(folders["wide"]): "foreseen by quire fit: it is small"}))
    file.write_text(
        f"models:\n- model: {folders['llama']}\n  served-model-name: [llama, lama-*]\n"
        f"- model: {folders['wide']}\n  served-model-name: wide\n  max-model-len: 48\n"
    )
    with serve("--config", file, *SHARED, XDG_CACHE_HOME=str(root)) as daemon:
        yield daemon


def alone(folder: Path) -> list[list[int]]:
    llm = LLM(str(folder), dtype="float32", num_threads=1, kv_cache_memory_bytes=8 << 20, device="cpu")
    with llm:
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    return [list(answer.outputs[0].token_ids) for answer in answers]


def test_answers_of_both_at_the_same_time_are_those_of_each_alone(daemon: Daemon, folders: dict[str, Path]) -> None:
    def ask(asked: tuple[str, str]) -> list[int]:
        name, prompt = asked
        answer = daemon.complete(prompt, model=name, max_tokens=24, return_token_ids=True)
        assert answer["model"] == name
        return answer["choices"][0]["token_ids"]

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, [(name, prompt) for prompt in PROMPTS for name in KINDS]))
    assert got[::2] == alone(folders["llama"])
    assert got[1::2] == alone(folders["wide"])
    assert got[::2] != got[1::2]


def test_every_endpoint_takes_the_model_that_is_named(daemon: Daemon) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = daemon.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    lengths = {name: post("/tokenize", prompt="w5 w6", model=name)["max_model_len"] for name in ("lama-2", "wide")}
    assert lengths["wide"] == 48 < lengths["lama-2"]
    assert post("/tokenize", prompt="w5")["max_model_len"] == lengths["lama-2"]
    vectors = [post("/v1/embeddings", input="w5 w6", model=name)["data"][0]["embedding"] for name in KINDS]
    assert vectors[0] != vectors[1]
    scores = [post("/v1/score", text_1="w5 w6", text_2="w7 w8", model=name)["data"][0]["score"] for name in KINDS]
    assert scores[0] != scores[1]
    refused = daemon.http.post("/v1/completions", json={"prompt": say(torch.arange(3, 73)), "model": "wide"})
    assert "48" in refused.json()["error"]["message"]


def test_the_daemon_says_what_it_has(daemon: Daemon) -> None:
    cards = daemon.http.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["llama", "wide"]
    assert cards[1]["max_model_len"] == 48
    assert daemon.http.get("/v1/models/wide").json() == cards[1]
    unknown = daemon.http.post("/v1/completions", json={"prompt": "w5", "model": "other"})
    assert unknown.status_code == 404
    assert "use llama or lama-* or wide" in unknown.json()["error"]["message"]
    eventually(lambda: "wide, foreseen by quire fit: it is small\n" in daemon.written)
    assert "wide, tool calls: hermes format, tools listed in the system message" in daemon.written
    before = daemon.metric("quire_generation_tokens_total", model_name="wide")
    daemon.complete("w5", model="wide")
    assert daemon.metric("quire_generation_tokens_total", model_name="wide") == before + 8
    text = daemon.http.get("/metrics").text
    assert text.count("# TYPE quire_generation_tokens_total ") == 1
    for name in KINDS:
        assert daemon.http.get("/health", params={"model": name}).status_code == 200
        assert daemon.http.get("/v1/engine/live", params={"model": name}).status_code == 200
    assert daemon.http.get("/health", params={"model": "other"}).status_code == 404
    assert daemon.http.get("/v1/requests").json()["data"][-1]["model"] is not None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("{llama}", "{llama}"), "' stands twice; give one model another served-model-name."),
        (("{llama}", "{wide}", "--served-model-name", "a"), "--models does not go with"),
        (("{llama}", "{wide}", "--record", "file"), "serve such a model alone"),
        (("{llama}", "/nowhere/at/all"), "/nowhere/at/all"),
        (("{llama}", "{wide}", "--guard", "other"), "'other', which is no model here"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*(word.format(**folders) for word in words))


@pytest.mark.parametrize("flag", ["--model", "--served-model-name", "--lora-modules"])
def test_a_name_in_answers_is_text(flag: str, folders: dict[str, Path], tmp_path: Path) -> None:
    odd = tmp_path / "\udcff"
    odd.symlink_to(folders["llama"])
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (tmp_path / "adapter_model.safetensors").touch()
    words = [flag, odd] if flag == "--model" else [folders["llama"], flag, f"a\udcff={tmp_path}"]
    assert "is not UTF-8, and answers name it" in refusal(*words)


def test_an_adapter_is_no_guard(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (tmp_path / "adapter_model.safetensors").touch()
    sentence = refusal(folders["llama"], "--lora-modules", f"one={tmp_path}", "--guard", "one")
    assert "--guard is 'one', which is no model here" in sentence


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("{port: 1}", "must be a model, or a mapping with a key model"),
        ("{model: a, port: 1}", "which is not a setting of one model"),
        ("{model: a, max-model-lem: 1}", "did you mean max-model-len"),
        ("{model: a, keep: b}", "has keep: 'b'; it must be true or false."),
        ("{model: a, max-model-len: none}", "--max-model-len is 'none' (set by models, item 1)"),
    ],
)
def test_a_wrong_item_is_named(item: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(f"models: [{item}]\n")
    assert sentence in refusal("--config", file)


@pytest.mark.parametrize("key", ["portable-bits: true", "cpu-kernels: portable", "num-threads: 1"])
def test_kernels_are_those_of_all_models(key: str, folders: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(f"device: cpu\nmodels: [{{model: {folders['llama']}, {key}}}, {folders['wide']}]\n")
    assert "set it once, beside models" in refusal("--config", file)
