"""Measures what this process may use of the machine, control groups included (Linux cgroups, version 1 or 2).

The limits of containers and service managers are control groups'. One of processors is a quota: processor time in a
period, and a larger team of threads would be suspended for the rest of every period. Reads a few files of /proc and /sys
once, at start-up; no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 62  # for systems without /proc
# File names of control groups: the limit, the use, and the key in memory.stat for cached file pages, which the kernel
# reclaims first.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors to use, at least 1. `root` is for tests.

    A quota's fraction counts as one from three quarters on. Under 1.5 processors a team of two threads, which is suspended for
    a quarter of the time, gives one request 184 tokens/s, and a single thread 225; eight requests 739 and 715.
    """
    return max(1, math.floor(processor_share(root) + 0.25))


def processor_share(root: Path = Path("/")) -> float:
    """Return the processors that can be kept busy all the time: where a quota has a fraction, with that."""
    return min([_allowed(), *_quotas(root)])


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # for systems without an affinity list
        return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota of each control group, in processors."""
    for folder, is_first_version in _group_folders(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
        numbers = " ".join(read(folder / name) for name in names).split()
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):  # "max" and -1 are no limit
            quota, period = map(int, numbers)
            yield quota / period


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Return whether this CPU has bfloat16 instructions; emulation is much slower than float32. `root` is for tests.

    The kernel's list is read instead of timing products, so that a machine makes the same choice at every start.
    """
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(read(root / "proc/cpuinfo").split())


def processor_name(root: Path = Path("/")) -> str:
    """Return what the kernel calls this CPU; nothing where it has no name. `root` is for tests."""
    lines = (line.partition(":") for line in read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "")


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
    for folder, is_first_version in _group_folders(root, "memory"):
        limit_name, used_name, reclaimable = _VERSION_1 if is_first_version else _VERSION_2
        limit, used = read(folder / limit_name).strip(), read(folder / used_name).strip()
        if limit.isdecimal() and used.isdecimal():  # "max" is no limit
            stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + int(stat.get(reclaimable, 0))


def _group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group from the process's to the root, and whether it is of version 1.

    Any of them may be the tightest. `root` is the file system's.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = mount / path.lstrip("/")
        # In a container without a cgroup namespace the path is the host's, and only the mount's root is visible.
        for folder in (own, *own.parents):
            if folder.is_relative_to(mount):
                yield folder, bool(controllers)


def read(path: Path) -> str:
    """Return the text of a file of /proc or /sys, "" without one."""
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
