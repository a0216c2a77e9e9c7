"""Keeps cached K/V blocks in this daemon's part of a folder, which outlives the process.

Parts that no daemon writes to are removed as this one's blocks need the room, the one written longest ago first: a
daemon's bound holds for its part and these.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError
from engine.core.types import Progress
from engine.runtime.stores import parts
from engine.runtime.stores.tier import Opening, Tier
from engine.system.regular_file import expanded


def open_tier(opening: Opening) -> Tier | None:
    """Open this daemon's part of the folder of --kv-offload-config, if any. Raises ConfigError."""
    config, block_bytes = opening.config, opening.block_bytes
    if config.kv_offload_dir is None:
        return None
    folder = expanded(config.kv_offload_dir)
    num_slots = int(config.kv_offload_disk_gib * (1 << 30)) // parts.stride(block_bytes)
    if not num_slots:
        raise ConfigError(
            f"--kv-offload-config: disk_gib is {config.kv_offload_disk_gib:g}, less than one block of K/V "
            f"({block_bytes / (1 << 20):.2f} MiB); raise it."
        )
    store = DiskStore(folder, opening.fingerprint, num_slots, block_bytes)
    detail = f"{num_slots} blocks in {folder}, {len(store.kept)} of them kept from before"
    opening.report(Progress("kv_offload", detail))
    return Tier(store, opening.pool)


class DiskStore(parts.OwnPart):
    """A Store in one part of a folder."""

    def __init__(self, folder: Path, fingerprint: str, num_slots: int, block_bytes: int) -> None:
        """Take a part and read its index. Raises ConfigError."""
        self._bound = num_slots * parts.stride(block_bytes)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name, index = parts.take(folder, fingerprint)
            listed = [part for part in parts.listed(folder) if part.name != name]
            self._others = [part for part in listed if not parts.is_locked(folder, part.name)]
            _check_room(folder, folder / f"{name}.kv", self._bound, sum(part.num_bytes for part in self._others))
            super().__init__(folder, name, index, num_slots, block_bytes)
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-config: folder {folder} cannot be used: {error.strerror or error}."
            ) from error
        self.kept = self.index.kept  # from before: (name, slot), oldest first
        self._make_way(len(self.index.entries))

    def news(self) -> None:
        """Return nothing: only the engine writes here."""

    def put(self, name: bytes, row: memoryview, slot: int) -> None:
        self._make_way(len(self.index.entries) + (slot not in self.index.entries))
        super().put(name, row, slot)

    def _make_way(self, num_blocks: int) -> None:
        """Remove unused parts until so many blocks fit the bound."""
        own = num_blocks * parts.stride(self.block_bytes)
        while self._others and own + sum(part.num_bytes for part in self._others) > self._bound:
            parts.remove(self.folder, self._others.pop(0).name)


def _check_room(folder: Path, blocks: Path, num_bytes: int, num_leaving: int) -> None:
    """Raise ConfigError unless the disk has room, counting files to be reused."""
    there = (blocks.stat().st_blocks * 512 if blocks.exists() else 0) + num_leaving
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize + there
    if num_bytes > free:
        gib = 1 << 30
        most = int(free / gib * 10) / 10
        remedy = f"set it to at most {most:g}" if most else "name another folder, or make room"
        raise ConfigError(
            f"--kv-offload-config: disk_gib asks for {num_bytes / gib:.1f} GiB in {folder}, and {free / gib:.1f} are free there; "
            f"{remedy}."
        )
