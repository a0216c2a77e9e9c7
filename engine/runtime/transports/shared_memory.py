"""Hands K/V blocks from one daemon of a machine to another: a parcel is a file in shared memory.

    header    magic, number of blocks and room for how many, tokens and bytes of a block, fingerprint
    checks    a CRC-32 of each block's place in the parcel and bytes
    blocks    from the next page on, a prompt's first full blocks in order

Only an engine with the same layout may open a parcel. The sender writes under a temporary name and renames when all is
there, so a daemon that dies leaves nothing half-written. Opening a parcel removes it first; the next sender removes
parcels that are stale. The memory that parcels may take is bounded. Any thread.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ParcelError
from engine.core.kv.page_table import Layout

Rows = NDArray[np.uint8]  # [blocks, bytes of a block]

_MAGIC = b"quirekv1"
_HEADER = struct.Struct("<8sIIQQ64s")
_CHECK_BYTES, _PAGE = 4, 4096
_SENT, _PACKING = ".parcel", ".packing"
_STALE_S = 120.0  # a parcel that was not opened for this long is removed


class SharedMemory:
    """Parcels in one folder, of at most `max_bytes` together."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Create the folder. Raises ParcelError if other users may read it."""
        self._folder, self._max_bytes = folder, max_bytes
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
        taken = self._sweep()
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

    def open(self, name: str, layout: Layout) -> Rows:
        """Remove a parcel and return its checked blocks. Raises ParcelError."""
        if Path(name).name != name or not name.endswith(_SENT):
            raise ParcelError(f"{name!r} is not the name of a parcel")
        path = self._folder / name
        try:
            if path.stat().st_size < _HEADER.size:
                raise ParcelError(f"{path} is cut off")
            whole = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise ParcelError(f"{path} cannot be read: {error.strerror}") from error
        finally:
            path.unlink(missing_ok=True)  # what is mapped stays until the last reader is done
        return _checked(path, whole, layout)

    def _sweep(self) -> int:
        """Remove stale parcels, as other daemons do; return the bytes of the rest."""
        taken = 0
        for path in self._folder.iterdir():
            if path.suffix not in (_SENT, _PACKING):
                continue
            with suppress(FileNotFoundError):
                state = path.stat()
                if time.time() - state.st_mtime > _STALE_S:
                    path.unlink()
                else:
                    taken += state.st_size
        return taken


class Parcel:
    """A parcel that is being filled."""

    def __init__(self, path: Path, whole: Rows, layout: Layout, num_blocks: int) -> None:
        self._path, self._whole, self._layout = path, whole, layout
        self.rows: Rows = whole[_first_block(num_blocks) :].reshape(num_blocks, layout.block_bytes)

    def send(self, num_blocks: int) -> str:
        """Seal the first blocks; return the name that another daemon opens it by."""
        _, block_size, block_bytes = layout = self._layout
        checks = np.array([_check(index, row) for index, row in enumerate(self.rows[:num_blocks])], "<u4")
        self._whole[_HEADER.size : _HEADER.size + checks.nbytes] = checks.view(np.uint8)
        header = _HEADER.pack(
            _MAGIC, num_blocks, len(self.rows), block_size, block_bytes, layout.fingerprint.encode("ascii")
        )
        self._whole[: _HEADER.size] = np.frombuffer(header, np.uint8)
        sent = self._path.with_suffix(_SENT)
        self._path.rename(sent)
        return sent.name

    def drop(self) -> None:
        """Remove the parcel, if it was not sent."""
        self._path.unlink(missing_ok=True)


def _first_block(capacity: int) -> int:
    """Return the offset of the first block."""
    return -(-(_HEADER.size + capacity * _CHECK_BYTES) // _PAGE) * _PAGE


def _checked(path: Path, whole: Rows, layout: Layout) -> Rows:
    magic, num_blocks, capacity, block_size, block_bytes, fingerprint = _HEADER.unpack(whole[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise ParcelError(f"{path} is not a parcel of this version of Quire")
    if Layout(fingerprint.rstrip(b"\0").decode("ascii", "replace"), block_size, block_bytes) != layout:
        raise ParcelError(f"{path} was made by another model, or with other settings of the KV pool")
    begin = _first_block(capacity)
    end = begin + num_blocks * block_bytes
    if num_blocks > capacity or len(whole) < end:
        raise ParcelError(f"{path} is cut off")
    checks = whole[_HEADER.size : _HEADER.size + num_blocks * _CHECK_BYTES].view("<u4")
    rows = whole[begin:end].reshape(num_blocks, block_bytes)
    if any(_check(index, row) != check for index, (row, check) in enumerate(zip(rows, checks, strict=True))):
        raise ParcelError(f"{path} is damaged")
    return rows


def _check(index: int, row: Rows) -> int:
    return zlib.crc32(row.data, index)
