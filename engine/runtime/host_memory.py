"""How much main memory this process can still take: what the machine has, and what every control group it is in allows.

A container's limit is a control group's (Linux cgroups, version 1 or 2), and so is a service manager's; any group above
may be the one that binds. Reads a few files of /proc and /sys once, at start-up; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 62  # where nothing can be read, as on systems without /proc


class _Files(NamedTuple):
    """What one version of cgroups calls things."""

    mount: str
    limit: str
    used: str
    reclaimable: str  # the key in memory.stat of cached file pages that the kernel takes back first


_VERSION_1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed; cached file pages count as free. `root` is for tests."""
    return max(0, min([_UNLIMITED, *_machine(root), *_groups(root)]))


def _machine(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10


def _groups(root: Path) -> Iterator[int]:
    """What each group between this process's own and the root of its hierarchy has left."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        mount = root / files.mount
        own = mount / path.lstrip("/")
        # Where a container has no namespace of its own, the path is the host's and only the mount's root is to be seen.
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
