"""Blocks on a disk: what comes back is what was written or nothing, whatever happened to the files in between."""

from __future__ import annotations

import dataclasses
import errno
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.budget import StepTime
from engine.core.errors import ConfigError
from engine.core.kv import tiers
from engine.core.kv.tiers import Transfer
from engine.core.stats import TransferKind
from engine.core.types import StepEvents
from engine.loop import Engine
from engine.runtime.stores import parts
from engine.runtime.stores.disk import DiskStore
from engine.runtime.stores.tier import Tier
from engine.settings.engine_config import EngineConfig
from engine.startup.build import build_engine
from tests.cpu.model_driver import request
from tests.cpu.test_models_families import CASES, write_tiny
from tests.patience import PATIENCE_S

BLOCK_BYTES, NUM_SLOTS = 5000, 6


def digest(name: int) -> bytes:
    return bytes([name]) * 32


def content(name: int) -> bytes:
    return bytes((name * 7 + i * i) % 256 for i in range(BLOCK_BYTES))


def tiny(folder: Path, kind: str = "llama") -> Path:
    write_tiny(CASES[kind], folder / "model")
    return folder / "model"


class Host:
    """Host blocks, and a store that works on them."""

    def __init__(self, folder: Path, num_slots: int = NUM_SLOTS, name: str = "model") -> None:
        self.rows = [bytearray(BLOCK_BYTES) for _ in range(NUM_SLOTS)]
        self.store = DiskStore(folder, name, num_slots, BLOCK_BYTES)
        self.tier = Tier(self.store, self)

    def row(self, host_block: int) -> memoryview:
        return memoryview(self.rows[host_block])

    def finish_copies(self) -> None:
        """Nothing is under way."""

    def move(self, kind: TransferKind, name: int, slot: int) -> bool:
        self.tier.start([Transfer(1, "disk", kind, digest(name), slot, slot)])
        ((transfer, is_good),) = self.tier.finished(PATIENCE_S)
        assert (transfer.name, transfer.slot) == (digest(name), slot)
        return is_good

    def write(self, name: int, slot: int) -> bool:
        self.rows[slot][:] = content(name)
        return self.move(TransferKind.SAVE, name, slot)

    def read(self, name: int, slot: int) -> bytes | None:
        self.rows[slot][:] = bytes(BLOCK_BYTES)
        return bytes(self.rows[slot]) if self.move(TransferKind.LOAD, name, slot) else None


@contextmanager
def opened(folder: Path, num_slots: int = NUM_SLOTS, name: str = "model") -> Iterator[Host]:
    host = Host(folder, num_slots, name)
    yield host
    host.tier.close()


def test_what_was_written_is_there_after_a_restart_oldest_first(tmp_path: Path) -> None:
    with opened(tmp_path / "made" / "on the way") as host:
        assert host.store.kept == []
        for name, slot in ((1, 4), (2, 0), (3, 2), (4, 0)):
            assert host.write(name, slot)
    with opened(tmp_path / "made" / "on the way") as host:
        assert host.store.kept == [(digest(1), 4), (digest(3), 2), (digest(4), 0)]
        assert [host.read(name, slot) for name, slot in ((1, 4), (3, 2), (4, 0))] == [
            content(1),
            content(3),
            content(4),
        ]
        assert host.read(2, 0) is None, "another block is there now"
        assert host.read(5, 5) is None, "nothing was ever there"
        assert host.write(5, 5)
    with opened(tmp_path / "made" / "on the way") as host:
        assert host.store.kept[-1] == (digest(5), 5), "what was written after the restart is the latest"
    assert (tmp_path / "made" / "on the way").stat().st_mode & 0o077 == 0


def test_a_smaller_bound_keeps_what_is_within_it(tmp_path: Path) -> None:
    with opened(tmp_path) as host:
        host.write(1, 1)
        host.write(5, 5)
    with opened(tmp_path, num_slots=3) as host:
        assert host.store.kept == [(digest(1), 1)]
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4 * 8192 + 4096


damage = st.lists(
    st.tuples(st.booleans(), st.floats(0, 1), st.sampled_from(["flip", "zero", "cut"])), min_size=1, max_size=4
)


@given(damage=damage)
@settings(max_examples=60)
def test_a_damaged_folder_brings_back_what_was_written_or_nothing(
    damage: list[tuple[bool, float, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bits flipped, pages never written, files cut short: as a crash of the machine, or the disk, may leave them."""
    folder = tmp_path_factory.mktemp("kv")
    with opened(folder) as host:
        for name in range(NUM_SLOTS):
            host.write(name + 1, name)
    for is_index, where, kind in damage:
        path = folder / f"model.{'index' if is_index else 'kv'}"
        bytes_ = bytearray(path.read_bytes())
        at = int(where * (len(bytes_) - 1)) if bytes_ else 0
        if kind == "cut":
            del bytes_[at:]
        elif kind == "flip" and bytes_:
            bytes_[at] ^= 0x10
        else:
            bytes_[at : at + 4096] = bytes(len(bytes_[at : at + 4096]))
        path.write_bytes(bytes_)
    with opened(folder) as host:
        for name, slot in host.store.kept:
            assert name == digest(name[0])
            assert host.read(name[0], slot) in (content(name[0]), None)
        assert host.write(9, 3)
        assert host.read(9, 3) == content(9)


def test_a_block_that_was_overwritten_by_half_is_not_what_its_entry_says(tmp_path: Path) -> None:
    """A process that is killed between a block and its entry."""
    with opened(tmp_path) as host:
        host.write(1, 0)
        index = (tmp_path / "model.index").read_bytes()
        host.write(2, 0)
    (tmp_path / "model.index").write_bytes(index)
    with opened(tmp_path) as host:
        assert host.store.kept == [(digest(1), 0)]
        assert host.read(1, 0) is None


def test_a_disk_that_says_no_is_told_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as host:
        with monkeypatch.context() as patched:
            patched.setattr(parts.os, "pwrite", full)
            assert [host.write(1, 0) for _ in range(9)] == [False] * 9
        assert "No space left on device" in caplog.text
        assert len(caplog.records) == 5, "the log is not filled too"
        assert host.write(1, 0)


def test_fetches_go_before_stores(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.write(1, 1)
    transfers = [Transfer(1, "disk", TransferKind.SAVE, digest(9), 0, 0)] * 200
    transfers.append(Transfer(2, "disk", TransferKind.LOAD, digest(1), 1, 1))
    host.tier.start(transfers)
    order = []
    while len(order) < len(transfers):
        order += [transfer.kind for transfer, _ in host.tier.finished(PATIENCE_S)]
    assert order.index(TransferKind.LOAD) < 199
    host.tier.close()


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        DiskStore(tmp_path / "kv", "model", NUM_SLOTS, BLOCK_BYTES)


def test_a_folder_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match=r"folder .* cannot be used: No locks available\."):
        DiskStore(tmp_path, "model", NUM_SLOTS, BLOCK_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["model.index"]
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_other_files_make_way_the_oldest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("newer", "older")):
        for kind, size in ((".kv", 1 << 14), (".index", 0)):
            (tmp_path / (name + kind)).write_bytes(b"x" * size)
            os.utime(tmp_path / (name + kind), (1000 - age, 1000 - age))
    left = []
    with opened(tmp_path) as host:  # six slots of 8 KiB, and the others have the room of two each
        for slot in (0, 1, 0, 2, 3, 3, 4):
            assert host.write(slot, slot)
            left.append("".join(sorted(path.name[0] for path in tmp_path.glob("*er.*"))))
    assert left == ["nnoo", "nnoo", "nnoo", "nn", "nn", "nn", ""]


def test_a_bound_beyond_the_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-offload-config: disk_gib asks for .* set it to at most"):
        DiskStore(tmp_path, "model", 1 << 50, BLOCK_BYTES)


PROMPTS = [[(3 * i + j * j) % 90 + 1 for j in range(45)] for i in range(4)]


def engine_on(model: Path, folder: Path, **changes: object) -> Engine:
    sizes = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 1 << 20}
    config = {"load_format": "auto", "kv_offload_gib": 0.01, "kv_offload_dir": str(folder), "kv_offload_disk_gib": 0.01}
    return build_engine(
        EngineConfig(model=str(model), device="cpu", **(sizes | config | changes)), lambda progress: None
    )  # type: ignore[arg-type]


def answers(engine: Engine) -> dict[str, list[int]]:
    heard: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engine.start(heard.put)
    said: dict[str, list[int]] = {}
    for name, prompt in enumerate(PROMPTS):
        engine.submit(dataclasses.replace(request(str(name), prompt, max_tokens=8), arrival_s=engine.clock()))
    num_open = len(PROMPTS)
    while num_open:
        for event in heard.get(timeout=PATIENCE_S):
            assert event.error is None
            said.setdefault(event.request_id, []).extend(event.token_ids)
            num_open -= event.finish_reason is not None
    engine.stop(0.0)
    assert engine.stats.integrity_failures == 0
    return said


def test_an_engine_that_is_started_again_finds_its_prompts_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    model, folder = tiny(tmp_path), tmp_path / "kv"
    lives = []
    for _ in range(3):
        engine = engine_on(model, folder)
        lives.append((answers(engine), engine.stats))
    assert lives[0][0] == lives[1][0] == lives[2][0]
    assert lives[0][1].transferred[TransferKind.SAVE] >= 4 * 11
    (blocks,) = folder.glob("*.kv")
    assert blocks.stat().st_size <= 0.01 * (1 << 30), "whole pages of a small block, too"
    for _, stats in lives[1:]:
        assert stats.prefix_hits["disk"] == 4 * 44  # type: ignore[index]  # its value is the name
        assert not stats.failed_transfers[TransferKind.LOAD]
    other = engine_on(model, folder, dtype="bfloat16")
    answers(other)
    assert not other.stats.transferred[TransferKind.LOAD], "of another type"


_VICTIM = """
import os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.cpu.test_disk_store import engine_on, PROMPTS
from tests.cpu.model_driver import request
import time
engine = engine_on(Path({model!r}), Path({folder!r}))
engine.start(lambda events: None)
for i, prompt in enumerate(PROMPTS):
    engine.submit(request(str(i), prompt, max_tokens=8))
while not engine.stats.transferred["store"] >= {num_saved}:  # of 120
    time.sleep(0.001)
print("now", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("num_saved", "num_found"), [(105, 1), (120, 4 * 44)])
def test_a_process_that_is_killed_leaves_nothing_wrong_and_what_it_has_written(
    num_saved: int, num_found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither K/V nor a recurrent state that was written by half is used; all else is."""
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    model, folder = tiny(tmp_path, "qwen3_5"), tmp_path / "kv"
    root = str(Path(__file__).parents[2])
    script = _VICTIM.format(root=root, model=str(model), folder=str(folder), num_saved=num_saved)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"now\n"
        victim.send_signal(signal.SIGKILL)
    engine, fresh = engine_on(model, folder), engine_on(model, tmp_path / "empty")
    assert answers(engine) == answers(fresh)
    assert engine.stats.prefix_hits["disk"] >= num_found  # type: ignore[index]  # its value is the name
    assert fresh.stats.transferred[TransferKind.LOAD] == 0
