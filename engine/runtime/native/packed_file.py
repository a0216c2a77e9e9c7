"""Keeps packed matrices in a file, from which the next start maps them: --weights-cache. Imports no torch.

    magic, length and digest of the index | index: JSON | matrices, each on a line of 64 bytes

Packing and fresh memory are most of a start, and both are saved. A matrix is found by a digest of the library's sources,
its format, and where its rows lie in which file; a file is known by its size, time, number, first and last bytes. What a
file says is computed with, so one that another user owns or may write to is not read. The file is written once an engine is
built, on a thread of the lowest priority, and renamed into place: processes that start together do not disturb one
another. What cannot be kept is packed again at the next start, and only logged.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import logging
import mmap
import os
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from ctypes import addressof, c_char, c_int, c_size_t, c_void_p
from functools import cache
from hashlib import blake2b
from pathlib import Path
from threading import Thread, get_native_id
from typing import NamedTuple

import numpy as np

from engine.runtime.native.build import source_digest
from engine.runtime.native.rows import OpenFile, RepackedRows, StoredRows
from engine.system.regular_file import open_file

_MAGIC = b"quirerow"
_DIGEST_BYTES = 16
_LINE = 64
_FIRST = 2 << 20  # matrices begin at a multiple of this
_SAMPLE = 4096  # bytes of a matrix, at each end, that are compared with a checksum
_KNOWN_BY = 1 << 20  # bytes of a weight file, at each end
_PIECE = 32 << 20
_MOST_VIEWS = 512  # of a call; systems take 1024
_MADV_POPULATE_READ = 22  # Linux 5.14
_LEAST_URGENT = 19  # as nice has it
_SUFFIX = ".rows"

_log = logging.getLogger("quire.startup")


class _Place(NamedTuple):
    """Where a matrix is in the file, and the checksum of its ends."""

    begin: int
    num_bytes: int
    checksum: int


class PackedFile:
    """The packed matrices of one model, found or to be written."""

    def __init__(self, folder: Path, max_bytes: int, model: str) -> None:
        """`model` names the file: what is packed for another model, or with other settings, has another one."""
        self._path = folder / (blake2b(model.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest() + _SUFFIX)
        self._max_bytes = max_bytes
        self._kept: dict[str, np.ndarray] = {}  # of this start, in order
        self.is_complete = True  # all matrices that were looked for were found
        self._places: dict[str, _Place] = {}
        self._content = np.zeros(0, np.uint8)
        try:
            self._open()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            _log.warning("%s is not used, and made again: %s", self._path, error)

    @property
    def is_found(self) -> bool:
        """Return whether the file has matrices."""
        return bool(self._places)

    def key(self, facts: Sequence[object], parts: Sequence[StoredRows | RepackedRows]) -> str | None:
        """Return the name of a matrix of these rows; None if they do not all lie in a file."""
        about: list[object] = [source_digest(), *facts]
        for part in parts:
            if isinstance(part, RepackedRows) or part.file is None:
                return None
            rows = part.rows
            about += [_identity(part.file), part.offset, part.kind, rows.shape, rows.strides, part.head_rows]
        return blake2b(json.dumps(about).encode(), digest_size=_DIGEST_BYTES).hexdigest()

    def find(self, key: str, num_bytes: int) -> np.ndarray | None:
        """Return a matrix as mapped bytes, which are not written to; None if it is not there."""
        place = self._places.get(key)
        found = None if place is None else self._content[place.begin :][: place.num_bytes]
        if place is None or found is None or len(found) != num_bytes or _checksum(found) != place.checksum:
            self.is_complete = False
            return None
        self._kept[key] = found
        return found

    def add(self, key: str, matrix: np.ndarray) -> None:
        """Keep a matrix that was not found, as it is when the file is written."""
        self._kept[key] = matrix

    def write_later(self) -> None:
        """Write the matrices of this start on a thread, unless all were found."""
        if not self.is_complete:
            Thread(target=self.write, name="weights-cache", daemon=True).start()

    def _open(self) -> None:
        """Map the file and read its index. Raises OSError, ValueError or TypeError for one that is not to be used."""
        number = open_file(self._path)
        try:
            status = os.fstat(number)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise OSError("another user owns it or may write to it")
            head = os.pread(number, _FIRST, 0)
            start = len(_MAGIC) + 8 + _DIGEST_BYTES
            length = int.from_bytes(head[len(_MAGIC) : start - _DIGEST_BYTES], "little")
            if length > len(head):
                head = os.pread(number, min(start + length, status.st_size), 0)
            text = head[start : start + length]
            if head[: len(_MAGIC)] != _MAGIC or _digest(text) != head[start - _DIGEST_BYTES : start]:
                raise ValueError("it is damaged")
            index = json.loads(text)
            if index["num_bytes"] != status.st_size:
                raise ValueError("it is cut")
            pages = mmap.mmap(number, status.st_size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE)
            with suppress(OSError):
                os.utime(number)  # the file was used
        finally:
            os.close(number)
        self._content = np.frombuffer(pages, np.uint8)
        self._places = {key: _Place(*place) for key, place in index["places"].items()}
        Thread(target=_populate, args=(pages,), name="populate", daemon=True).start()

    def write(self) -> None:
        """Write the matrices of this start, giving way to other threads; what fails is logged."""
        with suppress(OSError, AttributeError):  # not Linux
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _LEAST_URGENT)
        try:
            head, num_bytes = self._index()
            self._make_room(num_bytes)
            is_written = self._replace(head, num_bytes)
        except OSError as error:
            _log.warning("packed weights are not kept in %s: %s", self._path.parent, error.strerror or error)
        else:
            if is_written:
                _log.info("kept packed weights, %d MiB, in %s", num_bytes >> 20, self._path.parent)

    def _replace(self, head: bytes, num_bytes: int) -> bool:
        """Write the file beside its place, and move it there; return False if another process does."""
        written = self._path.with_suffix(f"{_SUFFIX}.new")
        number = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not written.exists() or not os.path.samestat(written.stat(), os.fstat(number)):
                return False  # it was moved into place between the two calls, and others map it
            try:
                self._fill(number, head, num_bytes)
            except BaseException:
                written.unlink()
                raise
            written.replace(self._path)
        finally:
            os.close(number)
        return True

    def _index(self) -> tuple[bytes, int]:
        """Return the head of the file, and the file's bytes."""
        end = _FIRST  # as many matrices as have their index in it are more than any model has
        places: dict[str, _Place] = {}
        for key, matrix in self._kept.items():
            places[key] = _Place(end, len(matrix), _checksum(matrix))
            end += -(-len(matrix) // _LINE) * _LINE
        text = json.dumps({"num_bytes": end, "places": places}).encode()
        head = _MAGIC + len(text).to_bytes(8, "little") + _digest(text) + text
        if len(head) > _FIRST:
            raise OSError("the model has too many matrices")
        return head, end

    def _make_room(self, num_bytes: int) -> None:
        """Delete the files that were used longest ago, until another one is within the bound. Raises OSError."""
        if num_bytes > self._max_bytes:
            raise OSError(f"they take {num_bytes} bytes, and --weights-cache-size is {self._max_bytes}")
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [(path.stat(), path) for path in self._path.parent.glob(f"*{_SUFFIX}*") if path != self._path]
        rest = sum(status.st_size for status, _ in found) + num_bytes
        for status, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if rest <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            rest -= status.st_size

    def _fill(self, number: int, head: bytes, num_bytes: int) -> None:
        os.ftruncate(number, 0)  # what a process left that ended in the middle
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, num_bytes)  # a full disk shows now
        views, at = deque([memoryview(head.ljust(_FIRST, b"\0"))]), 0
        for matrix in self._kept.values():
            views += [matrix.data, memoryview(bytes(-len(matrix) % _LINE))]
        while views:
            window = _window(views, at)
            done = os.pwritev(number, window, at)
            if done < sum(map(len, window)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the next call would say so
            at += done
        os.fsync(number)


def _window(views: deque[memoryview], at: int) -> list[memoryview]:
    """Take the bytes up to the next multiple of a piece: what is written together is on huge pages, if it is aligned."""
    room, window = _PIECE - at % _PIECE, list[memoryview]()
    while views and room and len(window) < _MOST_VIEWS:
        view = views.popleft()
        if len(view) > room:
            views.appendleft(view[room:])
        window.append(view[:room])
        room -= len(window[-1])
    return window


@cache
def _identity(file: OpenFile) -> list[object]:
    """Return what a weight file is known by."""
    status = os.fstat(file.number)
    ends = [os.pread(file.number, _KNOWN_BY, at) for at in (0, max(0, status.st_size - _KNOWN_BY))]
    return [status.st_size, status.st_mtime_ns, status.st_ino, _digest(b"".join(ends)).hex()]


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _checksum(matrix: np.ndarray) -> int:
    return zlib.crc32(matrix[-_SAMPLE:].data, zlib.crc32(matrix[:_SAMPLE].data))


def _populate(pages: mmap.mmap) -> None:
    """Map the pages of a file that are in the system's cache, and read the others."""
    try:
        madvise = ctypes.CDLL(None).madvise  # through ctypes, because mmap's method holds the GIL
    except (AttributeError, OSError, TypeError):  # not Linux
        return
    madvise.argtypes, address = [c_void_p, c_size_t, c_int], addressof(c_char.from_buffer(pages))
    for first in range(0, len(pages), _PIECE):  # a piece at a time: another thread's new maps wait for each
        if madvise(address + first, min(_PIECE, len(pages) - first), _MADV_POPULATE_READ):
            return
