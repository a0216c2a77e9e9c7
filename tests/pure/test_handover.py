"""K/V parcels: what leaves one engine's prefix cache arrives in another's, and nothing that is wrong does.

The same tests run over shared memory and over TCP.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest

from engine.core.errors import ParcelError
from engine.core.kv.prefix_cache import request_names
from engine.core.page_table import Layout
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Request
from engine.handle import EngineFacts
from engine.loop import Engine
from engine.outbound.handover import Handover, HandoverConfig, Offer, Prefix
from engine.runtime.transports import connection, tcp
from engine.runtime.transports.shared_memory import SharedMemory
from engine.settings.peer import Peer
from loadtest.fake_runner import FakeRunner, FakeStep
from tests.patience import PATIENCE_S, eventually
from tests.pure.driver import VOCAB, config, request, solo
from tests.pure.test_loop import Listener

LAYOUT = Layout("f" * 32, block_size=4, block_bytes=16)
MAX_BYTES = 1 << 20


class Daemon:
    """An engine with one end of the hand-over."""

    def __init__(self, folder: Path, transport: HandoverConfig | None = None, **settings: int | bool) -> None:
        self.config = config(num_blocks=48, max_num_batched_tokens=16, **settings)
        self.runner = FakeRunner(self.config, vocab_size=VOCAB)
        self.engine = Engine(Scheduler(self.config), self.runner, EngineFacts(VOCAB))
        self.handover = Handover(self.engine, SharedMemory(folder, MAX_BYTES), LAYOUT, transport)
        self.peer: Peer | None = None
        self.listener = Listener()
        self.engine.start(self.listener)

    def answer(self, asked: Request) -> list[list[int]]:
        """What each choice says, when all have ended."""
        self.engine.submit(asked)
        ends = {(asked.request_id, choice) for choice in range(asked.params.n)}
        self.listener.wait_for(lambda: ends <= self.listener.ends.keys())
        return [self.listener.said(asked.request_id, choice) for choice in range(asked.params.n)]

    def prefix(self, asked: Request) -> Prefix:
        names = request_names(asked, self.config)
        return Prefix(names, asked.prompt, names[0])

    def take(self, sent: Offer | None, asked: Request) -> int:
        """Receive what another daemon offered, by the way that this one's settings name."""
        assert sent is not None
        return self.handover.receive(sent.name, self.prefix(asked), self.peer)

    def close(self) -> None:
        self.handover.close()
        self.engine.stop(0)

    def cached_tokens(self, name: str) -> int:
        found = [event.prompt for events in self.listener.batches for event in events
                 if event.request_id == name and event.prompt is not None]  # fmt: skip
        return found[0].num_cached_tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "parcels"


LOOPBACK = HandoverConfig(listen=Peer("127.0.0.1", 0), key="k")


def remote_pair(folder: Path, **settings: int | bool) -> tuple[Daemon, Daemon]:
    """A prefill daemon and a decode daemon that have no folder in common."""
    prefill = Daemon(folder, LOOPBACK)
    decode = Daemon(folder.with_name("other"), HandoverConfig(key="k"), **settings)
    assert prefill.handover.port is not None
    decode.peer = Peer("127.0.0.1", prefill.handover.port)
    return prefill, decode


@pytest.fixture(params=["shared memory", "tcp"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Daemon, Daemon]]:
    """A prefill daemon and a decode daemon."""
    daemons = (Daemon(folder), Daemon(folder)) if request.param == "shared memory" else remote_pair(folder)
    yield daemons
    for daemon in daemons:
        daemon.close()
        assert not daemon.engine.stats.integrity_failures
        assert not daemon.engine.stats.blocks_held


PROMPT = tuple(range(1, 31))  # seven full blocks of four, and a piece


def test_an_answer_goes_on_from_blocks_that_another_engine_computed(pair: tuple[Daemon, Daemon], folder: Path) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT, max_tokens=0))
    asked = request("d", PROMPT, max_tokens=9, n=2, seed=5, temperature=1.0)
    assert decode.handover.count_missing(decode.prefix(asked)).num_blocks == 7
    sent = prefill.handover.send(prefill.prefix(asked))
    assert sent is not None
    assert sent[1] == 7
    assert decode.take(sent, asked) == 7
    assert decode.handover.count_missing(decode.prefix(asked)).num_blocks == 0
    assert decode.answer(asked) == [solo(asked, choice)[0] for choice in range(2)]
    assert decode.cached_tokens("d") == 28
    eventually(lambda: not list(folder.iterdir()))  # a parcel that was taken is gone


def test_only_what_is_lacking_is_written_and_only_what_there_is_is_sent(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT[:17], max_tokens=0))
    decode.answer(request("before", PROMPT[:9], max_tokens=0))
    asked = request("d", PROMPT, max_tokens=5)
    sent = prefill.handover.send(prefill.prefix(asked))
    assert sent is not None
    assert sent[1] == 4
    assert decode.take(sent, asked) == 4
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
    decode.take(sent, request("d", PROMPT, cache_salt="mine"))
    assert decode.handover.count_missing(decode.prefix(request("d", PROMPT))).num_blocks == 7


def test_a_full_pool_takes_what_it_has_room_for(folder: Path) -> None:
    prefill, decode = Daemon(folder), Daemon(folder)
    try:
        prefill.answer(request("p", PROMPT, max_tokens=0))
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT)))
        assert sent is not None
        blocks = decode.engine.between_steps(lambda scheduler, _: scheduler.kv.pool.alloc_many(45)).result(PATIENCE_S)
        assert decode.take(sent, request("d", PROMPT)) == 0, "all or nothing, of a piece"
        assert decode.handover.count_missing(decode.prefix(request("d", PROMPT))).num_blocks == 4
        free = decode.engine.between_steps(lambda scheduler, _: [scheduler.kv.pool.free(b) for b in blocks])
        free.result(PATIENCE_S)
    finally:
        prefill.engine.stop(0)
        decode.engine.stop(0)


def test_an_import_leaves_running_sequences_the_blocks_that_they_may_need(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = Daemon(folder), Daemon(folder)
    try:
        prefill.answer(request("p", PROMPT, max_tokens=0))
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT)))
        monkeypatch.setattr(Scheduler, "running", property(lambda _: [None] * 43))
        assert decode.take(sent, request("d", PROMPT)) == 0
        prefix = decode.prefix(request("d", PROMPT))
        num_found = decode.engine.between_steps(lambda scheduler, _: len(scheduler.kv.find_prefix(*prefix[:2], 7)))
        assert num_found.result(PATIENCE_S) == 5, "of seven, in a pool of 48 blocks"
    finally:
        prefill.engine.stop(0)
        decode.engine.stop(0)


def test_a_copy_that_fails_leaves_nothing_to_be_found(pair: tuple[Daemon, Daemon]) -> None:
    prefill, decode = pair
    prefill.answer(request("p", PROMPT, max_tokens=0))
    asked = request("d", PROMPT)
    prefix = decode.prefix(asked)
    sent = prefill.handover.send(prefix)
    decode.runner.write_blocks = Mock(side_effect=ValueError("no such memory"))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such memory"):
        decode.take(sent, asked)
    assert decode.handover.count_missing(prefix).num_blocks == 7
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
        assert decode.take(sent, request("d", PROMPT)) == 7
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
    parcel = connector.open(name, LAYOUT)
    assert parcel.read(0, 3).tolist() == np.arange(48).reshape(3, 16).tolist()
    with pytest.raises(ParcelError, match="No such file"):
        connector.open(name, LAYOUT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1] + b"x", "cut off|damaged"),
        (lambda data: data[:4096] + b"x" + data[4097:], "damaged"),
        (lambda data: data[:130] + b"xxxx" + data[134:], "damaged"),
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
        connector.open(name, LAYOUT).read(0, 5)
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


# -- over a wire that fails --------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """What happens to a connection after so many bytes of one direction."""

    kind: str  # "cut", "flip", "stall", "slow" or "half": one end is closed, the other is not
    is_reply: bool
    at: int


class FaultyWire:
    """A proxy before a daemon's port. Each connection has the fault that is set at the time."""

    def __init__(self, port: int) -> None:
        self._port, self.fault = port, Fault("cut", True, 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer("127.0.0.1", self._listener.getsockname()[1])
        self._stalled: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.release()

    def release(self) -> None:
        for end in self._stalled:
            end.close()
        self._stalled.clear()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                ends, is_over = (client, server), True
                with suppress(OSError):
                    is_over = self._pump(client, server, self.fault)
                if is_over:
                    for end in ends:
                        end.close()
                else:
                    self._stalled += ends

    def _pump(self, client: socket.socket, server: socket.socket, fault: Fault) -> bool:
        """Forward bytes until an end closes, or the fault; False leaves both ends open."""
        num_bytes = {client: 0, server: 0}
        while True:
            for end in select.select([client, server], [], [])[0]:
                content, other = bytearray(end.recv(16 if fault.kind == "slow" else 1 << 16)), {client, server} - {end}
                if not content:
                    return True
                begin = num_bytes[end]
                num_bytes[end] += len(content)
                if (end is server) == fault.is_reply and begin <= fault.at < num_bytes[end]:
                    if fault.kind == "flip":
                        content[fault.at - begin] ^= 1 << fault.at % 8
                    elif fault.kind != "slow":
                        other.pop().sendall(content[: fault.at - begin])
                        if fault.kind == "half":
                            end.close()
                        return fault.kind == "cut"
                other.pop().sendall(content)


def test_a_thousand_failures_lose_no_stream_and_leak_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections cut, silent, slow or closed by half anywhere, bits flipped, parcels and keys that are not right."""
    monkeypatch.setattr(connection, "IDLE_S", 0.005)
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.02)
    rng, others = random.Random(18), set(threading.enumerate())
    prefill, decode = remote_pair(folder)
    assert decode.peer is not None
    direct, wire = decode.peer, FaultyWire(decode.peer.port)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        dead = Peer("127.0.0.1", bound.getsockname()[1])
        before = num_sockets()
        failed: Counter[str] = Counter()
        for number in range(1000):
            kind = rng.choice(["cut"] * 6 + ["flip"] * 6 + ["slow", "stall", "half"] + OTHER_FAULTS)
            asked = request(f"d{number}", (number // 60, number % 60, *PROMPT), max_tokens=3)
            prefill.answer(request(f"p{number}", asked.prompt, max_tokens=0))
            sent = prefill.handover.send(prefill.prefix(asked))
            assert sent is not None
            is_reply = rng.random() < 0.8
            wire.fault = Fault(kind, is_reply, rng.randrange(380 if is_reply else 138))
            decode.peer = wire.peer if kind in ("cut", "flip", "slow", "stall", "half") else direct
            with break_something(kind, decode, folder / sent.name, dead) as broken_offer:
                try:
                    decode.take(broken_offer or sent, asked)
                except (ParcelError, OSError):
                    failed[kind] += 1
            assert decode.answer(asked) == [solo(asked, 0)[0]], (kind, wire.fault)
            wire.release()
            for daemon in (prefill, decode):
                daemon.listener.batches.clear()  # they are searched for every answer
            (folder / sent.name).unlink(missing_ok=True)
    assert all(failed[kind] > 10 for kind in ("cut", "flip", "stall", *OTHER_FAULTS)), failed
    assert not failed["slow"] or failed["slow"] < 60
    wire.close()
    eventually(lambda: num_sockets() <= before - 1)  # the wire's own is closed, too
    prefill.close()
    decode.close()
    assert not [each.name for each in set(threading.enumerate()) - others if each.name.startswith("quire-kv")]
    assert not list(folder.iterdir())
    assert not decode.engine.stats.integrity_failures
    assert not decode.engine.stats.blocks_held


OTHER_FAULTS = ["fingerprint", "key", "expired", "gone", "dead", "other prompt"]


@contextmanager
def break_something(kind: str, decode: Daemon, parcel: Path, dead: Peer) -> Iterator[Offer | None]:
    """Make the next hand-over fail beyond the wire; yields what to ask for instead, if that is it."""
    handover, offer = decode.handover, None
    with pytest.MonkeyPatch.context() as patch:
        if kind == "fingerprint":
            patch.setattr(handover, "_layout", LAYOUT._replace(fingerprint="e" * 32))
        elif kind == "key":
            patch.setattr(handover, "_key", b"another")
        elif kind == "expired":
            os.utime(parcel, (time.time() - 1000,) * 2)
        elif kind == "gone":
            offer = Offer("0" * 32 + ".parcel", 7, 0.0)
        elif kind == "dead":
            patch.setattr(decode, "peer", dead)
        elif kind == "other prompt":
            patch.setattr(handover, "_content", lambda *_: bytes(32))
        yield offer


def num_sockets() -> int:
    """Return how many sockets this process has open."""
    links = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    return sum("socket:" in link for link in links)


def test_strangers_are_sent_away_and_a_crowd_waits_for_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say nothing take no more than their places, and lose them."""
    memory = SharedMemory(folder, MAX_BYTES)
    server = tcp.ParcelServer(memory, Peer("127.0.0.1", 0), b"k")
    peer = Peer("127.0.0.1", server.port)
    with ExitStack() as crowd:
        with monkeypatch.context() as patch:
            patch.setattr(connection, "HANDSHAKE_S", 0.2)
            sockets = [crowd.enter_context(socket.create_connection(peer)) for _ in range(connection.MAX_STRANGERS + 3)]
            for each in sockets:
                each.settimeout(PATIENCE_S)
                while each.recv(1 << 10):
                    pass
        name = _send(memory)
        pulled = tcp.pull(peer, name, LAYOUT, b"k", PATIENCE_S)
        assert pulled.read(0, 3).tolist() == np.arange(48).reshape(3, 16).tolist()
        pulled.close()
    for bad in ("../secret.parcel", "x" * 65, "\u00e4", ""):
        with pytest.raises(ParcelError, match=r"no such parcel|not that of a parcel"):
            tcp.pull(peer, bad, LAYOUT, b"k", PATIENCE_S)
    impostor = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_pretend, args=(impostor,))
    thread.start()
    with pytest.raises(ParcelError, match="does not have the key"):
        tcp.pull(Peer("127.0.0.1", impostor.getsockname()[1]), name, LAYOUT, b"k", PATIENCE_S)
    thread.join()
    impostor.close()
    server.close()


def test_daemons_with_the_key_get_in_while_strangers_hold_all_they_can(folder: Path) -> None:
    """They take no place; a further one pushes the oldest out. Places are bounded all the same, and come back."""
    memory = SharedMemory(folder, MAX_BYTES)
    server = tcp.ParcelServer(memory, Peer("127.0.0.1", 0), b"k")
    peer = Peer("127.0.0.1", server.port)

    def take(name: str) -> tcp.Pulled:
        return tcp.pull(peer, name, LAYOUT, b"k", PATIENCE_S)

    with ExitStack() as crowd:
        strangers = [crowd.enter_context(socket.create_connection(peer)) for _ in range(connection.MAX_STRANGERS + 3)]
        pulled = [crowd.enter_context(closing(take(_send(memory)))) for _ in range(connection.MAX_CONNECTIONS)]
        assert server.num_open == connection.MAX_CONNECTIONS
        assert len(server._strangers) <= connection.MAX_STRANGERS
        strangers[0].settimeout(PATIENCE_S)
        strangers[0].recv(1 << 10)
        assert strangers[0].recv(1) == b"", "it was the oldest"
        name = _send(memory)
        with pytest.raises((ParcelError, OSError)):
            take(name)
        pulled[0].close()
        eventually(lambda: server.num_open < connection.MAX_CONNECTIONS)
        crowd.enter_context(closing(take(name)))
    server.close()


def test_a_stranger_pushes_out_one_of_the_address_that_has_the_most(folder: Path) -> None:
    server = tcp.ParcelServer(SharedMemory(folder, MAX_BYTES), Peer("127.0.0.1", 0), b"k")
    ours = {name: socket.socket() for name in ("first", "second", "third")}
    server._strangers = dict(zip(ours.values(), ("10.0.0.1", "10.0.0.2", "10.0.0.2"), strict=True))
    server._push_out()
    assert list(server._strangers) == [ours["first"], ours["third"]]
    for each in ours.values():
        each.close()
    server.close()


def test_a_thread_that_cannot_start_ends_no_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(folder, MAX_BYTES)
    server = tcp.ParcelServer(memory, Peer("127.0.0.1", 0), b"k")
    peer = Peer("127.0.0.1", server.port)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread is left")))
        with pytest.raises((ParcelError, OSError)):
            tcp.pull(peer, "0" * 32 + ".parcel", LAYOUT, b"k", PATIENCE_S)
    with closing(tcp.pull(peer, _send(memory), LAYOUT, b"k", PATIENCE_S)):
        pass
    assert not server._strangers
    server.close()


@pytest.mark.parametrize("name", ["0" * 31 + "\0.parcel", "a\0b", "..", "\x7f" * 64, "0" * 33 + ".parcel"])
def test_an_odd_name_is_declined_without_a_word_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    server = tcp.ParcelServer(SharedMemory(folder, MAX_BYTES), Peer("127.0.0.1", 0), b"k")
    with pytest.raises(ParcelError, match="no such parcel"):
        tcp.pull(Peer("127.0.0.1", server.port), name, LAYOUT, b"k", PATIENCE_S)
    server.close()
    assert not caplog.records


def test_a_parcel_stays_until_it_has_arrived(folder: Path) -> None:
    """A daemon that reads all but the last byte, and goes, may come again."""
    memory = SharedMemory(folder, MAX_BYTES)
    server = tcp.ParcelServer(memory, Peer("127.0.0.1", 0), b"k")
    peer, name = Peer("127.0.0.1", server.port), _send(memory)
    with closing(tcp.pull(peer, name, LAYOUT, b"k", PATIENCE_S)) as pulled:
        pulled.read(0, 2)
    eventually(lambda: server.num_open == 0)
    with closing(tcp.pull(peer, name, LAYOUT, b"k", PATIENCE_S)) as pulled:
        assert pulled.read(0, 3).tolist() == np.arange(48).reshape(3, 16).tolist()
    eventually(lambda: not (folder / name).exists())
    server.close()


def _pretend(listener: socket.socket) -> None:
    """Answer as a daemon does that knows the protocol, and not the key."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"quiretcp1" + bytes(32))
        connection.recv(1 << 16, socket.MSG_PEEK)
        connection.sendall(bytes(33))
        connection.recv(1 << 16)
