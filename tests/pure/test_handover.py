"""K/V parcels: what leaves one engine's prefix cache arrives in another's, and nothing that is wrong does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from engine.core.errors import ParcelError
from engine.core.fake_runner import FakeRunner, FakeStep
from engine.core.kv.page_table import Layout
from engine.core.scheduler import Scheduler
from engine.core.types import Request
from engine.handover import Handover, Prefix
from engine.loop import Engine
from engine.runtime.transports.shared_memory import SharedMemory
from tests.patience import PATIENCE_S
from tests.pure.driver import VOCAB, config, request, solo
from tests.pure.test_loop import Listener

LAYOUT = Layout("f" * 32, block_size=4, block_bytes=16)
MAX_BYTES = 1 << 20


class Daemon:
    """An engine with one end of the hand-over."""

    def __init__(self, folder: Path, **settings: int | bool) -> None:
        self.config = config(num_blocks=48, max_num_batched_tokens=16, **settings)
        self.runner = FakeRunner(self.config, vocab_size=VOCAB)
        self.engine = Engine(Scheduler(self.config), self.runner, vocab_size=VOCAB)
        self.handover = Handover(self.engine, SharedMemory(folder, MAX_BYTES), LAYOUT)
        self.listener = Listener()
        self.engine.start(self.listener)

    def answer(self, asked: Request) -> list[list[int]]:
        """What each choice says, when all have ended."""
        self.engine.submit(asked)
        ends = {(asked.request_id, choice) for choice in range(asked.params.n)}
        self.listener.wait_for(lambda: ends <= self.listener.ends.keys())
        return [self.listener.said(asked.request_id, choice) for choice in range(asked.params.n)]

    def prefix(self, asked: Request) -> Prefix:
        return Prefix(self.engine.first_names(asked), asked.prompt)

    def cached_tokens(self, name: str) -> int:
        found = [event.prompt for events in self.listener.batches for event in events
                 if event.request_id == name and event.prompt is not None]  # fmt: skip
        return found[0].num_cached_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "parcels"


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A prefill daemon and a decode daemon."""
    daemons = Daemon(folder), Daemon(folder)
    yield daemons
    for daemon in daemons:
        daemon.engine.stop(0)
        assert not daemon.engine.stats.integrity_failures
        assert not daemon.engine.stats.blocks_held


PROMPT = tuple(range(1, 31))  # seven full blocks of four, and a piece


def test_an_answer_goes_on_from_blocks_that_another_engine_computed(pair: tuple[Daemon, Daemon], folder: Path) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT, max_tokens=0))
    asked = request("d", PROMPT, max_tokens=9, n=2, seed=5, temperature=1.0)
    assert decode.handover.count_missing(decode.prefix(asked)) == 7
    sent = prefill.handover.send(prefill.prefix(asked))
    assert sent is not None
    assert sent[1] == 7
    assert decode.handover.receive(sent[0], decode.prefix(asked)) == 7
    assert decode.handover.count_missing(decode.prefix(asked)) == 0
    assert decode.answer(asked) == [solo(asked, choice)[0] for choice in range(2)]
    assert decode.cached_tokens("d") == 28
    assert not list(folder.iterdir()), "a parcel that was opened is gone"


def test_only_what_is_lacking_is_written_and_only_what_there_is_is_sent(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT[:17], max_tokens=0))
    decode.answer(request("before", PROMPT[:9], max_tokens=0))
    asked = request("d", PROMPT, max_tokens=5)
    sent = prefill.handover.send(prefill.prefix(asked))
    assert sent is not None
    assert sent[1] == 4
    assert decode.handover.receive(sent[0], decode.prefix(asked)) == 4
    assert decode.answer(asked) == [solo(asked, 0)[0]]
    assert decode.cached_tokens("d") == 16
    assert prefill.handover.send(prefill.prefix(request("x", (40, 41, 42, 43, 44)))) is None
    assert prefill.handover.send(prefill.prefix(request("x", (40,)))) is None


def test_salts_are_kept_apart(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT, max_tokens=0, cache_salt="mine"))
    assert prefill.handover.send(prefill.prefix(request("d", PROMPT))) is None
    sent = prefill.handover.send(prefill.prefix(request("d", PROMPT, cache_salt="mine")))
    assert sent is not None
    decode.handover.receive(sent[0], decode.prefix(request("d", PROMPT, cache_salt="mine")))
    assert decode.handover.count_missing(decode.prefix(request("d", PROMPT))) == 7


def test_a_full_pool_takes_what_it_has_room_for(folder: Path) -> None:
    prefill, decode = Daemon(folder), Daemon(folder)
    try:
        prefill.answer(request("p", PROMPT, max_tokens=0))
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT)))
        assert sent is not None
        blocks = decode.engine.between_steps(lambda scheduler, _: scheduler.kv.pool.alloc_many(45)).result(PATIENCE_S)
        assert decode.handover.receive(sent[0], decode.prefix(request("d", PROMPT))) == 0, "all or nothing, of a piece"
        assert decode.handover.count_missing(decode.prefix(request("d", PROMPT))) == 4
        free = decode.engine.between_steps(lambda scheduler, _: [scheduler.kv.pool.free(b) for b in blocks])
        free.result(PATIENCE_S)
    finally:
        prefill.engine.stop(0)
        decode.engine.stop(0)


def test_a_copy_that_fails_leaves_nothing_to_be_found(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT, max_tokens=0))
    prefix = decode.prefix(request("d", PROMPT))
    sent = prefill.handover.send(prefix)
    assert sent is not None
    decode.runner.write_blocks = Mock(side_effect=ValueError("no such memory"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such memory"):
        decode.handover.receive(sent[0], prefix)
    assert decode.handover.count_missing(prefix) == 7
    assert decode.answer(request("d", PROMPT)) == [solo(request("d", PROMPT), 0)[0]]


def test_blocks_that_were_to_be_copied_out_are_not_once_they_are_written_to(folder: Path) -> None:
    """An import evicts cached blocks and writes to them before the plan that would copy these to host memory."""
    prefill, decode = Daemon(folder), Daemon(folder, num_host_blocks=60, host_caching=True)
    try:
        prefill.answer(request("p", PROMPT, max_tokens=0))
        for index in range(6):
            decode.answer(request(f"before{index}", tuple(range(10 + index, 40 + index)), max_tokens=9))
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT)))
        assert sent is not None
        assert decode.handover.receive(sent[0], decode.prefix(request("d", PROMPT))) == 7
        for index in range(6):
            asked = request(f"after{index}", tuple(range(10 + index, 40 + index)), max_tokens=9)
            assert decode.answer(asked) == [solo(asked, 0)[0]]
    finally:
        prefill.engine.stop(0)
        decode.engine.stop(0)
    assert not decode.engine.stats.integrity_failures


def test_an_engine_that_ended_does_nothing_more(folder: Path) -> None:
    daemon = Daemon(folder)
    daemon.engine.stop(0)
    assert daemon.engine.between_steps(lambda *_: 1).cancelled()


def test_an_engine_that_dies_keeps_nobody_waiting(folder: Path) -> None:
    daemon = Daemon(folder)
    begun, waits = threading.Event(), threading.Event()

    def die(*_: object) -> None:
        begun.set()
        assert waits.wait(PATIENCE_S)

    daemon.engine.between_steps(die)
    assert begun.wait(PATIENCE_S)
    daemon.runner.run = broken  # type: ignore[method-assign]
    daemon.engine.submit(request("r", PROMPT))
    waits.set()
    daemon.listener.wait_for(lambda: ("r", 0) in daemon.listener.ends)
    with pytest.raises(ParcelError, match="the engine has ended"):
        daemon.handover.count_missing(daemon.prefix(request("d", PROMPT)))


def broken(*_: object) -> FakeStep:
    raise RuntimeError("the device is gone")


# -- the files ---------------------------------------------------------------------------------------------------------


def _send(connector: SharedMemory, num_blocks: int = 3) -> str:
    parcel = connector.pack(LAYOUT, 5)
    parcel.rows[:] = np.arange(80, dtype=np.uint8).reshape(5, 16)
    return parcel.send(num_blocks)


def test_a_parcel_arrives_as_it_was_and_once(folder: Path) -> None:
    connector = SharedMemory(folder, MAX_BYTES)
    name = _send(connector)
    assert connector.open(name, LAYOUT).tolist() == np.arange(48).reshape(3, 16).tolist()
    with pytest.raises(ParcelError, match="No such file"):
        connector.open(name, LAYOUT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1] + b"x", "cut off|damaged"),
        (lambda data: data[:4096] + b"x" + data[4097:], "damaged"),
        (lambda data: data[:100] + b"xxxx" + data[104:], "damaged"),
        (lambda data: data[:4100], "cut off"),
        (lambda data: data[:10], "cut off"),
        (lambda data: b"", "cut off"),
        (lambda data: b"somethin" + data[8:], "not a parcel"),
    ],
)
def test_a_damaged_parcel_is_not_opened(folder: Path, change: object, message: str) -> None:
    connector = SharedMemory(folder, MAX_BYTES)
    name = _send(connector, 5)
    path = folder / name
    assert callable(change)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ParcelError, match=message):
        connector.open(name, LAYOUT)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["../secret.parcel", "/etc/passwd", "a.packing", "", ".parcel/x"])
def test_nothing_but_a_parcel_of_the_folder_is_opened(folder: Path, name: str) -> None:
    with pytest.raises(ParcelError, match="not the name of a parcel"):
        SharedMemory(folder, MAX_BYTES).open(name, LAYOUT)


def test_another_models_parcel_is_not_opened(folder: Path) -> None:
    connector = SharedMemory(folder, MAX_BYTES)
    for other in (LAYOUT._replace(fingerprint="e" * 32), LAYOUT._replace(block_size=8)):
        name = _send(connector)
        with pytest.raises(ParcelError, match="another model"):
            connector.open(name, other)


def test_what_nobody_fetches_is_swept_and_the_memory_is_bounded(folder: Path) -> None:
    connector = SharedMemory(folder, 10_000)
    old = folder / _send(connector)
    _send(connector)
    with pytest.raises(ParcelError, match="beyond"):
        connector.pack(LAYOUT, 5)
    os.utime(old, (time.time() - 1000,) * 2)
    dropped = connector.pack(LAYOUT, 5)
    assert not old.exists()
    dropped.drop()
    assert len(list(folder.iterdir())) == 1


def test_a_parcel_that_is_gone_when_it_is_looked_at_takes_no_memory(folder: Path) -> None:
    """Another daemon opens it at that moment; a link to nowhere is listed and cannot be looked at either."""
    connector = SharedMemory(folder, MAX_BYTES)
    (folder / "gone.parcel").symlink_to(folder / "nowhere")
    connector.pack(LAYOUT, 5).drop()


def test_a_folder_that_others_may_read_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ParcelError, match="chmod 700"):
        SharedMemory(folder, MAX_BYTES)
