"""Digests of a model's files by their content, computed on threads while the model is loaded, once for each file.

A file's digest is the SHA-256 of its pieces' SHA-256, so that threads share a file: 1.5 GB/s a core with SHA instructions,
where BLAKE2b has 0.7. Digests are kept in the cache by device, inode, size and times. Any write sets the last of these,
the time of change, which no program can set back. A file that changes between the first look at it and the last is an
error: the weights in memory may be of either content. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ModelLoadError
from engine.system.cache_folder import cache_folder, keep, kept
from engine.system.host_limits import usable_cpus
from engine.system.regular_file import check_regular, reason

_PIECE_BYTES = 16 << 20
_READ_BYTES = 4 << 20  # a thread waits for the GIL twice for each
_MAX_THREADS = 4
_VERSION = 1  # of the tree of pieces, and of the file in the cache
_MAX_KEPT = 2048  # digests
_MAX_BYTES = 1 << 20  # of the file that keeps them
_TICK_NS = 2 * 10**9  # a file system's clock may stand still for so long, and a second write then leaves no trace


class FileState(NamedTuple):
    """What the system says of a file, as long as no program writes to it."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def key(self) -> str:
        """Return its name in the cache."""
        return "-".join(map(str, self))

    @property
    def is_settled(self) -> bool:
        """Return whether a write from now on would change the state."""
        return self.changed_ns < time.time_ns() - _TICK_NS


class FileDigests:
    """The digests of some files as they are now. One thread uses it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Note the files' states. Raises ModelLoadError."""
        self._states = {path: _state(path) for path in paths}
        self._known: dict[FileState, str] = {}
        self._pieces: dict[Path, list[Future[bytes]]] = {}  # of files whose digests are not in the cache
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, max(usable_cpus() - 1, 1)), "file-digests")

    def begin(self) -> None:
        """Start to read the files whose digests are not kept in the cache."""
        if self._known or self._pieces:
            return
        kept = _load()
        self._known = {state: kept[state.key] for state in self._states.values() if state.key in kept}
        self._pieces = {
            path: [
                self._threads.submit(_piece, path, state, begin) for begin in range(0, max(state.size, 1), _PIECE_BYTES)
            ]
            for path, state in self._states.items()
            if state not in self._known
        }

    def stop(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def get(self) -> dict[Path, str]:
        """Return the digests, once they are computed. Raises ModelLoadError for a file that has changed."""
        self.begin()
        try:
            made = {
                self._states[path]: _root(self._states[path], [piece.result() for piece in pieces])
                for path, pieces in self._pieces.items()
            }
        finally:
            self.stop()
        for path, state in self._states.items():
            if _state(path) != state:
                raise _changed(path)
        self._pieces.clear()
        _save({state.key: digest for state, digest in made.items() if state.is_settled})
        self._known |= made
        return {path: self._known[state] for path, state in self._states.items()}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a whole file, as other programs compute it. Raises OSError."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _state(path: Path) -> FileState:
    try:
        check_regular(path)
        return FileState.of(path.stat())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None


def _changed(path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path} changed while it was being loaded; start again.")


def _piece(path: Path, state: FileState, begin: int) -> bytes:
    """Return the digest of a piece of a file that has this state before and after. Raises ModelLoadError."""
    digest, end = sha256(), min(begin + _PIECE_BYTES, state.size)
    room = memoryview(bytearray(_READ_BYTES))
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if FileState.of(os.fstat(file)) != state:
                raise _changed(path)
            while begin < end:
                got = os.preadv(file, [room[: end - begin]], begin)
                if not got:
                    raise _changed(path)
                digest.update(room[:got])
                begin += got
            if FileState.of(os.fstat(file)) != state:
                raise _changed(path)
        finally:
            os.close(file)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None
    return digest.digest()


def _root(state: FileState, pieces: Sequence[bytes]) -> str:
    """Return the digest of a file; its size tells a tree of pieces from a file that holds their digests."""
    return sha256(f"quire {_VERSION} {_PIECE_BYTES} {state.size} ".encode() + b"".join(pieces)).hexdigest()


def _path() -> Path:
    return cache_folder() / "digests.json"


def _load() -> dict[str, str]:
    """Return the digests in the cache; none from a file that is damaged, or that others may write to."""
    try:
        document = json.loads(kept(_path(), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return {}
    found = document.get("digests")
    return {key: each for key, each in found.items() if isinstance(each, str)} if isinstance(found, dict) else {}


def _save(made: dict[str, str]) -> None:
    """Keep new digests in the cache, in the place of the oldest ones."""
    if made:
        last = list({**_load(), **made}.items())[-_MAX_KEPT:]
        keep(_path(), json.dumps({"version": _VERSION, "digests": dict(last)}))
