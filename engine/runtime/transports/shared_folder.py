"""Reads the K/V blocks that other daemons keep in the same folder, as they write them.

A thread reads their indexes every second, and says which contents came and went. Nothing is locked or written: a block
that its daemon has replaced meanwhile fails its checksum and is computed.
"""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.core.kv.tiers import News, Transfer
from engine.runtime.transports import parts
from engine.runtime.transports.base import Opening
from engine.runtime.transports.disk import DiskStore
from engine.runtime.transports.worker import Rows, Worker

LOOK_S = 1.0  # between two looks at the others' indexes
_MAX_NAMES = 1 << 18  # contents of others that are remembered: about 100 MB
_COMPARED = 64 * parts.ENTRY_BYTES  # of an index that are compared, and read if they differ


def open_store(opening: Opening) -> SharedFolder | None:
    """Open the other daemons' parts of the folder in which this one has its own, if it has."""
    own = opening.opened.get("disk")
    if not isinstance(own, DiskStore):
        return None
    others = Others(own.folder, opening.fingerprint, own.part, opening.block_bytes)
    return SharedFolder(others, min(4 * own.num_slots, _MAX_NAMES), opening.pool)


class Part:
    """What the index of one other daemon says."""

    def __init__(self) -> None:
        self._content = b""
        self._entries: dict[int, parts.Entry] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by digest

    def update(self, content: bytes) -> tuple[list[bytes], list[bytes]]:
        """Take in the index's bytes; returns the digests that came and those that went."""
        came, went = [], []
        for start in range(0, max(len(content), len(self._content)), _COMPARED):
            if content[start : start + _COMPARED] != self._content[start : start + _COMPARED]:
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
        self._content = content
        return came, went

    def find(self, digest: bytes) -> tuple[int, int] | None:
        """Return the slot and the checksum of a block."""
        slot = self._slots.get(digest)
        return None if slot is None else (slot, self._entries[slot].checksum)


class Others:
    """The parts of a folder that other daemons write to, as they were at the last look."""

    def __init__(self, folder: Path, fingerprint: str, own: str, block_bytes: int) -> None:
        self._folder, self._fingerprint, self._own = folder, fingerprint, own
        self._stride = parts.stride(block_bytes)
        self._parts: dict[str, Part] = {}
        self._holders: Counter[bytes] = Counter()  # of each content, among the parts

    def look(self) -> News | None:
        """Read the indexes; returns what has changed."""
        try:
            names = [name for name in parts.names(self._folder, self._fingerprint) if name != self._own]
        except OSError:
            names = []  # the folder cannot be reached
        changed: dict[bytes, None] = {}  # a set in the order of the indexes
        for name in {*names, *self._parts}:
            came, went = self._parts.setdefault(name, Part()).update(_read_index(self._folder / f"{name}.index"))
            self._holders.update(came)
            self._holders.subtract(went)
            changed.update(dict.fromkeys((*went, *came)))
            if name not in names:
                del self._parts[name]
        gained = [digest for digest in changed if self._holders[digest]]
        lost = [digest for digest in changed if not self._holders[digest]]
        for digest in lost:
            del self._holders[digest]
        return News(gained, lost) if changed else None

    def read(self, digest: bytes, row: memoryview) -> bool:
        """Read a block into `row`; returns False if it is gone."""
        for name, part in self._parts.items():
            found = part.find(digest)
            if found is not None and self._read(name, *found, digest, row):
                return True
        return False

    def _read(self, name: str, slot: int, expected: int, digest: bytes, row: memoryview) -> bool:
        with _opened(self._folder / f"{name}.kv") as file:
            length = 0 if file is None else os.preadv(file, [row], slot * self._stride)
        return length == len(row) and parts.checksum(digest, row) == expected


class SharedFolder(Worker):
    """A Store that others write to. Start-up thread, then engine thread."""

    is_shared = True
    kept: Sequence[tuple[bytes, int]] = ()  # they come as news

    def __init__(self, others: Others, num_slots: int, pool: Rows) -> None:
        """Start the thread, which looks for up to `num_slots` contents."""
        super().__init__(pool, "quire-kv-others", LOOK_S)
        self.num_slots, self._others = num_slots, others
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._thread.start()

    def news(self) -> list[News]:
        """Return which contents came and went since the last call."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        news = self._others.look()
        if news is not None:
            self._news.put(news)

    def _move(self, transfer: Transfer, row: memoryview) -> bool:
        return self._others.read(transfer.name, row)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Open a file of another daemon; None if it is there no longer."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def _read_index(path: Path) -> bytes:
    try:
        with _opened(path) as file:
            return b"" if file is None else os.pread(file, os.fstat(file).st_size, 0)
    except OSError:  # the disk cannot read it
        return b""
