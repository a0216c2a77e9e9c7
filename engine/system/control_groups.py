"""Finds the control groups that limit this process (Linux cgroups, version 1 or 2). Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
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
