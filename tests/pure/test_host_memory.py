"""What may still be taken of main memory, as the machine and the control groups tell it."""

from __future__ import annotations

from pathlib import Path

from engine.system.host_limits import available_memory

GIB = 1 << 30


def machine(root: Path, cgroup: str, **files: str) -> Path:
    """A file tree with 8 GiB available; `files` are keyed by path below /sys/fs/cgroup, with __ for a slash."""
    tree = {"proc/meminfo": f"MemTotal: 16777216 kB\nMemAvailable: {8 << 20} kB\n", "proc/self/cgroup": cgroup}
    tree |= {f"sys/fs/cgroup/{name.replace('__', '/')}": text for name, text in files.items()}
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: int | str, used: int, cached: int) -> dict[str, str]:
    """The files of a version 2 group."""
    stat = f"anon 1\ninactive_file {cached}\nactive_file 5\n"
    return {f"{folder}memory.max": f"{limit}\n", f"{folder}memory.current": f"{used}\n", f"{folder}memory.stat": stat}


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "")) == 8 * GIB


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) >= 1 << 60


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", **group("", 4 * GIB, GIB, 0))
    assert available_memory(root) == 3 * GIB


def test_cached_file_pages_count_as_free(tmp_path: Path) -> None:
    """A model that was read through the page cache has not used up the container."""
    root = machine(tmp_path, "0::/\n", **group("", 4 * GIB, 4 * GIB, 3 * GIB))
    assert available_memory(root) == 3 * GIB


def test_the_tightest_group_on_the_way_up_binds(tmp_path: Path) -> None:
    groups = group("a__b__", "max", GIB, 0) | group("a__", 2 * GIB, GIB, 0) | group("other__", 1, 0, 0)
    assert available_memory(machine(tmp_path, "0::/a/b\n", **groups)) == GIB


def test_a_path_of_the_host_is_looked_up_where_it_can_be_seen(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/docker/0123\n", **group("", 4 * GIB, GIB, 0))
    assert available_memory(root) == 3 * GIB


def test_version_1_is_read_too(tmp_path: Path) -> None:
    files = {
        "memory__docker__memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory__docker__memory.usage_in_bytes": f"{GIB}\n",
        "memory__docker__memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
        "memory__memory.limit_in_bytes": "9223372036854771712\n",
        "memory__memory.usage_in_bytes": f"{9 * GIB}\n",
    }
    root = machine(tmp_path, "5:cpu,cpuacct:/docker\n4:memory:/docker\n0::/docker\n", **files)
    assert available_memory(root) == GIB + GIB // 2


def test_a_group_beyond_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, "0::/\n", **group("", GIB, 2 * GIB, 0))) == 0
