"""Measures the memory that this process can still allocate, control groups included.

The limits of containers and service managers are control groups'. Reads a few files of /proc and /sys once, at start-up;
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.system.control_groups import group_folders, read

_UNLIMITED = 1 << 62  # for systems without /proc


# File names of control groups: the limit, the use, and the key in memory.stat for cached file pages, which the kernel
# reclaims first.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed.

    Cached file pages count as free. `root` is for tests."""
    return max(0, min([_UNLIMITED, *_machine(root), *_groups(root)]))


def _machine(root: Path) -> Iterator[int]:
    for line in read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10


def _groups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of each control group."""
    for folder, is_first_version in group_folders(root, "memory"):
        limit_name, used_name, reclaimable = _VERSION_1 if is_first_version else _VERSION_2
        limit, used = read(folder / limit_name).strip(), read(folder / used_name).strip()
        if limit.isdecimal() and used.isdecimal():  # "max" is no limit
            stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + int(stat.get(reclaimable, 0))
