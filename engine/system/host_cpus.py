"""Counts the processors that this process may use, control groups included.

A container's limit is a control group's quota: processor time in a period. A larger team of threads would be suspended
for the rest of every period. Reads a few files of /proc and /sys once, at start-up; no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.system.control_groups import group_folders, read


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors, at least 1; a fraction counts as one. `root` is for tests."""
    return max(1, min([_allowed(), *_quotas(root)]))


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # for systems without an affinity list
        return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[int]:
    """Yield the quota of each control group, rounded up."""
    for folder, is_first_version in group_folders(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
        numbers = " ".join(read(folder / name) for name in names).split()
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # "max" and -1 are no limit
            quota, period = map(int, numbers)
            yield -(-quota // period)
