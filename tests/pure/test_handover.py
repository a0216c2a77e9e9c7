"""K/V parcels: what leaves one engine's prefix cache arrives in another's, and nothing that is wrong does.

The same tests run over shared memory and over TCP.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from engine.core.errors import ParcelError
from engine.core.kv.imports import Place
from engine.core.kv.prefix_cache import request_names
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.types import Request
from engine.handle import EngineFacts, Layout
from engine.handover import Handover, HandoverConfig, Offer, Prefix
from engine.loop import Engine
from engine.runtime.stores import listener, parts, wire
from engine.runtime.stores.folder import KnownPart, Parcels
from engine.runtime.stores.wire import PeerFolder
from engine.settings.peer import Peer
from loadtest.fake_runner import FakeRunner, FakeStep
from tests.patience import PATIENCE_S, eventually
from tests.pure.driver import VOCAB, config, request, solo
from tests.pure.test_loop import Listener

LAYOUT = Layout("f" * 32, block_size=4, block_bytes=16)
MAX_BYTES = 1 << 20


def parcels(folder: Path, fingerprint: str = LAYOUT.fingerprint, max_bytes: int = MAX_BYTES) -> Parcels:
    return Parcels(folder, fingerprint, LAYOUT.block_bytes, max_bytes, 100.0)


class Daemon:
    """An engine with one end of the hand-over."""

    def __init__(self, folder: Path, transport: HandoverConfig | None = None, **settings: Any) -> None:
        self.config = config(num_blocks=48, max_num_batched_tokens=16, **settings)
        self.runner = FakeRunner(self.config, vocab_size=VOCAB)
        self.engine = Engine(Scheduler(self.config), self.runner, EngineFacts(VOCAB))
        self.handover = Handover(self.engine, parcels(folder), LAYOUT, transport)
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


def remote_pair(folder: Path, **settings: Any) -> tuple[Daemon, Daemon]:
    """A prefill daemon and a decode daemon that have no folder in common."""
    prefill = Daemon(folder, LOOPBACK, **settings)
    decode = Daemon(folder.with_name("other"), HandoverConfig(key="k"), **settings)
    assert prefill.handover.port is not None
    decode.peer = Peer("127.0.0.1", prefill.handover.port)
    return prefill, decode


@pytest.fixture(params=["shared memory", "tcp", "shared memory, windows", "tcp, windows and states"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Daemon, Daemon]]:
    """A prefill daemon and a decode daemon."""
    groups = {"windows": (6, 9)} if "windows" in request.param else {}
    if "states" in request.param:
        groups["state_blocks"] = 4  # more than a piece
    if "tcp" in request.param:
        daemons = remote_pair(folder, **groups)
    else:
        daemons = Daemon(folder, **groups), Daemon(folder, **groups)
    for daemon in daemons:
        daemon.handover._piece = 3  # a prompt takes several
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


def test_vectors_in_a_prompt_are_a_part_of_its_names(folder: Path) -> None:
    prefill, decode = Daemon(folder), Daemon(folder)
    try:
        one, other = ((Span(6, 9, digest * 32),) for digest in (b"1", b"2"))
        prefill.answer(request("p", PROMPT, max_tokens=0, spans=one))
        assert prefill.handover.send(prefill.prefix(request("d", PROMPT))) is not None, "the block before the vectors"
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT, spans=one)))
        assert sent is not None
        with pytest.raises(ParcelError, match="another prompt"):
            decode.take(sent, request("d", PROMPT, spans=other))
        asked = request("d", PROMPT, max_tokens=5, spans=one)
        assert decode.take(sent, asked) == 7
        for spans, num_missing in ((one, 0), (other, 6), ((), 6)):
            missing = decode.handover.count_missing(decode.prefix(request("m", PROMPT, spans=spans)))
            assert missing.num_blocks == num_missing
        assert decode.answer(asked) == [solo(asked, 0)[0]]
    finally:
        prefill.close()
        decode.close()


def test_a_full_pool_takes_what_it_has_room_for(folder: Path) -> None:
    prefill, decode = Daemon(folder), Daemon(folder)
    try:
        prefill.answer(request("p", PROMPT, max_tokens=0))
        sent = prefill.handover.send(prefill.prefix(request("d", PROMPT)))
        assert sent is not None
        blocks = decode.engine.between_steps(lambda scheduler, _: scheduler.kv.pool.alloc_many(45)).result(PATIENCE_S)
        assert decode.take(sent, request("d", PROMPT)) == 3
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
        assert decode.take(sent, request("d", PROMPT)) == 5
        prefix = decode.prefix(request("d", PROMPT))
        num_found = decode.engine.between_steps(lambda scheduler, _: scheduler.kv.imports.find_prefix(*prefix[:2], 7))
        assert num_found.result(PATIENCE_S) == 5, "of seven, in a pool of 48 blocks"
    finally:
        prefill.engine.stop(0)
        decode.engine.stop(0)


@pytest.mark.parametrize("settings", [{}, {"windows": (6,)}], ids=["full attention", "windows"])
def test_requests_wait_for_blocks_that_an_import_holds(folder: Path, settings: dict[str, Any]) -> None:
    """One that waits has no room; one that runs alone comes to need more blocks than were left to it."""
    daemon = Daemon(folder, **settings)
    places = [Place(0, index) for index in range(48)]
    try:
        for asked in (request("waits", PROMPT, max_tokens=4), request("grows", (1, 2, 3), max_tokens=40)):
            held = daemon.engine.between_steps(
                lambda scheduler, _: scheduler.kv.imports.begin([b"x" * 32], range(192), places, reserve=2)
            ).result(PATIENCE_S)
            daemon.engine.submit(asked)
            num_steps = -1
            while num_steps < daemon.runner.num_steps:  # until nothing is planned any more
                num_steps = daemon.runner.num_steps
                time.sleep(0.05)
            assert (asked.request_id, 0) not in daemon.listener.ends
            daemon.engine.between_steps(lambda scheduler, _, held=held: scheduler.kv.imports.cancel(held))
            daemon.listener.wait_for(lambda name=asked.request_id: (name, 0) in daemon.listener.ends)
            assert daemon.listener.said(asked.request_id, 0) == solo(asked, 0)[0]
    finally:
        daemon.close()
    assert not daemon.engine.stats.integrity_failures


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


BLOCKS = {bytes([index]) * 32: bytes(range(16 * index, 16 * index + 16)) for index in range(1, 6)}


def _send(memory: Parcels, num_blocks: int = 3) -> str:
    parcel = memory.pack(5)
    for slot, (name, content) in enumerate(list(BLOCKS.items())[:num_blocks]):
        parcel.put(name, memoryview(content), slot)
    parcel.resize(num_blocks)
    parcel.close()
    return parcel.name


def _read(parcel: KnownPart, num_blocks: int = 3) -> list[bytes]:
    """Return the checked blocks of a parcel."""
    names, rows = list(BLOCKS)[:num_blocks], [bytearray(16) for _ in range(num_blocks)]
    return [bytes(row) for row in rows[: sum(parcel.read(names, map(memoryview, rows)))]]


def _opened(memory: Parcels | PeerFolder, name: str) -> KnownPart:
    parcel = KnownPart(memory, name)
    parcel.look()
    return parcel


def test_a_parcel_arrives_as_it_was_and_once(folder: Path) -> None:
    memory = parcels(folder)
    parcel = _opened(memory, _send(memory))
    assert parcel.has(BLOCKS) == 3
    assert _read(parcel, 5) == list(BLOCKS.values())[:3]
    memory.remove(parcel.name)
    assert not _opened(memory, parcel.name).has(BLOCKS)
    assert not list(folder.iterdir())


def test_a_damaged_parcel_is_read_as_far_as_it_is_good(folder: Path) -> None:
    memory = parcels(folder)
    for kind in parts.KINDS:
        name = _send(memory)
        path = folder / f"{name}{kind}"
        whole = path.read_bytes()
        for change in (whole[:10] + b"x" + whole[11:], whole[:9], b""):
            path.write_bytes(change)
            assert _read(_opened(memory, name)) == []
        path.write_bytes(whole[: len(whole) // 3])
        assert _read(_opened(memory, name)) == list(BLOCKS.values())[:1]


@pytest.mark.parametrize(
    "name", ["../secret.parcel", "/etc/passwd", "a.packing", "", "0" * 33, "0" * 31 + "/", "\u00e4"]
)
def test_nothing_but_a_parcel_is_asked_for(folder: Path, name: str) -> None:
    with pytest.raises(ParcelError, match="not the name of a parcel"):
        parcels(folder).part_of(name)


def test_another_models_parcel_is_not_found(folder: Path) -> None:
    name = _send(parcels(folder))
    assert not _opened(parcels(folder, "e" * 32), name).has(BLOCKS)
    assert not _opened(parcels(folder, "e" * 32), name.replace("f", "e")).has(BLOCKS)
    assert _opened(parcels(folder), name).has(BLOCKS) == 3


def test_what_nobody_fetches_is_swept_and_the_memory_is_bounded(folder: Path) -> None:
    memory = parcels(folder, max_bytes=8 * 4096)
    old = _send(memory)
    with pytest.raises(ParcelError, match="beyond"):
        memory.pack(6)
    _send(memory)
    with pytest.raises(ParcelError, match="beyond"):
        memory.pack(5)
    for kind in parts.KINDS:
        os.utime(folder / f"{old}{kind}", (time.time() - 1000,) * 2)
    memory.pack(5).close()
    assert len(list(folder.iterdir())) == 4
    assert not _opened(memory, old).has(BLOCKS)


def test_what_nobody_fetches_expires_though_nothing_else_happens(folder: Path) -> None:
    memory = Parcels(folder, LAYOUT.fingerprint, LAYOUT.block_bytes, MAX_BYTES, 0.05)
    _send(memory)
    with closing(Handover(Mock(), memory, LAYOUT)):
        eventually(lambda: not list(folder.iterdir()))


def test_a_parcel_that_is_gone_when_it_is_looked_at_takes_no_memory(folder: Path) -> None:
    """Another daemon opens it at that moment; a link to nowhere is listed and cannot be looked at either."""
    memory = parcels(folder)
    (folder / f"{LAYOUT.fingerprint}.{'0' * 32}.kv").symlink_to(folder / "nowhere")
    memory.pack(5).close()


def test_a_parcel_that_is_being_filled_is_not_removed(folder: Path) -> None:
    memory = parcels(folder)
    parcel = memory.pack(5)
    memory.remove(parcel.name)
    assert len(list(folder.iterdir())) == 2
    parcel.close()
    memory.remove(parcel.name)
    assert not list(folder.iterdir())


def test_a_folder_that_others_may_read_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ParcelError, match="chmod 700"):
        parcels(folder)


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
    monkeypatch.setattr(wire, "IDLE_S", 0.005)
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.02)
    rng, others = random.Random(18), set(threading.enumerate())
    prefill, decode = remote_pair(folder)
    assert decode.peer is not None
    direct, line = decode.peer, FaultyWire(decode.peer.port)
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        dead = Peer("127.0.0.1", bound.getsockname()[1])
        before = num_sockets()
        failed: Counter[str] = Counter()
        for number in range(1000):
            kind = rng.choice(["cut"] * 6 + ["flip"] * 6 + ["slow", "stall", "half"] + OTHER_FAULTS)
            asked = request(f"d{number}", (number // 40, number % 40, *PROMPT), max_tokens=3)
            prefill.answer(request(f"p{number}", asked.prompt, max_tokens=0))
            sent = prefill.handover.send(prefill.prefix(asked))
            assert sent is not None
            is_reply = rng.random() < 0.8
            line.fault = Fault(kind, is_reply, rng.randrange(1000 if is_reply else 400))
            decode.peer = line.peer if kind in ("cut", "flip", "slow", "stall", "half") else direct
            part = folder / f"{LAYOUT.fingerprint}.{sent.name}.index"
            with break_something(kind, decode, part, dead) as broken_offer:
                try:
                    decode.take(broken_offer or sent, asked)
                except (ParcelError, OSError):
                    failed[kind] += 1
            assert decode.answer(asked) == [solo(asked, 0)[0]], (kind, line.fault)
            line.release()
            for daemon in (prefill, decode):
                daemon.listener.batches.clear()  # they are searched for every answer
            prefill.handover._parcels.remove(part.stem)
    assert all(failed[kind] > 10 for kind in ("cut", "flip", "stall", *OTHER_FAULTS)), failed
    assert not failed["slow"] or failed["slow"] < 60
    line.close()
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
            patch.setattr(handover, "_config", HandoverConfig(key="another"))
        elif kind == "expired":
            for path in parcel.parent.glob(f"{parcel.stem}.*"):
                os.utime(path, (time.time() - 1000,) * 2)
        elif kind == "gone":
            offer = Offer("0" * 32, 7, 0.0)
        elif kind == "dead":
            patch.setattr(decode, "peer", dead)
        elif kind == "other prompt":
            patch.setattr(handover, "_names", lambda *_: [bytes(32)] * 7)
        yield offer


def num_sockets() -> int:
    """Return how many sockets this process has open."""
    links = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    return sum("socket:" in link for link in links)


@pytest.fixture
def memory(folder: Path) -> Parcels:
    return parcels(folder)


@pytest.fixture
def server(memory: Parcels) -> Iterator[listener.Listener]:
    opened = listener.Listener(memory, Peer("127.0.0.1", 0), "k")
    yield opened
    opened.close()


def _pull(server: listener.Listener, name: str, port: int = 0) -> KnownPart:
    """Return a parcel that a daemon elsewhere offers."""
    far = PeerFolder(Peer("127.0.0.1", port or server.port), LAYOUT.fingerprint, "k", wire.Deadline(PATIENCE_S))
    return _opened(far, name)


def test_strangers_are_sent_away_and_a_crowd_waits_for_nobody(
    memory: Parcels, server: listener.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that say nothing take no more than their places, and lose them."""
    with ExitStack() as crowd:
        with monkeypatch.context() as patch:
            patch.setattr(wire, "HANDSHAKE_S", 0.2)
            peer = Peer("127.0.0.1", server.port)
            sockets = [crowd.enter_context(socket.create_connection(peer)) for _ in range(listener.MAX_STRANGERS + 3)]
            for each in sockets:
                each.settimeout(PATIENCE_S)
                while each.recv(1 << 10):
                    pass
        name = _send(memory)
        with closing((pulled := _pull(server, name)).source):
            assert _read(pulled) == list(BLOCKS.values())[:3]
    impostor = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_pretend, args=(impostor,))
    thread.start()
    with pytest.raises(ParcelError, match="does not have the key"):
        _pull(server, name, impostor.getsockname()[1])
    thread.join()
    impostor.close()


def test_daemons_with_the_key_get_in_while_strangers_hold_all_they_can(
    memory: Parcels, server: listener.Listener
) -> None:
    """They take no place; a further one pushes the oldest out. Places are bounded all the same, and come back."""
    peer = Peer("127.0.0.1", server.port)
    with ExitStack() as crowd:
        strangers = [crowd.enter_context(socket.create_connection(peer)) for _ in range(listener.MAX_STRANGERS + 3)]
        name = _send(memory)
        pulled = [crowd.enter_context(closing(_pull(server, name).source)) for _ in range(listener.MAX_CONNECTIONS)]
        assert server.num_open == listener.MAX_CONNECTIONS
        assert len(server._strangers) <= listener.MAX_STRANGERS
        strangers[0].settimeout(PATIENCE_S)
        strangers[0].recv(1 << 10)
        assert strangers[0].recv(1) == b"", "it was the oldest"
        with pytest.raises((ParcelError, OSError)):
            _pull(server, name)
        pulled[0].close()
        eventually(lambda: server.num_open < listener.MAX_CONNECTIONS)
        crowd.enter_context(closing(_pull(server, name).source))


def test_a_stranger_pushes_out_one_of_the_address_that_has_the_most(server: listener.Listener) -> None:
    ours = {name: socket.socket() for name in ("first", "second", "third")}
    server._strangers = dict(zip(ours.values(), ("10.0.0.1", "10.0.0.2", "10.0.0.2"), strict=True))
    server._push_out()
    assert list(server._strangers) == [ours["first"], ours["third"]]
    for each in ours.values():
        each.close()


def test_a_thread_that_cannot_start_ends_no_server(
    memory: Parcels, server: listener.Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread is left")))
        with pytest.raises((ParcelError, OSError)):
            _pull(server, "0" * 32)
    with closing((pulled := _pull(server, _send(memory))).source):
        assert pulled.has(BLOCKS) == 3
    assert not server._strangers


@pytest.mark.parametrize("name", ["0" * 31 + "\0", "a\0b", "..", "\x7f" * 64, "0" * 33, "", "../secret"])
def test_an_odd_name_is_declined_without_a_word_in_the_log(
    memory: Parcels, server: listener.Listener, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    _send(memory)
    for asked in (name, f"{LAYOUT.fingerprint}.{name}"):
        with closing((pulled := _pull(server, asked[:80])).source):
            assert not pulled.index.entries
            pulled.source.remove(pulled.name)
    assert not caplog.records
    assert len(list(memory.path.iterdir())) == 2


def test_a_parcel_stays_until_it_has_arrived(memory: Parcels, server: listener.Listener) -> None:
    """A daemon that reads all but the last block, and goes, may come again."""
    name = _send(memory)
    with closing((pulled := _pull(server, name)).source):
        assert len(_read(pulled, 2)) == 2
    eventually(lambda: server.num_open == 0)
    with closing((pulled := _pull(server, name)).source):
        assert _read(pulled) == list(BLOCKS.values())[:3]
        pulled.source.remove(pulled.name)
        eventually(lambda: not list(memory.path.iterdir()))


def test_a_request_without_sense_ends_the_connection(server: listener.Listener) -> None:
    peer, key = Peer("127.0.0.1", server.port), wire.derive_key("k")
    for sent in (
        struct.pack("<BI", 0, 1 << 30),
        struct.pack("<BI", 0, 3) + b"abc",
        struct.pack("<BI", 1, 88) + bytes(80) + struct.pack("<Q", 1 << 63),
        struct.pack("<BI", 1, 83) + bytes(83),
        struct.pack("<BI", 9, 80) + bytes(80),
    ):
        deadline = wire.Deadline(PATIENCE_S)
        with wire.call(peer, LAYOUT.fingerprint, key, deadline) as caller:
            wire.send(caller, sent, deadline)
            caller.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError, ParcelError):
                while wire.receive(caller, 1, deadline):
                    pass


def _pretend(listener: socket.socket) -> None:
    """Answer as a daemon does that knows the protocol, and not the key."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"quiretcp4" + bytes(32))
        connection.recv(1 << 16, socket.MSG_PEEK)
        connection.sendall(bytes(33))
        connection.recv(1 << 16)
