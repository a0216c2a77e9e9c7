"""Several daemons on one K/V folder: each reads what the others wrote, or nothing, whatever they do meanwhile."""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.budget import StepTime
from engine.core.kv import tiers
from engine.core.kv.tiers import Transfer
from engine.core.stats import TransferKind
from engine.core.types import StepEvents, TokenEvent
from engine.loop import Engine
from engine.runtime.stores import parts, tier
from engine.runtime.stores.folder import Folder, SharedStore
from engine.runtime.stores.tier import Tier
from tests.cpu.model_driver import request
from tests.cpu.test_disk_store import (
    BLOCK_BYTES,
    NUM_SLOTS,
    PROMPTS,
    Host,
    content,
    digest,
    engine_on,
    opened,
    tiny,
)
from tests.patience import PATIENCE_S, POLL_S, eventually


class Reader:
    """A daemon's view of the others' parts."""

    def __init__(self, folder: Path, own: str) -> None:
        self._others, self.names = SharedStore(Folder(folder, "model", BLOCK_BYTES, own)), set[bytes]()

    def look(self) -> set[int]:
        news = self._others.news()
        if news is not None:
            self.names = (self.names | set(news.gained)) - set(news.lost)
        return {name[0] for name in self.names}

    def read(self, name: int) -> bytes | None:
        row = bytearray(BLOCK_BYTES)
        return bytes(row) if self._others.get(digest(name), memoryview(row)) else None


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.kv"))


def test_each_daemon_has_a_part_and_takes_it_again(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            first.write(1, 0)
            second.write(2, 0)
            assert (first.store.name, second.store.name) == ("model", "model.2")
            assert parts.names(tmp_path, "model") == ["model", "model.2"]
        with opened(tmp_path) as third:
            assert third.store.name == "model.2"
            assert third.store.kept == [(digest(2), 0)]


def test_what_others_write_is_found_and_read(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        reader = Reader(tmp_path, first.store.name)
        assert reader.look() == set()
        first.write(1, 0)
        second.write(2, 3)
        second.write(3, 1)
        assert reader.look() == {2, 3}
        assert [reader.read(name) for name in (1, 2, 3)] == [None, content(2), content(3)]
        second.write(4, 3)
        assert reader.read(2) is None, "it was replaced since the last look"
        assert reader.look() == {3, 4}
        for kind in parts.KINDS:
            (tmp_path / f"model.2{kind}").unlink()
        assert reader.read(3) is None
        assert reader.look() == set()


def test_the_part_of_a_daemon_that_runs_does_not_make_way(tmp_path: Path) -> None:
    with opened(tmp_path) as ended:
        for slot in range(NUM_SLOTS):
            ended.write(slot + 1, slot)
        with opened(tmp_path) as running:
            running.write(9, 0)
    with opened(tmp_path), opened(tmp_path) as second, opened(tmp_path) as third:
        assert (second.store.name, third.store.name) == ("model.2", "model.3")
        for slot in range(NUM_SLOTS):
            third.write(slot + 20, slot)
        assert parts.names(tmp_path, "model") == ["model", "model.2", "model.3"]


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "1 TB of nothing": lambda path: path.touch() or os.truncate(path, 1 << 40),
    "a file without read permission": lambda path: path.touch(mode=0),
}


@pytest.mark.parametrize("kind", parts.KINDS)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_ends_neither_sharing_nor_a_start(tmp_path: Path, name: str, kind: str) -> None:
    odd = tmp_path / f"model{kind}"
    ODD[name](odd)
    if kind == ".kv":
        (tmp_path / "model.index").write_bytes(parts.Entry(digest(9), 1, 0).pack().ljust(parts.ENTRY_BYTES))
    with opened(tmp_path / "other") as first:
        first.write(1, 0)
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / path.name.replace("model", "model.2"))
    store = Tier(SharedStore(Folder(tmp_path, "model", BLOCK_BYTES, "own")), NoRows(), is_shared=True)
    found: set[bytes] = set()
    eventually(lambda: bool(found.update(*(news.gained for news in store.news()))) or digest(1) in found)
    rows = store._pool.row(0)
    for wanted, is_there in ((9, False), (1, True)):
        store.start([Transfer(1, "shared", TransferKind.LOAD, digest(wanted), 0, 0)])
        assert store.finished(PATIENCE_S)[0][1] == is_there
    assert bytes(rows) == content(1)
    store.close()
    assert not store._thread.is_alive()
    if kind == ".index" and "1 TB" not in name and "permission" not in name:
        with opened(tmp_path) as started:
            assert started.store.name == "model.2", "the odd one is no part"


class NoRows:
    """One host block."""

    def __init__(self) -> None:
        self._row = bytearray(BLOCK_BYTES)

    def row(self, _: int) -> memoryview:
        return memoryview(self._row)

    def finish_copies(self) -> None:
        """Nothing is under way."""


def test_an_error_of_a_look_is_logged_once_and_the_next_look_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "LOOK_S", POLL_S)
    others, looks = SharedStore(Folder(Path("nowhere"), "model", BLOCK_BYTES)), count()

    def look() -> tiers.News | None:
        number = next(looks)
        if number < 5:
            raise MemoryError("no room")
        return tiers.News([digest(number)], [])

    monkeypatch.setattr(others, "news", look)
    store = Tier(others, NoRows(), is_shared=True)
    eventually(lambda: bool(store.news()))
    store.close()
    assert [record.getMessage() for record in caplog.records] == [
        "K/V of other daemons is not used for now: MemoryError: no room"
    ]


def test_a_file_system_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier, "_CLOSE_S", POLL_S)
    hangs = threading.Event()
    monkeypatch.setattr(parts, "_write_all", lambda *_: hangs.wait(PATIENCE_S))
    with opened(tmp_path) as host:
        host.tier.start([Transfer(1, "disk", TransferKind.SAVE, digest(1), 0, 0)])
        blocks = host.store.blocks
    assert "is left behind" in caplog.text
    os.fstat(blocks)  # the thread may still write to it
    hangs.set()
    host.tier._thread.join(PATIENCE_S)
    host.tier.close()


@given(data=st.data())
@settings(max_examples=40)
def test_readers_find_what_is_there_and_nothing_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Daemons write, are replaced by others with another fingerprint, and files are damaged, in any order."""
    folder = tmp_path_factory.mktemp("kv")
    hosts: list[Host | None] = [None, None, None]
    readers: dict[str, Reader] = {}
    is_damaged = False
    for _ in range(data.draw(st.integers(1, 40))):
        at = data.draw(st.integers(0, 2))
        host = hosts[at]
        if host is None:
            host = hosts[at] = Host(folder)
            readers[host.store.name] = Reader(folder, host.store.name)
        action = data.draw(st.sampled_from(["write"] * 6 + ["look"] * 3 + ["end", "damage"]))
        part = host.store.name
        if action == "write":
            host.write(data.draw(st.integers(1, 12)), data.draw(st.integers(0, NUM_SLOTS - 1)))
        elif action == "end":
            host.tier.close()
            hosts[at] = None
        elif action == "damage":
            path = folder / f"{part}{data.draw(st.sampled_from(parts.KINDS))}"
            with path.open("r+b") as file:
                file.seek(data.draw(st.integers(0, max(path.stat().st_size - 1, 0))))
                file.write(data.draw(st.binary(min_size=1, max_size=80)))
            is_damaged = True
        else:
            found = readers[part].look()
            if not is_damaged:
                others = [path for path in parts.names(folder, "model") if path != part]
                assert found == {entry.name[0] for name in others for entry in entries(folder, name)}
        for name in {each[0] for each in readers[part].names}:
            assert readers[part].read(name) in (content(name), None)
        assert num_bytes(folder) <= 3 * NUM_SLOTS * parts.stride(BLOCK_BYTES)
    for host in hosts:
        if host is not None:
            host.tier.close()


def entries(folder: Path, name: str) -> list[parts.Entry]:
    index = (folder / f"{name}.index").read_bytes()
    size = parts.ENTRY_BYTES
    found = [parts.unpack(index[at : at + size]) for at in range(0, len(index), size)]
    return [entry for entry in found if entry is not None]


def say(engine: Engine) -> dict[str, list[tuple[object, ...]]]:
    """Return the tokens and their log probabilities for all prompts."""
    heard: queue.SimpleQueue[StepEvents] = queue.SimpleQueue()
    engine.start(heard.put)
    for name, prompt in enumerate(PROMPTS):
        asked = request(str(name), prompt, max_tokens=8, logprobs=3)
        engine.submit(replace(asked, arrival_s=engine.clock()))
    said: dict[str, list[tuple[object, ...]]] = {}
    num_open = len(PROMPTS)
    while num_open:
        for event in heard.get(timeout=PATIENCE_S):
            assert isinstance(event, TokenEvent)
            assert event.error is None
            said.setdefault(event.request_id, []).append((tuple(event.token_ids), event.logprobs))
            num_open -= event.finish_reason is not None
    engine.stop(0.0)
    assert engine.stats.integrity_failures == 0
    return said


def learn(engine: Engine, folder: Path) -> None:
    """Wait until an engine that does not run knows all blocks that another has written to the folder."""
    assert engine._offload is not None
    while not (written := [path.stem for path in folder.glob("*.index") if entries(folder, path.stem)]):
        time.sleep(POLL_S)
    names = {entry.name for name in written for entry in entries(folder, name)}
    while not all(engine._scheduler.tiers.stores["shared"].find(name) >= 0 for name in names):
        engine._offload.learn()
        time.sleep(POLL_S)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_second_engine_loads_what_the_first_computes_and_says_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent state, too."""
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    monkeypatch.setattr(tier, "LOOK_S", POLL_S)
    model, folder = tiny(tmp_path, kind), tmp_path / "kv"
    second = engine_on(model, folder)  # it runs before the first has computed anything
    first = engine_on(model, folder)
    expected = say(first)
    learn(second, folder)
    assert say(second) == expected
    assert second.stats.prefix_hits["shared"] == 4 * 44
    assert not any(second.stats.failed_transfers.values())
