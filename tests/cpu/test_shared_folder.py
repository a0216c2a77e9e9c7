"""Several daemons on one K/V folder: each reads what the others wrote, or nothing, whatever they do meanwhile."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.budget import StepTime
from engine.core.kv import tiers
from engine.core.types import StepEvents, TokenEvent
from engine.loop import Engine
from engine.runtime.transports import parts, shared_folder
from engine.runtime.transports.shared_folder import Folder, Others
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
from tests.patience import PATIENCE_S, POLL_S


class Reader:
    """A daemon's view of the others' parts."""

    def __init__(self, folder: Path, own: str) -> None:
        self._others, self.names = Others([Folder(folder, "model", own)]), set[bytes]()

    def look(self) -> set[int]:
        news = self._others.look()
        if news is not None:
            self.names = (self.names | set(news.gained)) - set(news.lost)
        return {name[0] for name in self.names}

    def read(self, name: int) -> bytes | None:
        row = bytearray(BLOCK_BYTES)
        return bytes(row) if self._others.read(digest(name), memoryview(row)) else None


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.kv"))


def test_each_daemon_has_a_part_and_takes_it_again(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            first.write(1, 0)
            second.write(2, 0)
            assert (first.store.part, second.store.part) == ("model", "model.2")
            assert parts.names(tmp_path, "model") == ["model", "model.2"]
        with opened(tmp_path) as third:
            assert third.store.part == "model.2"
            assert third.store.kept == [(digest(2), 0)]
    assert parts.has_blocks(tmp_path, "model")
    assert not parts.has_blocks(tmp_path, "mod")


def test_what_others_write_is_found_and_read(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        reader = Reader(tmp_path, first.store.part)
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
        assert (second.store.part, third.store.part) == ("model.2", "model.3")
        for slot in range(NUM_SLOTS):
            third.write(slot + 20, slot)
        assert parts.names(tmp_path, "model") == ["model", "model.2", "model.3"]


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
            readers[host.store.part] = Reader(folder, host.store.part)
        action = data.draw(st.sampled_from(["write"] * 6 + ["look"] * 3 + ["end", "damage"]))
        part = host.store.part
        if action == "write":
            host.write(data.draw(st.integers(1, 12)), data.draw(st.integers(0, NUM_SLOTS - 1)))
        elif action == "end":
            host.store.close()
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
                assert found == {entry.digest[0] for name in others for entry in entries(folder, name)}
        for name in {each[0] for each in readers[part].names}:
            assert readers[part].read(name) in (content(name), None)
        assert num_bytes(folder) <= 3 * NUM_SLOTS * parts.stride(BLOCK_BYTES)
    for host in hosts:
        if host is not None:
            host.store.close()


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
    names = {entry.digest for name in written for entry in entries(folder, name)}
    while not all(engine._scheduler.tiers.stores["shared"].find(name) >= 0 for name in names):
        engine._offload.learn()
        time.sleep(POLL_S)


def test_a_second_engine_loads_what_the_first_computes_and_says_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    monkeypatch.setattr(shared_folder, "LOOK_S", POLL_S)
    model, folder = tiny(tmp_path), tmp_path / "kv"
    second = engine_on(model, folder)  # it runs before the first has computed anything
    first = engine_on(model, folder)
    expected = say(first)
    learn(second, folder)
    assert say(second) == expected
    assert second.stats.prefix_hits["shared"] == 4 * 44
    assert not any(second.stats.failed_transfers.values())
