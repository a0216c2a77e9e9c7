"""Measures the memory that this process can still allocate, control groups included.

The limits of containers and service managers are control groups' (Linux cgroups, version 1 or 2); any group up to the
root may be the tightest. Reads a few files of /proc and /sys once, at start-up; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 62  # for systems without /proc


class _Files(NamedTuple):
    """File names of one version of cgroups."""

    mount: str
    limit: str
    used: str
    reclaimable: str  # key in memory.stat for cached file pages, which the kernel reclaims first


_VERSION_1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed.

    Cached file pages count as free. `root` is for tests."""
    return max(0, min([_UNLIMITED, *_machine(root), *_groups(root)]))


def _machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10


def _groups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of each group from this process's own to the root."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        mount = root / files.mount
        own = mount / path.lstrip("/")
        # In a container without a cgroup namespace the path is the host's, and only the mount's root is visible.
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                yield from _left(folder, files)


def _left(folder: Path, files: _Files) -> Iterator[int]:
    limit, used = _read(folder / files.limit).strip(), _read(folder / files.used).strip()
    if limit.isdecimal() and used.isdecimal():  # "max" is no limit
        stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
        yield int(limit) - int(used) + int(stat.get(files.reclaimable, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
