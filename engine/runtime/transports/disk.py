"""Stores K/V blocks in a file that outlives the process: slots of one size, each with its name and a checksum in an index.

    FOLDER/lock                  one daemon at a time
    FOLDER/<fingerprint>.kv      slot i at i * stride
    FOLDER/<fingerprint>.index   entry i: the block's digest, a checksum of digest and bytes, when it was written, a check

The fingerprint is of everything that K/V depends on, so blocks of another model, type or layout are in other files.
Those are removed as this one's blocks need the room, the one written longest ago first: the bound is the folder's.
Blocks are checksummed; one that a crash has torn is a miss, so nothing is synced. A thread reads and writes, straight
from and to the host blocks; the engine thread only queues and collects.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.errors import ConfigError
from engine.core.kv.tiers import Report, Transfer
from engine.core.stats import TransferKind
from engine.core.types import Progress
from engine.runtime.transports.base import Opening
from engine.runtime.transports.host import HostPool

log = logging.getLogger("quire.kv_store")

_PAGE = 4096  # slots begin at a multiple
_ENTRY = struct.Struct("<32sQI")  # digest, when, checksum
_CHECK = struct.Struct("<I")
_ENTRY_BYTES = 64
_KINDS = (".kv", ".index")
_MAX_LOGGED = 5  # faults in a row; more are only counted ...
_LOG_AGAIN_S = 600.0  # ... until there was none for so long


def has_blocks(folder: Path, fingerprint: str) -> bool:
    """Return True if a folder holds blocks under this fingerprint."""
    return (folder / f"{fingerprint}.kv").is_file()


def open_store(opening: Opening) -> DiskStore | None:
    """Open the folder of --kv-offload-config, if any. Raises ConfigError."""
    config, block_bytes = opening.config, opening.block_bytes
    if config.kv_offload_dir is None:
        return None
    folder = Path(config.kv_offload_dir).expanduser()
    num_slots = int(config.kv_offload_disk_gib * (1 << 30)) // block_bytes
    if not num_slots:
        raise ConfigError(
            f"--kv-offload-config: disk_gib is {config.kv_offload_disk_gib:g}, less than one block of K/V "
            f"({block_bytes / (1 << 20):.2f} MiB); raise it."
        )
    store = DiskStore(folder, opening.fingerprint, num_slots, block_bytes, opening.pool)
    detail = f"{num_slots} blocks in {folder}, {len(store.kept)} of them kept from before"
    opening.report(Progress("kv_offload", detail))
    return store


class DiskStore:
    """A Store over one folder. Start-up thread, then engine thread."""

    def __init__(self, folder: Path, fingerprint: str, num_slots: int, block_bytes: int, pool: HostPool) -> None:
        """Lock the folder, read its index, start the thread. Raises ConfigError."""
        self._stride = -(-block_bytes // _PAGE) * _PAGE
        self.num_slots = num_slots
        self._folder, self._pool = folder, pool
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(folder)
            self._others = _other_files(folder, fingerprint)
            self._blocks = os.open(folder / f"{fingerprint}.kv", os.O_RDWR | os.O_CREAT, 0o600)
            self._index = os.open(folder / f"{fingerprint}.index", os.O_RDWR | os.O_CREAT, 0o600)
            _check_room(folder, self._blocks, num_slots * self._stride, sum(size for _, size in self._others))
            os.ftruncate(self._blocks, num_slots * self._stride)  # it takes room as it is written to
            os.ftruncate(self._index, num_slots * _ENTRY_BYTES)
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-config: folder {folder} cannot be used: {error.strerror or error}."
            ) from error
        self._checksums: dict[int, int] = {}  # by slot
        self._num_written = 0
        self.kept = self._read_index()  # from before: (digest, slot), oldest first
        self._make_way(len(self._checksums))
        self._num_logged, self._last_fault_s = 0, 0.0
        self._order = itertools.count()
        self._queue: queue.PriorityQueue[tuple[int, int, Transfer | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="quire-kv-store", daemon=True)
        self._thread.start()

    def _read_index(self) -> list[tuple[bytes, int]]:
        found: dict[bytes, tuple[int, int]] = {}
        entries = os.pread(self._index, self.num_slots * _ENTRY_BYTES, 0)
        for slot in range(len(entries) // _ENTRY_BYTES):
            entry = entries[slot * _ENTRY_BYTES : (slot + 1) * _ENTRY_BYTES]
            digest, written, checksum = _ENTRY.unpack_from(entry)
            (check,) = _CHECK.unpack_from(entry, _ENTRY.size)
            if written and check == zlib.crc32(entry[: _ENTRY.size]):
                self._num_written = max(self._num_written, written)
                self._checksums[slot] = checksum
                if digest not in found or found[digest][0] < written:
                    found[digest] = (written, slot)
        return [(digest, slot) for digest, (_, slot) in sorted(found.items(), key=lambda item: item[1])]

    def _make_way(self, num_blocks: int) -> None:
        """Remove other fingerprints' files until so many blocks fit the bound."""
        bound = self.num_slots * self._stride
        while self._others and num_blocks * self._stride + sum(size for _, size in self._others) > bound:
            name, _ = self._others.pop(0)
            for kind in _KINDS:
                (self._folder / (name + kind)).unlink(missing_ok=True)

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Queue transfers; requests wait for loads, so these go first."""
        for transfer in transfers:
            self._queue.put((transfer.kind is TransferKind.SAVE, next(self._order), transfer))

    def finished(self, wait_s: float) -> list[Report]:
        """Return the transfers that ended since the last call."""
        done = []
        try:
            done.append(self._done.get(timeout=wait_s) if wait_s else self._done.get_nowait())
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            return done

    def close(self) -> None:
        """Finish what is queued, and unlock the folder."""
        self._queue.put((2, next(self._order), None))
        self._thread.join()
        for file in (self._blocks, self._index, self._lock):
            os.close(file)

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (transfer := self._queue.get()[2]) is not None:
            try:
                self._pool.finish_copies()
                move = self._write if transfer.kind is TransferKind.SAVE else self._read
                is_good = move(transfer, self._pool.row(transfer.host_block))
            except Exception as error:  # whatever it is, the engine does without
                self._log(transfer, f"{type(error).__name__}: {error}")
                is_good = False
            self._done.put((transfer, is_good))

    def _write(self, transfer: Transfer, row: memoryview) -> bool:
        """Write the block, then its entry; in between, the old entry's checksum fails."""
        checksum = _checksum(transfer.name, row)
        self._make_way(len(self._checksums) + (transfer.slot not in self._checksums))
        _write_all(self._blocks, row, transfer.slot * self._stride)
        self._num_written += 1
        entry = _ENTRY.pack(transfer.name, self._num_written, checksum)
        _write_all(self._index, entry + _CHECK.pack(zlib.crc32(entry)), transfer.slot * _ENTRY_BYTES)
        self._checksums[transfer.slot] = checksum
        return True

    def _read(self, transfer: Transfer, row: memoryview) -> bool:
        length = os.preadv(self._blocks, [row], transfer.slot * self._stride)
        if length == len(row) and _checksum(transfer.name, row) == self._checksums.get(transfer.slot):
            return True
        self._log(transfer, "it is not what was written")
        return False

    def _log(self, transfer: Transfer, reason: str) -> None:
        now = time.monotonic()
        self._num_logged = 1 if now - self._last_fault_s > _LOG_AGAIN_S else self._num_logged + 1
        self._last_fault_s = now
        if self._num_logged <= _MAX_LOGGED:
            last = "; more of this is only counted" if self._num_logged == _MAX_LOGGED else ""
            message = "A K/V block on disk could not be used (%s, slot %d): %s%s"
            log.warning(message, transfer.kind.value, transfer.slot, reason, last)


def _checksum(digest: bytes, row: memoryview) -> int:
    """Return a checksum against accidents, not attacks: six times as fast as BLAKE2b."""
    return zlib.crc32(row, zlib.crc32(digest))


def _write_all(file: int, content: memoryview | bytes, offset: int) -> None:
    length = os.pwrite(file, content, offset)
    if length != len(content):
        raise OSError(f"{length} of {len(content)} bytes were written")


def _lock(folder: Path) -> int:
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            f"--kv-offload-config: folder {folder} is in use by another daemon; give each a folder of its own."
        ) from None
    return file


def _other_files(folder: Path, fingerprint: str) -> list[tuple[str, int]]:
    """Return the other fingerprints and their bytes, the oldest first."""
    found: dict[str, tuple[float, int]] = {}
    for path in folder.iterdir():
        if path.suffix in _KINDS and path.stem != fingerprint:
            status = path.stat()
            last, size = found.get(path.stem, (0.0, 0))
            found[path.stem] = (max(last, status.st_mtime), size + status.st_blocks * 512)
    return [(name, size) for name, (_, size) in sorted(found.items(), key=lambda item: item[1])]


def _check_room(folder: Path, blocks: int, num_bytes: int, num_leaving: int) -> None:
    """Raise ConfigError unless the disk has room, counting files to be reused."""
    there = os.fstat(blocks).st_blocks * 512 + num_leaving
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize + there
    if num_bytes > free:
        gib = 1 << 30
        raise ConfigError(
            f"--kv-offload-config: disk_gib asks for {num_bytes / gib:.1f} GiB in {folder}, and {free / gib:.1f} are free there; set "
            f"it to at most {int(free / gib * 10) / 10:g}."
        )
