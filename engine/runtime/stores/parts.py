"""The files of a K/V folder: parts, of two files each.

    FOLDER/<fingerprint>.kv         slot i at i * stride
    FOLDER/<fingerprint>.index      entry i: the block's name, a number that grows, a checksum of name and block, a check
    FOLDER/<fingerprint>.2.kv ...   the part of a second daemon at the same time
    FOLDER/<fingerprint>.<id>.kv    a parcel: a part that is written once, for one other daemon (parcels.py)

The fingerprint is of everything that K/V depends on, so blocks of another model, type or layout are in other parts. A
daemon writes to its own part only, whose index it locks; all others of the same fingerprint it reads. No reader locks:
a block that is overwritten meanwhile, or torn by a crash, does not have its entry's checksum, so nothing is synced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.system.regular_file import open_file

_PAGE = 4096  # slots begin at a multiple
_ROW_BYTES = _PAGE + 8
_ENTRY = struct.Struct("<35sQI")  # name, when, checksum
_CHECK = struct.Struct("<I")
_DIGEST_BYTES = 32  # of a name; the bytes behind it are its group and part, see in_group in engine/core/kv/prefix_cache.py, without zeros at the end
ENTRY_BYTES = 64
MAX_INDEX_BYTES = ENTRY_BYTES << 20  # of another daemon: a million blocks
KINDS = (".kv", ".index")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of a file system that has none, as NFS may be mounted


class Entry(NamedTuple):
    """What an index says of a slot."""

    name: bytes
    when: int  # the part's entries are numbered as they are written
    checksum: int

    def pack(self) -> bytes:
        """Return its bytes in the index; the rest of ENTRY_BYTES is not used."""
        packed = _ENTRY.pack(*self)
        return packed + _CHECK.pack(zlib.crc32(packed))


def unpack(entry: bytes) -> Entry | None:
    """Return an entry; None if nothing was written there, or it is damaged."""
    if len(entry) < _ENTRY.size + _CHECK.size:
        return None
    name, when, checksum = _ENTRY.unpack_from(entry)
    (check,) = _CHECK.unpack_from(entry, _ENTRY.size)
    if not when or check != zlib.crc32(entry[: _ENTRY.size]):
        return None
    return Entry(name[:_DIGEST_BYTES] + name[_DIGEST_BYTES:].rstrip(b"\0"), when, checksum)


def stride(block_bytes: int) -> int:
    """Return the bytes from one slot to the next."""
    return -(-block_bytes // _PAGE) * _PAGE


def checksum_of(name: bytes, row: memoryview) -> int:
    """Return a checksum against accidents, not attacks, at four times the speed of a CRC-32 over all of the block.

    It is the CRC-32 of the sums of columns of 64-bit words. A row of words is a little longer than a page, so pages that
    change places change the sums.
    """
    num_summed = len(row) // _ROW_BYTES * _ROW_BYTES
    sums = np.frombuffer(row[:num_summed], "<u8").reshape(-1, _ROW_BYTES // 8).sum(axis=0, dtype="<u8")
    return zlib.crc32(row[num_summed:], zlib.crc32(sums.data, zlib.crc32(name)))


class Index:
    """What the index of a part says."""

    def __init__(self) -> None:
        self.content = b""  # of the file, as it was read last
        self.entries: dict[int, Entry] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by name; of two slots the one written last

    def update(self, content: bytes) -> tuple[list[bytes], list[bytes]]:
        """Take in the file's bytes; returns the names that came and those that went."""
        came, went, size = list[bytes](), list[bytes](), 64 * ENTRY_BYTES
        for start in range(0, max(len(content), len(self.content)), size):
            if content[start : start + size] != self.content[start : start + size]:
                for at in range(start, start + size, ENTRY_BYTES):
                    slot, entry = at // ENTRY_BYTES, unpack(content[at : at + ENTRY_BYTES])
                    old = self.entries.get(slot)
                    if entry != old:
                        went += [old.name] if old is not None else []
                        came += [entry.name] if entry is not None else []
                        self.set(slot, entry)
        self.content = content
        return came, went

    def set(self, slot: int, entry: Entry | None) -> None:
        """Replace the entry of a slot."""
        old = self.entries.pop(slot, None)
        if old is not None and self._slots.get(old.name) == slot:
            del self._slots[old.name]
        if entry is not None:
            self.entries[slot] = entry
            other = self.entries.get(self._slots.get(entry.name, -1))
            if other is None or other.when < entry.when:
                self._slots[entry.name] = slot

    def find(self, name: bytes) -> int:
        """Return the slot of a block; -1 if it is not here."""
        return self._slots.get(name, -1)

    def is_good(self, name: bytes, row: memoryview) -> bool:
        """Return whether a block was read as it was written."""
        return name in self._slots and checksum_of(name, row) == self.entries[self._slots[name]].checksum

    @property
    def kept(self) -> list[tuple[bytes, int]]:
        """Return (name, slot) of each block, the one written longest ago first."""
        return sorted(self._slots.items(), key=lambda item: (self.entries[item[1]].when, item[1]))


class OwnPart:
    """A part that this process writes to; it holds the lock of the index."""

    def __init__(self, folder: Path, name: str, index: int, num_slots: int, block_bytes: int) -> None:
        """Cut or extend the files to so many slots, and read what is there. Raises OSError."""
        self.folder, self.name, self.num_slots, self.block_bytes = folder, name, num_slots, block_bytes
        self.index, self._file = Index(), index
        self._stride = stride(block_bytes)
        self.blocks = open_file(folder / f"{name}.kv", os.O_RDWR | os.O_CREAT)
        self.resize(num_slots)
        self.index.update(os.pread(index, num_slots * ENTRY_BYTES, 0))
        self._num_written = max([entry.when for entry in self.index.entries.values()], default=0)

    def resize(self, num_slots: int) -> None:
        """Cut or extend the files to so many slots, which take room as they are written to."""
        os.ftruncate(self.blocks, num_slots * self._stride)
        os.ftruncate(self._file, num_slots * ENTRY_BYTES)

    def put(self, name: bytes, row: memoryview, slot: int) -> None:
        """Write a block, then its entry; in between, the old entry's checksum fails. Raises OSError."""
        checksum = checksum_of(name, row)
        _write_all(self.blocks, row, slot * self._stride)
        self._num_written += 1
        entry = Entry(name, self._num_written, checksum)
        _write_all(self._file, entry.pack(), slot * ENTRY_BYTES)
        self.index.set(slot, entry)

    def get(self, name: bytes, row: memoryview) -> bool:
        """Read a block; returns False if it is not what was written. Raises OSError."""
        length = os.preadv(self.blocks, [row], max(self.index.find(name), 0) * self._stride)
        return length == len(row) and self.index.is_good(name, row)

    def close(self) -> None:
        """Give up the part."""
        os.close(self.blocks)
        os.close(self._file)


def _write_all(file: int, content: memoryview | bytes, offset: int) -> None:
    length = os.pwrite(file, content, offset)
    if length != len(content):
        raise OSError(f"{length} of {len(content)} bytes were written")


def names(folder: Path, fingerprint: str) -> list[str]:
    """Return the parts with this fingerprint."""
    found = {path.stem for path in folder.glob(f"{fingerprint}*.index")}
    return sorted(name for name in found if name == fingerprint or name.startswith(f"{fingerprint}."))


def take(folder: Path, fingerprint: str) -> tuple[str, int]:
    """Lock the first part that no daemon writes to, made if need be; returns its name and its index's open file."""
    for number in count(1):
        name = fingerprint if number == 1 else f"{fingerprint}.{number}"
        try:
            index = lock(folder, name)
        except OSError as error:
            if error.errno in _NO_LOCKS or not os.path.lexists(folder / f"{name}.index"):
                raise  # nothing can be made here
            continue  # it is not a daemon's
        if index is not None:
            return name, index
    raise AssertionError("count() has no end")


def lock(folder: Path, name: str) -> int | None:
    """Return the open index of a part, made if need be; None if a daemon writes to the part."""
    path = folder / f"{name}.index"
    while True:
        index = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(index), path.stat()):
                return index
        except BlockingIOError:
            os.close(index)
            return None
        except FileNotFoundError:  # it was removed between the two calls
            pass
        except OSError:
            os.close(index)
            raise
        os.close(index)


def remove(folder: Path, name: str) -> None:
    """Remove a part, unless a daemon writes to it. Raises OSError."""
    index = lock(folder, name)
    if index is not None:
        for kind in KINDS:
            (folder / (name + kind)).unlink(missing_ok=True)
        os.close(index)


class Part(NamedTuple):
    """A part as its files stand."""

    name: str
    written_s: float  # Unix time
    num_bytes: int  # on the disk
    length: int  # that its blocks take once all are written


def listed(folder: Path) -> list[Part]:
    """Return all parts, of any fingerprint, the one written longest ago first. Raises OSError."""
    found: dict[str, Part] = {}
    for path in folder.iterdir():
        if path.suffix in KINDS:
            with suppress(FileNotFoundError):  # another daemon has removed it
                status, name = path.lstat(), path.stem
                _, last, size, length = found.get(name, (name, 0.0, 0, 0))
                length += status.st_size if path.suffix == ".kv" else 0
                found[name] = Part(name, max(last, status.st_mtime), size + status.st_blocks * 512, length)
    return sorted(found.values(), key=lambda part: (part.written_s, part.num_bytes))


def is_locked(folder: Path, name: str) -> bool:
    """Return whether a daemon writes to a part, or it is none."""
    with suppress(OSError):  # it is not a daemon's, and stays
        index = lock(folder, name)
        if index is not None:
            os.close(index)
            return False
    return True


def read_index(folder: Path, name: str) -> bytes:
    """Return the index of a part as it is; nothing if it cannot be read, or is none that a daemon has written."""
    try:
        with opened(folder / f"{name}.index", MAX_INDEX_BYTES) as file:
            return b"" if file is None else os.pread(file, min(os.fstat(file).st_size, MAX_INDEX_BYTES), 0)
    except OSError:
        return b""


@contextmanager
def opened(path: Path, max_bytes: int | None = None) -> Iterator[int | None]:
    """Open a regular file of another daemon; None if it is there no longer. Raises OSError."""
    try:
        file = open_file(path, max_bytes=max_bytes)
    except FileNotFoundError:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)
