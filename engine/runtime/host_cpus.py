"""Counts the processors that this process may use, control groups included.

A container's limit is a control group's quota (Linux cgroups, version 1 or 2): processor time in a period. A larger
team of threads would be suspended for the rest of every period. Reads a few files of /proc and /sys once, at start-up;
no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors, at least 1; a fraction counts as one. `root` is for tests."""
    return max(1, min([_allowed(), *_quotas(root)]))


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # for systems without an affinity list
        return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[int]:
    """Yield the quota of each group from this process's own to the root, rounded up."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        own = mount / path.lstrip("/")
        # In a container without a cgroup namespace the path is the host's, and only the mount's root is visible.
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                yield from _quota(folder, is_first_version=bool(controllers))


def _quota(folder: Path, *, is_first_version: bool) -> Iterator[int]:
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
    numbers = " ".join(_read(folder / name) for name in names).split()
    if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # "max" and -1 are no limit
        quota, period = map(int, numbers)
        yield -(-quota // period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
