"""The files of a K/V folder: one part for each daemon that uses it, of two files.

    FOLDER/<fingerprint>.kv         slot i at i * stride
    FOLDER/<fingerprint>.index      entry i: the block's digest, a number that grows, a checksum of digest and block, a check
    FOLDER/<fingerprint>.2.kv ...   the part of a second daemon at the same time

The fingerprint is of everything that K/V depends on, so blocks of another model, type or layout are in other parts. A
daemon writes to its own part only, whose index it locks; all others of the same fingerprint it reads. No reader locks:
a block that is overwritten meanwhile, or torn by a crash, does not have its entry's checksum.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from engine.system.regular_file import open_file

_PAGE = 4096  # slots begin at a multiple
_ENTRY = struct.Struct("<32sQI")  # digest, when, checksum
_CHECK = struct.Struct("<I")
ENTRY_BYTES = 64
MAX_INDEX_BYTES = ENTRY_BYTES << 20  # of another daemon: a million blocks
KINDS = (".kv", ".index")


class Entry(NamedTuple):
    """What an index says of a slot."""

    digest: bytes
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
    found = Entry(*_ENTRY.unpack_from(entry))
    (check,) = _CHECK.unpack_from(entry, _ENTRY.size)
    return found if found.when and check == zlib.crc32(entry[: _ENTRY.size]) else None


def stride(block_bytes: int) -> int:
    """Return the bytes from one slot to the next."""
    return -(-block_bytes // _PAGE) * _PAGE


def checksum(digest: bytes, row: memoryview) -> int:
    """Return a checksum against accidents, not attacks: six times as fast as BLAKE2b."""
    return zlib.crc32(row, zlib.crc32(digest))


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
        except OSError:
            if not os.path.lexists(folder / f"{name}.index"):
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
        except FileNotFoundError:
            pass
        os.close(index)  # it was removed between the two calls


def remove(folder: Path, name: str) -> None:
    """Remove a part, unless a daemon writes to it."""
    index = lock(folder, name)
    if index is not None:
        for kind in KINDS:
            (folder / (name + kind)).unlink(missing_ok=True)
        os.close(index)


def others(folder: Path, own: str) -> Iterator[tuple[str, int]]:
    """Yield the parts that no daemon writes to but `own`, and their bytes, the one written longest ago first."""
    found: dict[str, tuple[float, int]] = {}
    for path in folder.iterdir():
        if path.suffix in KINDS and path.stem != own:
            with suppress(FileNotFoundError):  # another daemon has removed it
                status = path.lstat()
                last, size = found.get(path.stem, (0.0, 0))
                found[path.stem] = (max(last, status.st_mtime), size + status.st_blocks * 512)
    for name, (_, size) in sorted(found.items(), key=lambda item: item[1]):
        with suppress(OSError):  # it is not a daemon's, and stays
            index = lock(folder, name)
            if index is not None:
                os.close(index)
                yield name, size


def read_index(folder: Path, name: str) -> bytes:
    """Return the index of a part as it is; nothing if it cannot be read, or is none that a daemon has written."""
    try:
        with _opened(folder / f"{name}.index", MAX_INDEX_BYTES) as file:
            return b"" if file is None else os.pread(file, min(os.fstat(file).st_size, MAX_INDEX_BYTES), 0)
    except OSError:
        return b""


def read_block(folder: Path, name: str, slot: int, row: memoryview) -> bool:
    """Read a slot of a part into `row`, unchecked; returns False if it is gone. Raises OSError."""
    with _opened(folder / f"{name}.kv") as file:
        return file is not None and os.preadv(file, [row], slot * stride(len(row))) == len(row)


@contextmanager
def _opened(path: Path, max_bytes: int | None = None) -> Iterator[int | None]:
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
