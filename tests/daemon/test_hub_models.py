"""`quire serve` with the id of a model on a hub, on loopback: the names, the log lines, and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_daemon import SMALL, refusal, serve

from engine.sources.model_source import find_model
from tests.fake_hub import fake_hub, refusing_url


def test_a_gguf_repository_is_served_by_its_tag(tmp_path: Path) -> None:
    content = Path(find_model(None).path).read_bytes()
    with fake_hub() as hub:
        hub.repos["org/Smol-GGUF"] = {"m.Q4_1.gguf": content, "m.Q8_0.gguf": b"not asked for"}
        hub.faults["m.Q4_1.gguf"] = [None, ("cut", 30 << 20)]  # after the first bytes, by which it is checked
        argv = ("-hf", "org/Smol-GGUF:Q4_1", *SMALL, "--download-dir", tmp_path, "--hf-token", "hf_secret")
        with serve(*argv, HF_ENDPOINT=hub.url) as daemon:
            (model,) = daemon.http.get("/v1/models").json()["data"]
            assert (model["id"], model["root"]) == ("org/Smol-GGUF:Q4_1", "org/Smol-GGUF:Q4_1")
            assert daemon.text(model=model["id"])
    assert hub.requests[:2] == ["listing", f"m.Q4_1.gguf 0-{(1 << 25) - 1}"]
    assert len(hub.requests) == 4  # the file, and the rest of it
    assert {"Bearer hf_secret"} == hub.authorizations
    assert "loading org/Smol-GGUF:Q4_1\n" in daemon.written
    assert f"download: m.Q4_1.gguf, 93.8 MiB, from {hub.url} to {tmp_path}\n" in daemon.written
    assert "download: 93.8 MiB of 93.8 MiB\n" in daemon.written
    assert "Trying to resume download" in daemon.written
    assert "hf_secret" not in daemon.written


def test_a_hub_that_is_away_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with refusing_url() as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert f"The hub at {url} cannot be reached (Connection refused)" in refusal("org/model")
