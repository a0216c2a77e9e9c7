"""Models that requests load and that leave again, in the real daemon: answers, memory, and blocks on disk."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.errors import ConfigError
from loadtest.peers.process import rss_bytes
from server.plan import prepare_all
from server.settings.flags import load_settings
from tests.cpu.served_models import save_servable, say
from tests.cpu.test_models_families import Case
from tests.daemon.real_daemon import Daemon, refusal, serve
from tests.patience import eventually

SHARED = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--kv-cache-memory-bytes", "8MiB")
PROMPT = say(torch.arange(3, 43))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("models") / name for name in ("kept", "wide", "slim")}
    for (name, folder), head_dim in zip(made.items(), (16, 32, 8), strict=True):
        folder.mkdir()
        save_servable(Case("LlamaConfig", {"head_dim": head_dim}), folder)
        assert folder.name == name
    return made


@pytest.fixture(scope="module")
def daemon(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.mktemp("config")
    (root / "blocks").mkdir()
    (root / "quire.yaml").write_text(
        f"models:\n- {{model: {folders['kept']}, keep: true}}\n- model: {folders['wide']}\n"
        f"  kv-offload-config: {{host_gib: 0.01, folder: {root / 'blocks'}, disk_gib: 0.1}}\n"
        f"- model: {folders['slim']}\nmodels-max: 2\n"
    )
    with serve("--config", root / "quire.yaml", *SHARED) as daemon:
        yield daemon


def test_answers_are_the_same_after_models_have_left(daemon: Daemon) -> None:
    names = ["kept", "wide", "slim"]
    first = {name: daemon.text(PROMPT, model=name) for name in names}
    with ThreadPoolExecutor(6) as pool:
        asked = names * 6
        assert list(pool.map(lambda name: daemon.text(PROMPT, model=name), asked)) == [first[name] for name in asked]
    assert daemon.metric("quire_model_loads_total", model_name="kept") == 1
    assert daemon.metric("quire_model_loads_total", model_name="wide") > 1


def test_blocks_are_found_on_disk_when_a_model_comes_back(daemon: Daemon) -> None:
    prompt = say(torch.arange(50, 90))
    daemon.text(prompt, model="wide")

    def fetched() -> float:  # since it was loaded
        return daemon.metric("quire_kv_offload_blocks_total", direction="fetch", model_name="wide")

    for _ in range(2):
        assert daemon.http.post("/v1/models/wide/unload").json() == {"value": "unloaded"}
        daemon.text(prompt, model="wide")
        # A prompt does not wait for a busy disk for long, but its blocks come all the same.
        eventually(lambda: fetched() == 2)


def test_memory_is_given_back(daemon: Daemon) -> None:
    def cycle() -> None:
        for name in ("wide", "slim"):
            daemon.text(PROMPT, model=name)
            daemon.http.post(f"/v1/models/{name}/unload")

    for _ in range(5):
        cycle()
    before = rss_bytes(daemon.pid)
    for _ in range(25):
        cycle()
    assert rss_bytes(daemon.pid) < before + (12 << 20)


def test_a_model_that_cannot_be_loaded_is_alone_in_that(daemon: Daemon, folders: dict[str, Path]) -> None:
    daemon.http.post("/v1/models/slim/unload")
    weights = folders["slim"] / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    refused = daemon.http.post("/v1/completions", json={"model": "slim", "prompt": "w5"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_failed"
    assert daemon.text(PROMPT, model="kept")
    weights.write_bytes(content)
    assert daemon.http.post("/v1/models/slim/load").json() == {"value": "loaded"}
    assert daemon.text(PROMPT, model="slim")


def test_a_file_of_a_folder_that_is_no_model_is_left_out(folders: dict[str, Path], tmp_path: Path, caplog: Any) -> None:
    for name, folder in folders.items():
        (tmp_path / name).symlink_to(folder)
    (tmp_path / "other.gguf").write_bytes(b"no GGUF")
    plans = prepare_all(load_settings(["--models-dir", str(tmp_path), *SHARED]))
    assert [plan.name for plan in plans] == ["kept", "slim", "wide"]
    assert "other is left out: " in caplog.text
    (empty := tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="has no model that can be served"):
        prepare_all(load_settings(["--models-dir", str(empty), *SHARED]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--keep", "other"), "--keep names 'other', which is no model here; the models are kept, wide."),
        (("--models-memory", "10MiB"), "and 10.0 MiB are there (--models-memory): kept 8."),
        (("--models-memory", "10MiB", "--keep", "kept"), "The models that are loaded at once need 1"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(folders["kept"], folders["wide"], *SHARED, *words)
