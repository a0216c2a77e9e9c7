"""Models of the hub, from a hub on loopback: what is fetched, what is resumed, and one sentence for each fault."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from rich.console import Console

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.hub import transfer
from engine.hub.model import open_model
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.sources.adapter_config import fetch_adapters
from engine.sources.draft_source import fetch_models
from engine.sources.model_source import fetch
from engine.startup.model_check import ModelFacts, check_model
from engine.system.progress import StartupProgress
from tests.fake_hub import COMMIT, FakeHub, digest, fake_hub, refusing_url
from tests.patience import PATIENCE_S

WEIGHTS = bytes(range(256)) * 1200  # 300 KiB, several reads of a connection
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
LLAMA = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIG = {"config.json": json.dumps(LLAMA).encode()}
SMALL = CONFIG | {"tokenizer.json": b"{}", "merges.txt": b"a b", "chat_template.jinja": b"{{ messages }}"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that is the one the libraries know, with an empty cache."""
    with fake_hub() as served:
        point_to(monkeypatch, served.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(transfer, "ANSWER_S", PATIENCE_S)
        open_model.cache_clear()
        yield served


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def again(model: str = "org/model", **more: str) -> Path:
    """Fetch a model as the next start would: nothing is remembered but the cache."""
    open_model.cache_clear()
    return fetch(model, **more)


def raising(error: Exception) -> Callable[..., None]:
    """Return a call that fails."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


def refused(model: str = "org/model", revision: str | None = None) -> str:
    open_model.cache_clear()
    with pytest.raises(ModelLoadError) as refusal:
        fetch(model, revision)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_folder_is_fetched_without_what_it_does_not_need(hub: FakeHub) -> None:
    needed = {**SMALL, "model.safetensors.index.json": INDEX, SHARDS[0]: WEIGHTS, SHARDS[1]: b"b"}
    others = dict.fromkeys(("pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "onnx/model.safetensors", "original/params.json", "README.md", "model.gguf", "x.py", "flax_model.msgpack"), b"not needed")  # fmt: skip
    hub.repos["org/model"] = needed | others
    told: list[Progress] = []
    folder = fetch("org/model", report=told.append)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == needed
    assert hub.named("org/model") == sorted(needed)
    assert hub.requests.count("listing") == 1

    assert "300.2 KiB, from http" in told[0].detail
    total = sum(map(len, needed.values())) - len(INDEX)  # which says what to fetch, so it came before
    assert told[-1] == Progress("download", "", total, total, "bytes")
    done = [progress.done for progress in told[1:]]
    assert done == sorted(done)

    hub.requests.clear()
    assert again() == folder
    assert hub.requests == ["listing"]


def test_without_an_index_one_file_of_weights_is_fetched(hub: FakeHub) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors": WEIGHTS, "model.fp32.safetensors": b"a copy"}
    assert "model.fp32.safetensors" not in {path.name for path in fetch("org/model").iterdir()}


def test_a_gguf_file_is_fetched_by_its_tag_and_a_split_one_whole(hub: FakeHub) -> None:
    parts = {f"Q8_0/m-Q8_0-0000{i}-of-00003.gguf": bytes([i]) * 1000 for i in (1, 2, 3)}
    hub.repos["org/m-GGUF"] = {**CONFIG, "m-Q4_K_M.gguf": WEIGHTS, **parts, "mmproj-m-Q8_0.gguf": b"vision"}
    assert fetch("org/m-GGUF:q4_k_m").read_bytes() == WEIGHTS
    assert hub.named("org/m-GGUF") == ["m-Q4_K_M.gguf"]
    both = fetch("org/m-GGUF:q4_k_m", images=True)
    assert (both.read_bytes(), (both.parent / "mmproj-m-Q8_0.gguf").read_bytes()) == (WEIGHTS, b"vision")
    first = fetch("org/m-GGUF:Q8_0")
    assert first.name == "m-Q8_0-00001-of-00003.gguf"
    assert sorted(path.read_bytes()[0] for path in first.parent.iterdir()) == [1, 2, 3]
    assert again("org/m-GGUF").name == "m-Q4_K_M.gguf"
    assert "'org/m-GGUF' has no GGUF file for 'Q2_K'; it holds m-Q4_K_M.gguf, m-Q8_0-00001" in refused(
        "org/m-GGUF:Q2_K"
    )


def test_a_lost_connection_is_resumed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.repos["org/model"] = {"m.gguf": WEIGHTS}
    hub.faults["m.gguf"] = [("cut", 100_000)]
    told: list[Progress] = []
    assert fetch("org/model", report=told.append).read_bytes() == WEIGHTS
    assert hub.requests == ["listing", "m.gguf", "m.gguf 100000-"]
    assert told[-1].done == told[-1].total == len(WEIGHTS)
    assert "Trying to resume download" in caplog.text


def test_a_large_file_of_another_content_is_refused_and_not_kept(hub: FakeHub) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors": WEIGHTS}
    hub.faults["model.safetensors"] = [("content", b"?" * len(WEIGHTS))]
    answer = refused()
    assert "sends a content of the digest " in answer
    assert f" for model.safetensors of 'org/model', which it lists with {digest(WEIGHTS)}" in answer
    assert (again() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_of_another_size_is_refused_and_not_kept(hub: FakeHub) -> None:
    hub.repos["org/model"] = {"m.gguf": WEIGHTS}
    hub.faults["m.gguf"] = [("size", 1000)]
    assert f"file should be of size {len(WEIGHTS)} but has size 1000" in refused()
    assert again().read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (503, "answers HTTP 503, so 'org/model' cannot be fetched; try again later"),
        (500, "answers HTTP 500"),
        (429, "has had too many requests from here"),
        (403, "refuses 'org/model' (HTTP 403); set HF_TOKEN"),
        ("html", "does not answer as a model hub does"),
    ],
)
def test_a_hub_that_fails_is_one_sentence_after_one_request(hub: FakeHub, fault: int | str, sentence: str) -> None:
    hub.repos["org/model"] = {"m.gguf": WEIGHTS}
    hub.faults["listing"] = [fault] * 3
    assert sentence in refused()
    assert hub.requests == ["listing"]


def test_a_hub_that_hangs_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transfer.ANSWER_S == PATIENCE_S
    monkeypatch.undo()
    assert transfer.ANSWER_S <= 4  # with a second for Python's own start: 5 s until the sentence
    point_to(monkeypatch, hub.url)
    monkeypatch.setattr(transfer, "ANSWER_S", 0.05)
    hub.faults["listing"] = ["hang"] * 3
    assert "cannot be reached (timed out), so 'org/model' cannot be fetched; check the network" in refused()
    assert hub.requests == ["listing"]


def test_a_hub_that_is_away(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_url() as url:
        point_to(monkeypatch, url)
        assert f"The hub at {url} cannot be reached (Connection refused)" in refused()


def test_ids_and_tokens_that_are_wrong(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos |= {"org/model": {"m.gguf": WEIGHTS}, "org/gated": {"m.gguf": WEIGHTS}}
    hub.gated.add("org/gated")
    assert "'org/modle' is not on http" in refused("org/modle")
    assert "or private, which needs a token in HF_TOKEN; check the spelling" in refused("org/modle")
    assert "'modle' is not on http" in refused("modle")
    assert "ids have two parts, as Qwen/Qwen3-0.6B has" in refused("modle")
    assert "--revision is 'v9', which 'org/model' does not have" in refused("org/model", "v9")
    assert f"'org/gated' is gated: accept its terms at {hub.url}/org/gated, and set HF_TOKEN" in refused("org/gated")
    assert "'a model!' is neither a local path nor a Hugging Face id such as" in refused("a model!")
    hub.token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "or the token in use may not read it" in refused()
    assert "is gated" in refused("org/gated") or "may not read it" in refused("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert again().read_bytes() == WEIGHTS
    assert "Bearer hf_right" in hub.authorizations


def test_offline_the_cache_serves(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors.index.json": INDEX, SHARDS[0]: WEIGHTS, SHARDS[1]: b"b"}
    hub.repos["org/gguf"] = {"m-Q8_0.gguf": WEIGHTS}
    folder, file = fetch("org/model"), fetch("org/gguf")
    hub.requests.clear()
    hub.faults["listing"] = [503]
    assert again() == folder
    assert "Its cached copy is served, of commit 0123456" in caplog.text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    caplog.clear()
    assert again() == folder
    assert again(revision=COMMIT) == folder
    assert again("org/gguf:Q8_0") == file
    assert caplog.text == ""
    assert hub.requests == ["listing"]
    assert "The cached copy of 'org/gguf' in" in refused("org/gguf:Q4_0")
    (folder / SHARDS[1]).unlink()
    assert f"lacks {SHARDS[1]}, without which it cannot be served; start once with the hub in reach" in refused()
    assert "HF_HUB_OFFLINE is set, and 'org/other' is not in the cache" in refused("org/other")


def test_a_copy_of_the_config_alone_is_no_copy_of_the_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors": WEIGHTS}
    fetch("org/model", weights=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "lacks model.safetensors, without which it cannot be served" in refused()


def test_a_full_disk_is_said_before_and_while_it_fills(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/model"] = {"m.gguf": WEIGHTS}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
        assert "'org/model' needs 300.0 KiB more in" in refused()
        assert "where 1000 B are free; free some space, or name another folder with --download-dir" in refused()
    assert "m.gguf" not in hub.requests
    monkeypatch.setattr(transfer, "hf_hub_download", raising(OSError(errno.ENOSPC, "No space left on device")))
    assert "cache is full; free some space, or name another folder with --download-dir" in refused()


def test_the_folder_for_models_is_a_setting(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/model"] = {"m.gguf": WEIGHTS}
    assert tmp_path / "here" in again(download_dir=str(tmp_path / "here")).parents
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match=r"file cannot be written: .*; name another folder with --download-dir"):
        again(download_dir=str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["../../x.gguf", "/etc/x.gguf"])
def test_a_hub_cannot_name_files_outside_of_the_cache(hub: FakeHub, name: str) -> None:
    hub.repos["org/model"] = {**SMALL, name: WEIGHTS}
    assert "does not answer as a model hub does (Invalid filename" in refused()


def test_an_unservable_model_is_refused_by_its_config_alone(hub: FakeHub) -> None:
    hub.repos["org/albert"] = {**SMALL, "config.json": b'{"model_type": "albert"}', "model.safetensors": WEIGHTS}
    with pytest.raises(ModelLoadError, match=r"^org/albert/config.json: 'albert' is an encoder"):
        check_model(EngineConfig(model="org/albert"))
    assert hub.requests == ["listing", "config.json"]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("foo_bar", "knows the kind 'foo_bar'; serve a model of another family, such as Llama"),
        (
            "clip_text_model",
            "transformers has no causal language model for 'clip_text_model'; serve a model of another",
        ),
    ],
)
def test_a_kind_that_transformers_cannot_serve_is_refused_before_weights(
    hub: FakeHub, kind: str, sentence: str
) -> None:
    from engine.startup.build import check_foreign  # torch

    config = json.dumps({"model_type": kind}).encode()
    hub.repos["org/model"] = {**SMALL, "config.json": config, "model.safetensors": WEIGHTS}
    asked = EngineConfig(model="org/model")
    assert not check_model(asked).is_native
    with pytest.raises(ModelLoadError) as refusal:
        check_foreign(asked)
    assert sentence in str(refusal.value)
    assert hub.requests == ["listing", "config.json"]


def test_a_length_is_checked_before_weights_are_fetched(hub: FakeHub) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors": WEIGHTS}
    with pytest.raises(ConfigError, match="made for 64 positions"):
        check_model(EngineConfig(model="org/model", max_model_len=65))
    assert hub.requests == ["listing", "config.json"]


def gguf_header(kind: int = 8, pre: str = "qwen2", num_layers: int = 1, **more: str) -> bytes:
    """The header of a GGUF file of the size of LLAMA, with tensors of one type."""
    texts = {"general.architecture": "qwen2", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, **more}
    numbers = {
        "block_count": num_layers, "embedding_length": 32, "feed_forward_length": 64, "context_length": 64,
        "attention.head_count": 4,
    }  # fmt: skip
    names = ["token_embd.weight", "output_norm.weight"]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(texts) + len(numbers) + 2)
    for key, value in texts.items():
        head += text(key) + struct.pack("<I", 8) + text(value)
    for key, number in numbers.items():
        head += text(f"qwen2.{key}") + struct.pack("<II", 4, number)
    head += text("qwen2.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)
    head += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 20_000) + text("word") * 20_000
    for name in names:
        head += text(name) + struct.pack("<IQQIQ", 2, 32, 32, kind, 0)
    return head


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported in GGUF"),
        ({"kind": 33}, "tensor 'token_embd.weight' is stored as type 33, which ggml has removed; Quire reads F32"),
        ({"kind": 99}, "tensor 'token_embd.weight' is stored as type 99, which is unknown; Quire reads F32"),
        ({"pre": "viking"}, "unsupported kind gpt2 with pre-tokenizer 'viking'; name the model's Hugging Face folder"),
        ({"num_layers": 0}, "'block_count' is 0; Quire needs an integer of at least 1"),
    ],
)
def test_an_unservable_gguf_file_is_refused_by_its_header(hub: FakeHub, head: dict[str, Any], sentence: str) -> None:
    content = gguf_header(**head) + WEIGHTS
    hub.repos["org/gguf"] = {"m-Q4_K_M.gguf": content}
    with pytest.raises(ModelLoadError) as refusal:
        check_model(EngineConfig(model="org/gguf"))
    assert sentence in str(refusal.value)
    assert hub.requests == ["listing", f"m-Q4_K_M.gguf 0-{(1 << 25) - 1}"]


def test_what_a_header_on_the_hub_says_of_the_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a split file the other parts decide, too; a slow hub is not waited for."""
    hub.repos["org/gguf"] = {"m-Q4_K_M.gguf": gguf_header() + WEIGHTS}
    config = EngineConfig(model="org/gguf")
    found = check_model(config).config
    assert found is not None
    assert (found.vocab_size, found.max_positions) == (32, 64)
    with pytest.raises(ConfigError, match="made for 64 positions"):
        check_model(replace(config, max_model_len=65))
    hub.repos["org/gguf"] = {"m-Q4_K_M.gguf": gguf_header(pre="viking") + WEIGHTS}
    assert check_model(config, has_tokenizer=True).config == found
    monkeypatch.setattr("engine.hub.model._HEADER_S", -1)
    assert check_model(config) == ModelFacts(True)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({**CONFIG, "pytorch_model.bin": b""}, "holds only pickled weights .pytorch_model.bin., which can run code"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "is an adapter; serve the model that"),
        ({"model.safetensors": b""}, "has no config.json; name a repository of a language model"),
        ({"README.md": b""}, "holds no .safetensors or .gguf file"),
    ],
)
def test_repositories_without_a_model(hub: FakeHub, files: dict[str, bytes], sentence: str) -> None:
    hub.repos["org/model"] = files
    with pytest.raises(ModelLoadError, match=sentence):
        check_model(EngineConfig(model="org/model"))
    assert {"pytorch_model.bin", "model.safetensors"}.isdisjoint(hub.requests)


def test_a_draft_model_is_fetched_too(hub: FakeHub) -> None:
    hub.repos["org/model"] = {**SMALL, "model.safetensors": WEIGHTS}
    hub.repos["org/draft"] = {**SMALL, "model.safetensors": b"draft"}
    config = EngineConfig(model="org/model", speculative_config={"model": "org/draft", "num_speculative_tokens": 3})
    fetched = fetch_models(config, lambda _: None)
    assert fetched.speculation is not None
    assert fetched.speculation.num_speculative_tokens == 3
    assert Path(str(fetched.speculation.model), "model.safetensors").read_bytes() == b"draft"
    assert Path(fetched.model).name == COMMIT
    assert fetch_models(fetched, lambda _: None) is fetched
    with pytest.raises(
        ModelLoadError, match="--speculative-config: the draft model could not be loaded: 'org/none' is"
    ):
        fetch_models(EngineConfig(model="org/model", speculative_config={"model": "org/none"}), lambda _: None)


def test_adapters_are_fetched_by_their_ids(hub: FakeHub, tmp_path: Path) -> None:
    """Of a repository the config is checked first, and nothing but the adapter is fetched."""
    adapter = {"adapter_config.json": b'{"peft_type": "LORA", "r": 4}', "adapter_model.safetensors": WEIGHTS}
    hub.repos |= {
        "org/model": {**SMALL, "model.safetensors": b"m"},
        "org/lora": {**adapter, "README.md": b"not needed"},
    }
    config = EngineConfig(model="org/model", lora_modules=(LoraModule("a", "org/lora"),))
    check_model(config)
    assert hub.named("org/lora") == ["adapter_config.json", "config.json"]
    (found,) = fetch_models(config, lambda _: None).lora_modules
    assert found.name == "a"
    assert {path.name: path.read_bytes() for path in Path(found.path).iterdir()} == adapter
    fetched = replace(config, model=str(tmp_path), lora_modules=(found,), load_format="dummy")
    assert fetch_adapters(fetched, lambda _: None) is fetched


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "--lora-modules has a=org/lora: 'org/lora' is not on http"),
        ({"model.safetensors": b""}, "'org/lora' lacks adapter_model.safetensors, without which it cannot be served"),
        ({"adapter_model.bin": b""}, "'org/lora' holds only pickled weights (adapter_model.bin), which can run code"),
        (
            {"adapter_config.json": b'{"peft_type": "IA3"}', "adapter_model.safetensors": WEIGHTS},
            "--lora-modules has a=org/lora: ",
        ),
    ],
)
def test_repositories_without_an_adapter(hub: FakeHub, files: dict[str, bytes] | None, sentence: str) -> None:
    if files is not None:
        hub.repos["org/lora"] = files
    hub.repos["org/model"] = {**SMALL, "model.safetensors": b"m"}
    with pytest.raises(ConfigError) as refusal:
        check_model(EngineConfig(model="org/model", lora_modules=(LoraModule("a", "org/lora"),)))
    assert sentence in str(refusal.value)
    assert "adapter_model.safetensors" not in hub.requests


def test_without_a_terminal_a_long_stage_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with (
        caplog.at_level(logging.INFO, "quire.startup"),
        StartupProgress(show_bars=False, clock=lambda: now[0]) as startup,
    ):
        for done, at in ((0, 0.0), (1, 1.0), (5, 11.0), (6, 12.0), (10, 13.0), (10, 14.0)):
            now[0] = at
            startup.report(Progress("download", "", done << 20, 10 << 20, "bytes"))
    assert [record.getMessage() for record in caplog.records] == [
        "download: 5.0 MiB of 10.0 MiB",
        "download: 10.0 MiB of 10.0 MiB",
    ]


def test_on_a_terminal_a_bar_goes_when_its_stage_is_complete(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = Console(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("rich.console.Console", lambda **_: screen)
    with caplog.at_level(logging.INFO, "quire.startup"), StartupProgress(show_bars=True) as startup:
        startup.report(Progress("download", "", 6 << 20, 10 << 20, "bytes"))
        for stage in ("download", "download", "weights"):
            startup.report(Progress(stage, "", 10 << 20, 10 << 20, "bytes"))
        startup.report(Progress("warm_up", "", 1 << 20, 10 << 20, "bytes"))
    assert isinstance(screen.file, StringIO)
    last = screen.file.getvalue().rpartition("1.0 MiB of 10.0 MiB")[0]
    assert "6.0 MiB of 10.0 MiB" in last
    assert "10.0 MiB of 10.0 MiB" not in last
    assert [record.getMessage() for record in caplog.records] == [
        "download: 10.0 MiB of 10.0 MiB",
        "weights: 10.0 MiB of 10.0 MiB",
    ]
