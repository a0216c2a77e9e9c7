"""Reads the K/V blocks that other daemons keep, as they write them: in the same folder, or in that of a peer.

A thread reads their indexes every second, and says which contents came and went. Nothing is locked or written: a block
that its daemon has replaced meanwhile fails its checksum and is computed.
"""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.core.errors import ConfigError
from engine.core.kv.tiers import News, Transfer
from engine.runtime.transports import parts
from engine.runtime.transports.base import Opening
from engine.runtime.transports.disk import DiskStore
from engine.runtime.transports.peer_folder import FolderServer, PeerFolder
from engine.runtime.transports.worker import Rows, Worker
from engine.settings.peer import Peer

LOOK_S = 1.0  # between two looks at the others' indexes
_MAX_NAMES = 1 << 18  # contents of others that are remembered: about 100 MB
_PEER_NAMES = 1 << 16  # of these, for a peer's
_COMPARED = 64 * parts.ENTRY_BYTES  # of an index that are compared, and read if they differ


def open_store(opening: Opening) -> SharedFolder | None:
    """Open the other daemons' parts of this one's folder, and the folder of a peer, if there are. Raises ConfigError."""
    own, peer = opening.opened.get("disk"), opening.config.kv_offload_peer
    key = opening.config.kv_offload_key or ""
    sources: list[Source] = []
    num_names, server = 0, None
    if isinstance(own, DiskStore):
        sources.append(Folder(own.folder, opening.fingerprint, own.part))
        num_names += 4 * own.num_slots
        server = _listen(opening, own.folder, key)
    if peer is not None:
        sources.append(PeerFolder(Peer.parse(peer), opening.fingerprint, key))
        num_names += _PEER_NAMES
    if not sources:
        return None
    return SharedFolder(Others(sources), min(num_names, _MAX_NAMES), opening.pool, server)


def _listen(opening: Opening, folder: Path, key: str) -> FolderServer | None:
    listen = opening.config.kv_offload_listen
    if listen is None:
        return None
    try:
        return FolderServer(folder, opening.fingerprint, opening.block_bytes, Peer.parse(listen), key)
    except OSError as error:
        raise ConfigError(f"--kv-offload-config: listen is {listen}: {error.strerror or error}.") from error


class Source(Protocol):
    """Parts that other daemons write to."""

    def indexes(self, known: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the index of each part; `known` has them as they were at the last call."""

    def read(self, name: str, slot: int, row: memoryview) -> bool:
        """Read a block of a part into `row`, unchecked; returns False if it is gone."""

    def close(self) -> None: ...


class Folder:
    """The parts of this daemon's folder, without its own."""

    def __init__(self, folder: Path, fingerprint: str, own: str) -> None:
        self._folder, self._fingerprint, self._own = folder, fingerprint, own

    def indexes(self, known: Mapping[str, bytes]) -> dict[str, bytes]:  # noqa: ARG002 - reading is cheap
        """Return the index of each part; none if the folder cannot be reached."""
        try:
            names = parts.names(self._folder, self._fingerprint)
        except OSError:
            return {}
        return {name: parts.read_index(self._folder, name) for name in names if name != self._own}

    def read(self, name: str, slot: int, row: memoryview) -> bool:
        """Read a block into `row`; returns False if it is gone."""
        return parts.read_block(self._folder, name, slot, row)

    def close(self) -> None:
        """Nothing is open."""


class Part:
    """What the index of one other daemon says."""

    def __init__(self) -> None:
        self.content = b""  # of its index
        self._entries: dict[int, parts.Entry] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by digest

    def update(self, content: bytes) -> tuple[list[bytes], list[bytes]]:
        """Take in the index's bytes; returns the digests that came and those that went."""
        came, went = [], []
        for start in range(0, max(len(content), len(self.content)), _COMPARED):
            if content[start : start + _COMPARED] != self.content[start : start + _COMPARED]:
                for at in range(start, start + _COMPARED, parts.ENTRY_BYTES):
                    slot, entry = at // parts.ENTRY_BYTES, parts.unpack(content[at : at + parts.ENTRY_BYTES])
                    old = self._entries.pop(slot, None)
                    if entry is not None:
                        self._entries[slot] = entry
                    if entry == old:
                        continue
                    if old is not None:
                        went.append(old.digest)
                        self._slots.pop(old.digest, None)
                    if entry is not None:
                        came.append(entry.digest)
                        self._slots[entry.digest] = slot
        self.content = content
        return came, went

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """Return the slot and the checksum of a block."""
        slot = self._slots.get(digest)
        return None if slot is None else (slot, self._entries[slot].checksum)


class Others:
    """The parts that other daemons write to, as they were at the last look."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources: list[tuple[Source, dict[str, Part]]] = [(source, {}) for source in sources]
        self._holders: Counter[bytes] = Counter()  # of each content, among the parts

    def look(self) -> News | None:
        """Read the indexes; returns what has changed."""
        changed: dict[bytes, None] = {}  # a set in the order of the indexes
        for source, known in self._sources:
            indexes = source.indexes({name: part.content for name, part in known.items()})
            for name in {*indexes, *known}:
                came, went = known.setdefault(name, Part()).update(indexes.get(name, b""))
                self._holders.update(came)
                self._holders.subtract(went)
                changed.update(dict.fromkeys((*went, *came)))
                if name not in indexes:
                    del known[name]
        gained = [digest for digest in changed if self._holders[digest]]
        lost = [digest for digest in changed if not self._holders[digest]]
        for digest in lost:
            del self._holders[digest]
        return News(gained, lost) if changed else None

    def read(self, digest: bytes, row: memoryview) -> bool:
        """Read a block into `row`; returns False if it is gone."""
        for source, known in self._sources:
            for name, part in known.items():
                slot, expected = part.find(digest) or (-1, 0)
                if slot >= 0 and source.read(name, slot, row) and parts.checksum(digest, row) == expected:
                    return True
        return False

    def close(self) -> None:
        """End the connections; nothing is read after it."""
        for source, _ in self._sources:
            source.close()


class SharedFolder(Worker):
    """A Store that others write to. Start-up thread, then engine thread."""

    is_shared = True
    kept: Sequence[tuple[bytes, int]] = ()  # they come as news

    def __init__(self, others: Others, num_slots: int, pool: Rows, server: FolderServer | None = None) -> None:
        """Start the thread, which looks for up to `num_slots` contents; `server` offers this daemon's."""
        super().__init__(pool, "quire-kv-others", LOOK_S)
        self.num_slots, self._others, self.server = num_slots, others, server
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._thread.start()

    def news(self) -> list[News]:
        """Return which contents came and went since the last call."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def close(self) -> None:
        """End every connection and the thread, which may wait for one."""
        self._others.close()
        super().close()
        if self.server is not None:
            self.server.close()

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        news = self._others.look()
        if news is not None:
            self._news.put(news)

    def _move(self, transfer: Transfer, row: memoryview) -> bool:
        return self._others.read(transfer.name, row)
