"""--weights-cache: packed matrices are mapped by the next start, and packed again where the file is of no use."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.runtime.models.load import load_model
from engine.runtime.native.library import native
from engine.runtime.native.ops import NativeLinear
from engine.settings.engine_config import EngineConfig
from engine.startup.ahead import begin_weights
from engine.startup.build import _weights_in
from tests.cpu.test_ahead import packed
from tests.cpu.test_weights_gguf import tiny, write

pytestmark = pytest.mark.skipif(native() is None, reason="no native library")

NUM_MATRICES = 2 * 4 + 1  # of two layers, and the head, which is the embedding
Load = Callable[[EngineConfig], tuple[int, list[bytes]]]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    theirs, tensors = tiny(tmp_path / "hf", num_hidden_layers=2)
    stored = {name: (values, Kind.Q8_0 if values.ndim > 1 else Kind.F32) for name, (values, _) in tensors.items()}
    model = write(tmp_path / "model.gguf", "llama", theirs.config, stored)
    return EngineConfig(model=str(model), device="cpu", weights_cache=str(tmp_path / "cache"))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A start, which leaves its file behind: how many matrices it packed, and what all are."""
    filled = []
    fill = NativeLinear._fill

    def note(self: NativeLinear, parts: object) -> None:
        filled.append(self)
        fill(self, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLinear, "_fill", note)

    def start(config: EngineConfig) -> tuple[int, list[bytes]]:
        filled.clear()
        place = begin_weights(config)
        with _weights_in(place):
            model = load_model(config, torch.device("cpu"), torch.float32, lambda _: None)
        if place.kept is not None and not place.kept.is_complete:
            place.kept.write()
        return len(filled), packed(model)

    return start


def kept(config: EngineConfig) -> Path:
    [path] = Path(str(config.weights_cache)).iterdir()
    return path


def test_the_next_start_packs_nothing_and_has_the_same_bytes(config: EngineConfig, load: Load) -> None:
    num_packed, first = load(config)
    assert num_packed == len(first) > NUM_MATRICES - 1
    assert kept(config).stat().st_mode & 0o777 == 0o600
    assert load(config) == (0, first)
    assert load(replace(config, weights_cache=None)) == (num_packed, first)
    assert load(replace(config, cpu_kernels="portable"))[0] == num_packed  # has a file beside the first
    assert load(config) == (0, first)


@pytest.mark.parametrize("begin", [0, 20, 100, 2 << 20, -100, None])
def test_a_damaged_file_is_made_again(begin: int | None, config: EngineConfig, load: Load) -> None:
    """Also one that is cut, which would end the process where a page is read."""
    num_packed, first = load(config)
    path = kept(config)
    content = bytearray(path.read_bytes())
    if begin is None:
        del content[-4096:]
    else:
        content[begin : begin + 8] = bytes(byte ^ 1 for byte in content[begin : begin + 8])
    path.write_bytes(content)
    again, second = load(config)
    assert again > 0
    assert second == first
    assert load(config) == (0, first)
    assert kept(config).stat().st_size > len(content) - 1
    assert num_packed >= again


def test_another_content_of_the_model_is_packed(config: EngineConfig, load: Load) -> None:
    num_packed, first = load(config)
    model, content = Path(config.model), bytearray(Path(config.model).read_bytes())
    before = model.stat()
    content[-64:] = bytes(64)
    model.unlink()
    model.write_bytes(content)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    again, second = load(config)
    assert again == num_packed
    assert second != first
    assert load(config) == (0, second)


@pytest.mark.parametrize("what", ["mode", "owner", "link"])
def test_a_file_of_another_user_is_not_read(
    what: str, config: EngineConfig, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_packed, first = load(config)
    path = kept(config)
    if what == "mode":
        path.chmod(0o620)
    elif what == "owner":
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        path.rename(path.parent.parent / "elsewhere")
        path.symlink_to(path.parent.parent / "elsewhere")
    assert load(config) == (num_packed, first)
    assert "is not used, and made again" in caplog.text


def test_files_that_were_used_longest_ago_go(
    config: EngineConfig, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(config)
    first, size = kept(config), kept(config).stat().st_size
    os.utime(first, (1, 1))
    other = replace(config, cpu_kernels="portable", weights_cache_size=size + size // 2)
    load(other)
    assert kept(config) != first
    (tmp_path / "small").mkdir()
    small = replace(config, weights_cache=str(tmp_path / "small"), weights_cache_size=size - 1)
    load(small)
    assert not list((tmp_path / "small").iterdir())
    assert f"they take {size} bytes, and --weights-cache-size is {size - 1}" in caplog.text


@pytest.mark.parametrize("fault", ["full", "folder"])
def test_a_folder_that_cannot_be_written_to_costs_a_line(
    fault: str, config: EngineConfig, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(str(config.weights_cache))
    if fault == "full":

        def allocate(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", allocate)
    else:
        folder.write_text("no folder")
    num_packed, first = load(config)
    assert load(config) == (num_packed, first)
    assert "packed weights are not kept in" in caplog.text
    assert not folder.is_dir() or not list(folder.iterdir())


def test_one_of_two_daemons_writes(config: EngineConfig, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    num_packed, first = load(config)
    path = kept(config)
    written = path.with_suffix(".rows.new")
    path.rename(written)
    with written.open() as other, caplog.at_level(logging.INFO):
        fcntl.flock(other, fcntl.LOCK_EX)
        assert load(config) == (num_packed, first)
        assert not path.exists()
        assert caplog.text == ""
    assert load(config) == (num_packed, first)
    assert kept(config) == path
    assert load(config) == (0, first)
