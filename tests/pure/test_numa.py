"""Memory nodes of made-up trees of /sys."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.system import numa


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets and a node of memory alone; this process may use half of the second socket."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 6, 7}, raising=False)
    for node, processors in ((0, "0-1,3\n"), (1, "\n"), (10, "4-7\n")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        folder.joinpath("cpulist").write_text(processors)
    return tmp_path


def test_nodes_have_the_processors_that_the_process_may_use(root: Path, tmp_path: Path) -> None:
    assert numa.memory_nodes(root) == {0: {0, 1, 3}, 10: {6, 7}}
    assert numa.memory_nodes(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("nodes", "size", "expected"),
    [([0, 1], 2, [0, 1]), ([0, 1], 4, [0, 0, 1, 1]), ([0, 1, 2, 3], 2, [0, 2]), ([0, 10], 3, [0, 0, 10])],
)
def test_ranks_are_divided_among_nodes(nodes: list[int], size: int, expected: list[int]) -> None:
    assert [numa.node_of_rank(nodes, rank, size) for rank in range(size)] == expected


def test_all_threads_of_a_rank_stay_on_its_node(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", kept.__setitem__, raising=False)
    assert numa.stay_on_node(1, 2, root) == 10
    assert os.getpid() in kept
    assert set(map(frozenset, kept.values())) == {frozenset({6, 7})}
    kept.clear()
    assert numa.stay_on_node(1, 2, root / "elsewhere") is None
    assert not kept


@pytest.mark.parametrize(("status", "expected"), [(0, 2), (-1, 1)])
def test_pages_are_spread_over_nodes_where_the_system_lets_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    calls: list[Any] = []

    def syscall(number: int, mode: int, nodes: Any, num_bits: Any) -> int:
        calls.append((mode, nodes[0], num_bits.value))
        return status

    monkeypatch.setattr(numa.ctypes, "CDLL", lambda *_: SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    assert numa.spread_pages(root) == expected
    assert calls == [(3, 1 << 10 | 1, 1024)]
    assert numa.spread_pages(root / "elsewhere") == 1
    assert len(calls) == 1
