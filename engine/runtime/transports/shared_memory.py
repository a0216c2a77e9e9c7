"""Hands K/V blocks from one daemon of a machine to another: a parcel is a file in shared memory.

    header    magic, number of blocks and room for how many, tokens and bytes of a block, fingerprint, digest of the prompt
    checks    a checksum of each block's place in the parcel and bytes
    blocks    from the next page on, a prompt's first full blocks in order

Only an engine with the same layout may open a parcel, and only for the prompt that it is of. The sender writes under a
temporary name and renames when all is there, so a daemon that dies leaves nothing half-written. A parcel that was taken
is removed, and so are expired ones. The memory that parcels may take is bounded. Any thread.
"""

from __future__ import annotations

import os
import re
import struct
import time
import uuid
import zlib
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ParcelError
from engine.core.page_table import Layout

Rows = NDArray[np.uint8]  # [blocks, bytes of a block]

_MAGIC = b"quirekv2"
_HEADER = struct.Struct("<8sIIQQ64s32s")
_CHECK_BYTES, _PAGE = 4, 4096
_ROW_BYTES = _PAGE + 8
_SENT, _PACKING = ".parcel", ".packing"
_NAME = re.compile(r"[0-9a-f]{32}\.parcel")  # as `pack` gives it
HEADER_BYTES = _HEADER.size
EXPIRY_S = 120.0


class Incoming(Protocol):
    """A parcel that is being taken in, by whichever transport."""

    @property
    def header(self) -> Header: ...

    def read(self, first: int, stop: int) -> Rows:
        """Return checked blocks, valid until the next call; they are read in order. Raises ParcelError."""

    def close(self) -> None: ...


class Header(NamedTuple):
    """What a parcel says of itself."""

    num_blocks: int
    capacity: int
    layout: Layout
    content: bytes  # a digest of the prompt that its blocks are of

    @property
    def num_check_bytes(self) -> int:
        """Return the size of the checksums, which follow the header."""
        return self.num_blocks * _CHECK_BYTES

    @property
    def first_block(self) -> int:
        """Return the offset of the first block in the file."""
        return _first_block(self.capacity)

    @property
    def num_block_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


def read_header(header: bytes, where: object) -> Header:
    """Return a parcel's header. Raises ParcelError."""
    if len(header) < HEADER_BYTES:
        raise ParcelError(f"{where} is cut off")
    magic, num_blocks, capacity, block_size, block_bytes, fingerprint, content = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ParcelError(f"{where} is not a parcel of this version of Quire")
    if num_blocks > capacity:
        raise ParcelError(f"{where} is damaged")
    layout = Layout(fingerprint.rstrip(b"\0").decode("ascii", "replace"), block_size, block_bytes)
    return Header(num_blocks, capacity, layout, content)


def check_layout(header: Header, layout: Layout, where: object) -> None:
    """Raise ParcelError for a parcel of another engine."""
    if header.layout != layout:
        raise ParcelError(f"{where} was made by another model, or with other settings of the KV pool")


def check_of(index: int, row: NDArray[np.uint8]) -> int:
    """Return a checksum of a block's place and bytes, at four times the speed of a CRC-32 over all of them.

    It is the CRC-32 of the sums of columns of 64-bit words. A row of words is a little longer than a page, so pages that
    change places change the sums.
    """
    num_summed = row.nbytes // _ROW_BYTES * _ROW_BYTES
    sums = row[:num_summed].view("<u8").reshape(-1, _ROW_BYTES // 8).sum(axis=0, dtype="<u8")
    return zlib.crc32(row[num_summed:].data, zlib.crc32(sums.data, index))


class SharedMemory:
    """Parcels in one folder, of at most `max_bytes` together."""

    def __init__(self, folder: Path, max_bytes: int, expiry_s: float = EXPIRY_S) -> None:
        """Create the folder. Raises ParcelError if other users may read it."""
        self._folder, self._max_bytes, self.expiry_s = folder, max_bytes, expiry_s
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
        except OSError as error:
            raise ParcelError(f"{folder} cannot be made: {error.strerror}") from error
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            raise ParcelError(f"{folder} is open to other users; make it yours alone (chmod 700)")

    def pack(self, layout: Layout, num_blocks: int) -> Parcel:
        """Return a parcel to fill, then to send or drop. Raises ParcelError."""
        size = _first_block(num_blocks) + num_blocks * layout.block_bytes
        taken = self.sweep()
        if taken + size > self._max_bytes:
            raise ParcelError(
                f"{size >> 20} MiB more would be beyond the {self._max_bytes >> 20} MiB that parcels may take"
            )
        path = self._folder / f"{uuid.uuid4().hex}{_PACKING}"
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # now, for a write to a full disk later would be a SIGBUS
            whole = np.memmap(path, np.uint8, "r+")
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ParcelError(f"{path} of {size >> 20} MiB cannot be written: {error.strerror}") from error
        return Parcel(path, whole, layout, num_blocks)

    def open(self, name: str, layout: Layout) -> Mapped:
        """Remove a parcel and return it. Raises ParcelError."""
        path = self._path(name)
        try:
            if path.stat().st_size < HEADER_BYTES:
                raise ParcelError(f"{path} is cut off")
            whole = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise ParcelError(f"{path} cannot be read: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)  # what is mapped stays until the last reader is done
        return Mapped(path, whole, layout)

    def open_file(self, name: str) -> FileIO:
        """Open a parcel, which stays until `remove`. Raises ParcelError and OSError."""
        path = self._path(name)
        if time.time() - path.stat().st_mtime > self.expiry_s:
            raise ParcelError(f"{path} has expired")
        return path.open("rb", buffering=0)

    def remove(self, name: str) -> None:
        """Remove a parcel that was taken."""
        self._path(name).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove expired parcels, as other daemons do; return the bytes of the rest."""
        taken = 0
        for path in self._folder.iterdir():
            if path.suffix not in (_SENT, _PACKING):
                continue
            with suppress(FileNotFoundError):
                state = path.stat()
                if time.time() - state.st_mtime > self.expiry_s:
                    path.unlink()
                else:
                    taken += state.st_size
        return taken

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ParcelError(f"{name!r} is not the name of a parcel")
        return self._folder / name


class Mapped:
    """A parcel in shared memory that is read."""

    def __init__(self, path: Path, whole: Rows, layout: Layout) -> None:
        self._path = path
        self.header = header = read_header(whole[:HEADER_BYTES].tobytes(), path)
        check_layout(header, layout, path)
        end = header.first_block + header.num_block_bytes
        if len(whole) < end:
            raise ParcelError(f"{path} is cut off")
        self._checks = whole[HEADER_BYTES : HEADER_BYTES + header.num_check_bytes].view("<u4")
        self._rows = whole[header.first_block : end].reshape(header.num_blocks, layout.block_bytes)

    def read(self, first: int, stop: int) -> Rows:
        """Return checked blocks. Raises ParcelError."""
        rows, checks = self._rows[first:stop], self._checks[first:stop]
        if any(check_of(first + index, row) != checks[index] for index, row in enumerate(rows)):
            raise ParcelError(f"{self._path} is damaged")
        return rows

    def close(self) -> None:
        """Nothing: the memory is freed with the last reference."""


class Parcel:
    """A parcel that is being filled."""

    def __init__(self, path: Path, whole: Rows, layout: Layout, num_blocks: int) -> None:
        self._path, self._whole, self._layout = path, whole, layout
        self.rows: Rows = whole[_first_block(num_blocks) :].reshape(num_blocks, layout.block_bytes)

    def send(self, num_blocks: int, content: bytes = b"") -> str:
        """Seal the first blocks; return the name that another daemon opens it by."""
        _, block_size, block_bytes = layout = self._layout
        checks = np.array([check_of(index, row) for index, row in enumerate(self.rows[:num_blocks])], "<u4")
        self._whole[HEADER_BYTES : HEADER_BYTES + checks.nbytes] = checks.view(np.uint8)
        fingerprint = layout.fingerprint.encode("ascii")
        header = _HEADER.pack(_MAGIC, num_blocks, len(self.rows), block_size, block_bytes, fingerprint, content)
        self._whole[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        sent = self._path.with_suffix(_SENT)
        self._path.rename(sent)
        return sent.name

    def drop(self) -> None:
        """Remove the parcel, if it was not sent."""
        self._path.unlink(missing_ok=True)


def _first_block(capacity: int) -> int:
    """Return the offset of the first block."""
    return -(-(HEADER_BYTES + capacity * _CHECK_BYTES) // _PAGE) * _PAGE
