"""Reads the parts of a folder that other daemons write to, as they stand, and parcels, here or of a peer.

Nothing is locked or written: a block that its daemon has replaced meanwhile fails its checksum and is computed.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from engine.core.errors import ParcelError
from engine.core.kv.tiers import News
from engine.runtime.stores import parts
from engine.runtime.stores.wire import PeerFolder

log = logging.getLogger("quire.kv_store")

Rows = Iterable[memoryview]
_ID = re.compile(r"[0-9a-f]{32}")  # of a parcel, as `pack` gives it


class Folder:
    """The parts of a folder, without this daemon's own."""

    def __init__(self, path: Path, fingerprint: str, block_bytes: int, own: str = "") -> None:
        self.path, self.fingerprint, self.block_bytes, self._own = path, fingerprint, block_bytes, own
        self._name = re.compile(rf"{fingerprint}(\.[0-9a-f]+)?")

    def __str__(self) -> str:
        return str(self.path)

    def indexes(self) -> dict[str, bytes]:
        """Return the index of each part. Raises OSError."""
        return {name: self.index(name) for name in parts.names(self.path, self.fingerprint) if self.has(name)}

    def index(self, part: str) -> bytes:
        """Return the index of a part; an empty one if it is not here. Raises OSError."""
        return parts.read_index(self.path, part) if self.has(part) else b""

    def has(self, part: str) -> bool:
        """Return whether a name may be that of a part here."""
        return part != self._own and self._name.fullmatch(part) is not None

    def read(self, part: str, slots: Sequence[int], rows: Rows) -> Generator[memoryview | None]:
        """Read blocks of a part into rows, unchecked; yields the row of each, None if it is not there. Raises OSError."""
        with self.opened(part) as file:
            for slot, row in zip(slots, rows, strict=False):
                is_there = file is not None and os.preadv(file, [row], slot * parts.stride(len(row))) == len(row)
                yield row if is_there else None

    @contextmanager
    def opened(self, part: str) -> Iterator[int | None]:
        """Open the blocks of a part; None if they are not here. Raises OSError."""
        if not self.has(part):
            yield None
            return
        with parts.opened(self.path / f"{part}.kv") as file:
            yield file


class Parcels(Folder):
    """A folder of parts that are written once and read once: the blocks of a prompt, on their way to another daemon.

    A parcel is found by its name only. One that was taken is removed, and so are expired ones, whoever made them. What
    parcels take is bounded. Any thread.
    """

    def __init__(self, path: Path, fingerprint: str, block_bytes: int, max_bytes: int, expiry_s: float) -> None:
        """Make the folder, for this user alone. Raises ParcelError."""
        super().__init__(path, fingerprint, block_bytes)
        self._max_bytes, self.expiry_s = max_bytes, expiry_s
        self._name = re.compile(rf"{fingerprint}\.[0-9a-f]{{32}}")
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = path.stat().st_mode
        except OSError as error:
            raise ParcelError(f"{path} cannot be used: {error.strerror}") from error
        if mode & 0o077:
            raise ParcelError(f"{path} may be read by others; chmod 700 it")

    def part_of(self, parcel: str) -> str:
        """Return the part that a parcel is. Raises ParcelError for what is no parcel's name."""
        if not _ID.fullmatch(parcel):
            raise ParcelError(f"{parcel!r} is not the name of a parcel")
        return f"{self.fingerprint}.{parcel}"

    def pack(self, num_blocks: int) -> parts.OwnPart:
        """Return a new parcel, to be filled. Raises ParcelError."""
        size = num_blocks * parts.stride(self.block_bytes)
        if self.sweep() + size > self._max_bytes:
            raise ParcelError(
                f"{size >> 20} MiB more would be beyond the {self._max_bytes >> 20} MiB that parcels may take"
            )
        name = self.part_of(uuid.uuid4().hex)
        try:
            index = parts.lock(self.path, name)
            assert index is not None, "a name that is random is no other daemon's"
            return parts.OwnPart(self.path, name, index, num_blocks, self.block_bytes)
        except OSError as error:
            self.remove(name)
            raise ParcelError(f"{self.path / name} cannot be written: {error.strerror}") from error

    def index(self, part: str) -> bytes:
        """Return the index of a parcel that has not expired."""
        self.sweep()
        return super().index(part)

    def remove(self, part: str) -> None:
        """Remove a parcel, unless a daemon still fills it."""
        if self.has(part):
            with suppress(OSError):
                parts.remove(self.path, part)

    def close(self) -> None:
        """Nothing is open."""

    def sweep(self) -> int:
        """Remove expired parcels, as other daemons do; return the bytes of the rest."""
        taken, now = 0, time.time()
        with suppress(OSError):
            for part in parts.listed(self.path):
                if _ID.fullmatch(part.name.rpartition(".")[2]):
                    if now - part.written_s > self.expiry_s:
                        with suppress(OSError):
                            parts.remove(self.path, part.name)
                    else:
                        taken += part.length
        return taken


class KnownPart:
    """A part that another daemon writes to, as it was at the last look."""

    def __init__(self, source: Folder | PeerFolder, name: str) -> None:
        self.source, self.name, self.index = source, name, parts.Index()

    def look(self) -> None:
        """Read the index. Raises OSError and ParcelError."""
        self.index.update(self.source.index(self.name))

    def has(self, names: Iterable[bytes]) -> int:
        """Return how many of the first names are here."""
        found = 0
        for found, name in enumerate(names, start=1):
            if self.index.find(name) < 0:
                return found - 1
        return found

    def read(self, names: Sequence[bytes], rows: Rows) -> Iterator[bool]:
        """Read blocks, each into the next row, and yield True; the first that is not as it was written ends it.

        A peer sends them without a pause, and its connection ends if they are not read to the last. Raises OSError and
        ParcelError.
        """
        names = names[: self.has(names)]
        slots = [self.index.find(name) for name in names]
        with closing(self.source.read(self.name, slots, rows)) as blocks:
            for row, name in zip(blocks, names, strict=False):  # to the end of `blocks`
                if row is None or not self.index.is_good(name, row):
                    return
                yield True


class SharedStore:
    """A Store that others write to: their parts of a folder."""

    kept: Sequence[tuple[bytes, int]] = ()  # they come as news

    def __init__(self, folder: Folder, num_slots: int = 0) -> None:
        """`num_slots` bounds the names that are remembered of others."""
        self.num_slots = num_slots
        self._folder, self._known = folder, dict[str, KnownPart]()
        self._holders: Counter[bytes] = Counter()  # of each name, among the parts
        self._is_well = True  # when it was read last

    def news(self) -> News | None:
        """Read the indexes; returns what has changed."""
        changed: dict[bytes, None] = {}  # a set in the order of the indexes
        indexes = self._indexes()
        for name in {*indexes, *self._known}:
            part = self._known.setdefault(name, KnownPart(self._folder, name))
            came, went = part.index.update(indexes.get(name, b""))
            self._holders.update(came)
            self._holders.subtract(went)
            changed.update(dict.fromkeys((*went, *came)))
            if name not in indexes:
                del self._known[name]
        gained = [each for each in changed if self._holders[each]]
        lost = [each for each in changed if not self._holders[each]]
        for each in lost:
            del self._holders[each]
        return News(gained, lost) if changed else None

    def _indexes(self) -> dict[str, bytes]:
        """Return the indexes; none if they cannot be read."""
        try:
            indexes = self._folder.indexes()
        except OSError as error:
            self._fail(error)
            return {}
        if not self._is_well:
            log.info("K/V comes from %s again.", self._folder)
            self._is_well = True
        return indexes

    def _fail(self, error: OSError) -> None:
        """Log only the first failure since the folder was read."""
        if self._is_well:
            log.warning("K/V of %s is not used (%s); prompts are computed here.", self._folder, error)
        self._is_well = False

    def get(self, name: bytes, row: memoryview) -> bool:
        """Read a block from the first part that has it."""
        for part in self._known.values():
            try:
                if list(part.read([name], [row])):
                    return True
            except OSError as error:  # noqa: PERF203 - another part may have it
                self._fail(error)
        return False

    def put(self, name: bytes, row: memoryview, slot: int) -> None:
        """Never called: others write here."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""
