"""A daemon that reads the K/V folder of another one over TCP: it has what is there, or nothing."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engine.core.budget import StepTime
from engine.core.errors import ConfigError, ParcelError
from engine.core.kv import tiers
from engine.runtime.stores import listener, parts, tier, wire
from engine.runtime.stores.disk import DiskStore
from engine.runtime.stores.folder import Folder, SharedStore
from engine.runtime.stores.listener import Listener
from engine.runtime.stores.wire import PeerFolder
from engine.settings.peer import Peer
from tests.cpu.test_disk_store import BLOCK_BYTES, NUM_SLOTS, Host, content, engine_on, opened, tiny
from tests.cpu.test_shared_folder import Reader as FolderReader
from tests.cpu.test_shared_folder import entries, learn, say
from tests.patience import PATIENCE_S, POLL_S

FINGERPRINT = "ab" * 16


class Reader(FolderReader):
    """A daemon of another machine."""

    def __init__(self, server: Listener, key: str = "k", fingerprint: str = FINGERPRINT) -> None:
        self.peer = PeerFolder(Peer("127.0.0.1", server.port), fingerprint, key)
        self._others, self.names = SharedStore([self.peer]), set[bytes]()


def offer(folder: Path, port: int = 0) -> Listener:
    return listener.offer(Folder(folder, FINGERPRINT, BLOCK_BYTES), Peer("127.0.0.1", port), "k")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Listener]:
    opened = offer(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_peer_has_what_the_folder_has_or_nothing(
    tmp_path: Path, server: Listener, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Blocks are written, replaced and damaged, and connections end, in any order."""
    monkeypatch.setattr(wire, "_PIECE_BYTES", 2 * parts.ENTRY_BYTES)  # an index of several pieces
    draw, reader = random.Random(seed), Reader(server)
    is_damaged = False
    with opened(tmp_path, name=FINGERPRINT) as first, opened(tmp_path, name=FINGERPRINT) as second:
        for _ in range(60):
            action = draw.choice(["write"] * 6 + ["look"] * 3 + ["cut", "damage"])
            host: Host = draw.choice([first, second])
            if action == "write":
                host.write(draw.randrange(1, 12), draw.randrange(NUM_SLOTS))
            elif action == "look":
                found = reader.look()
                names = parts.names(tmp_path, FINGERPRINT)
                there = {entry.name[0] for name in names for entry in entries(tmp_path, name)}
                assert found == there
                if not is_damaged:
                    assert all(reader.read(name) == content(name) for name in found)
            elif action == "cut":
                reader.peer._disconnect()
                assert reader.read(draw.randrange(1, 12)) is None
            else:
                is_damaged = True
                path = tmp_path / f"{host.store.name}{draw.choice(parts.KINDS)}"
                with path.open("r+b") as file:
                    file.seek(draw.randrange(max(path.stat().st_size, 1)))
                    file.write(draw.randbytes(60))
            for each in {name[0] for name in reader.names}:
                assert reader.read(each) in (content(each), None)
    reader.peer.close()


def test_a_daemon_that_is_gone_is_found_again(tmp_path: Path, server: Listener) -> None:
    reader = Reader(server)
    with opened(tmp_path, name=FINGERPRINT) as host:
        host.write(1, 0)
        assert reader.look() == {1}
        server.close()
        assert reader.read(1) is None
        assert reader.look() == set()
        again = offer(tmp_path, server.port)
        assert reader.look() == {1}
        assert reader.read(1) == content(1)
        reader.peer.close()
        again.close()


def test_only_the_same_key_and_model_are_served(tmp_path: Path, server: Listener) -> None:
    with opened(tmp_path, name=FINGERPRINT) as host:
        host.write(1, 0)
        assert Reader(server, key="other").look() == set()
        assert Reader(server, fingerprint="cd" * 16).look() == set()
        reader = Reader(server)
        assert reader.look() == {1}
        row = memoryview(bytearray(BLOCK_BYTES))
        assert list(reader.peer.read(FINGERPRINT, [NUM_SLOTS], [row])) == [None], "beyond the end"
        assert reader.read(1) == content(1)
        reader.peer.close()


def test_only_parts_with_the_fingerprint_are_read(tmp_path: Path) -> None:
    """The other files exist and hold a block, so nothing but the check of the name refuses them."""
    folder = tmp_path / "kv"
    with opened(folder, name=FINGERPRINT) as host:
        host.write(1, 0)
        (folder / FINGERPRINT).mkdir()
        others = [
            "cd" * 16, f"../{FINGERPRINT}", "../x", f"{FINGERPRINT}/../x", f"{FINGERPRINT}/x", f"{FINGERPRINT}cd",
            f"{FINGERPRINT}.x", f"{FINGERPRINT}.2.2", f"{FINGERPRINT}.",
        ]  # fmt: skip
        for name in others:
            path = folder / f"{name}.kv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((folder / f"{FINGERPRINT}.kv").read_bytes())
            assert path.stat().st_size >= BLOCK_BYTES
        server = offer(folder)
        reader = Reader(server)
        assert reader.look() == {1}
        row = memoryview(bytearray(BLOCK_BYTES))
        assert list(reader.peer.read(FINGERPRINT, [0], [row])) == [row]
        assert [name for name in others if list(reader.peer.read(name, [0], [row])) != [None]] == []
        assert reader.read(1) == content(1), "the connection is good"
        reader.peer.close()
        server.close()


def test_a_request_without_sense_ends_the_connection(server: Listener) -> None:
    peer, key = Peer("127.0.0.1", server.port), wire.derive_key("k")
    for request in (
        struct.pack("<BI", 0, 1 << 30),
        struct.pack("<BI", 0, 3) + b"abc",
        struct.pack("<BI", 0, 168) + bytes(160) + struct.pack("<II", 0, 1 << 31),
        struct.pack("<BI", 1, 88) + bytes(80) + struct.pack("<Q", 1 << 63),
        struct.pack("<BI", 1, 83) + bytes(83),
        struct.pack("<BI", 9, 80) + bytes(80),
    ):
        deadline = wire.Deadline(PATIENCE_S)
        with wire.call(peer, FINGERPRINT, key, deadline) as caller:
            wire.send(caller, request, deadline)
            caller.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError, ParcelError):
                while wire.receive(caller, 1, deadline):
                    pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offload_dir": None, "kv_offload_listen": "127.0.0.1:0"}, "set folder"),
        ({"kv_offload_listen": "0.0.0.0:5700"}, "set key"),
        ({"kv_offload_peer": "10.0.0.5"}, "must be like"),
        ({"kv_offload_dir": None, "kv_offload_gib": 0.0, "kv_offload_peer": "10.0.0.5:1"}, "set host_gib"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_on(tmp_path, tmp_path / "kv", **settings)


def test_an_engine_loads_what_its_peer_computed_and_says_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", PATIENCE_S)
    monkeypatch.setattr(StepTime, "is_known", False)
    monkeypatch.setattr(tier, "LOOK_S", POLL_S)
    model, folder = tiny(tmp_path), tmp_path / "kv"
    expected = say(engine_on(model, folder, kv_offload_listen="127.0.0.1:0"))
    offering = engine_on(
        model, folder, kv_offload_listen="127.0.0.1:0"
    )  # all that the first has written before it ended
    assert offering._offload is not None
    own = offering._offload._transports["disk"].store  # type: ignore[attr-defined]
    assert isinstance(own, DiskStore)
    assert own.listener is not None
    second = engine_on(model, folder, kv_offload_dir=None, kv_offload_peer=f"127.0.0.1:{own.listener.port}")
    learn(second, folder)
    assert say(second) == expected
    assert second.stats.prefix_hits["shared"] == 4 * 44
    assert not any(second.stats.failed_transfers.values())
    offering.stop(0.0)
