"""Stores K/V blocks in a part of a folder, which outlives the process: slots of one size, each with an entry of an index.

Parts that no daemon writes to are removed as this one's blocks need the room, the one written longest ago first: a
daemon's bound holds for its part and these. Blocks are checksummed; one that a crash has torn is a miss, so nothing is
synced. A thread reads and writes, straight from and to the host blocks; the engine thread only queues and collects.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError
from engine.core.kv.tiers import Transfer
from engine.core.stats import TransferKind
from engine.core.types import Progress
from engine.runtime.transports import parts
from engine.runtime.transports.base import Opening
from engine.runtime.transports.worker import Rows, Worker
from engine.system.regular_file import open_file


def open_store(opening: Opening) -> DiskStore | None:
    """Open this daemon's part of the folder of --kv-offload-config, if any. Raises ConfigError."""
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


class DiskStore(Worker):
    """A Store over one part of a folder. Start-up thread, then engine thread."""

    is_shared = False

    def __init__(self, folder: Path, fingerprint: str, num_slots: int, block_bytes: int, pool: Rows) -> None:
        """Take a part, read its index, start the thread. Raises ConfigError."""
        super().__init__(pool, "quire-kv-store")
        self._stride = parts.stride(block_bytes)
        self.num_slots = num_slots
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.part, self._index = parts.take(folder, fingerprint)
            self._others = list(parts.others(folder, self.part))
            self._blocks = open_file(folder / f"{self.part}.kv", os.O_RDWR | os.O_CREAT)
            _check_room(folder, self._blocks, num_slots * self._stride, sum(size for _, size in self._others))
            os.ftruncate(self._blocks, num_slots * self._stride)  # it takes room as it is written to
            os.ftruncate(self._index, num_slots * parts.ENTRY_BYTES)
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-config: folder {folder} cannot be used: {error.strerror or error}."
            ) from error
        self._checksums: dict[int, int] = {}  # by slot
        self._num_written = 0
        self.kept = self._read_index()  # from before: (digest, slot), oldest first
        self._make_way(len(self._checksums))
        self._thread.start()

    def _read_index(self) -> list[tuple[bytes, int]]:
        found: dict[bytes, tuple[int, int]] = {}
        content = os.pread(self._index, self.num_slots * parts.ENTRY_BYTES, 0)
        for slot in range(len(content) // parts.ENTRY_BYTES):
            entry = parts.unpack(content[slot * parts.ENTRY_BYTES : (slot + 1) * parts.ENTRY_BYTES])
            if entry is not None:
                self._num_written = max(self._num_written, entry.when)
                self._checksums[slot] = entry.checksum
                if entry.digest not in found or found[entry.digest][0] < entry.when:
                    found[entry.digest] = (entry.when, slot)
        return [(digest, slot) for digest, (_, slot) in sorted(found.items(), key=lambda item: item[1])]

    def _make_way(self, num_blocks: int) -> None:
        """Remove unused parts until so many blocks fit the bound."""
        bound = self.num_slots * self._stride
        while self._others and num_blocks * self._stride + sum(size for _, size in self._others) > bound:
            parts.remove(self.folder, self._others.pop(0)[0])

    def close(self) -> None:
        """Finish what is queued, and give up the part."""
        super().close()
        if not self._thread.is_alive():  # else it may still use them; they end with the process
            os.close(self._blocks)
            os.close(self._index)

    # -- its own thread ------------------------------------------------------------------------------------------------

    def _move(self, transfer: Transfer, row: memoryview) -> bool:
        return self._write(transfer, row) if transfer.kind is TransferKind.SAVE else self._read(transfer, row)

    def _write(self, transfer: Transfer, row: memoryview) -> bool:
        """Write the block, then its entry; in between, the old entry's checksum fails."""
        checksum = parts.checksum(transfer.name, row)
        self._make_way(len(self._checksums) + (transfer.slot not in self._checksums))
        _write_all(self._blocks, row, transfer.slot * self._stride)
        self._num_written += 1
        entry = parts.Entry(transfer.name, self._num_written, checksum)
        _write_all(self._index, entry.pack(), transfer.slot * parts.ENTRY_BYTES)
        self._checksums[transfer.slot] = checksum
        return True

    def _read(self, transfer: Transfer, row: memoryview) -> bool:
        length = os.preadv(self._blocks, [row], transfer.slot * self._stride)
        if length == len(row) and parts.checksum(transfer.name, row) == self._checksums.get(transfer.slot):
            return True
        self._log(transfer, "it is not what was written")
        return False


def _write_all(file: int, content: memoryview | bytes, offset: int) -> None:
    length = os.pwrite(file, content, offset)
    if length != len(content):
        raise OSError(f"{length} of {len(content)} bytes were written")


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
