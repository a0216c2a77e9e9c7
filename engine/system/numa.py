"""Finds the memory nodes (sockets) of the machine, keeps this process on one, or spreads its pages over several. Linux.

A thread that reads weights of another node waits about twice as long, and all threads wait for the one node that has them all. So
the ranks of a model stay on a node each, threads and memory; a single process has its pages in turns on all nodes. Called once,
before threads and weights are made; a system that refuses is left as it is. No torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from engine.system.host_limits import read

_INTERLEAVE = 3  # of set_mempolicy(2)
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def memory_nodes(root: Path = Path("/")) -> dict[int, set[int]]:
    """Return the processors of each node that this process may use, without nodes that have none. `root` is for tests."""
    usable, nodes = os.sched_getaffinity(0), {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        if here := usable & _numbers(read(folder / "cpulist")):
            nodes[int(folder.name.removeprefix("node"))] = here
    return nodes


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list like 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def node_of_rank(nodes: Sequence[int], rank: int, size: int) -> int:
    """Return the node of a rank: neighbours share one where there are fewer nodes than ranks."""
    return nodes[rank * len(nodes) // size]


def stay_on_node(rank: int, size: int, root: Path = Path("/")) -> int | None:
    """Keep all threads of this process on a rank's node, whose memory they then get; return it, None if there is one only."""
    nodes = memory_nodes(root)
    if len(nodes) < 2:
        return None
    node = node_of_rank(sorted(nodes), rank, size)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), nodes[node])
    return node


def spread_pages(root: Path = Path("/")) -> int:
    """Have this thread, and those that it starts, allocate pages on all nodes in turns; return the number of nodes.

    1 where there is one node only, or the system does not let it.
    """
    nodes, call = memory_nodes(root), _SET_MEMPOLICY.get(platform.machine())
    if len(nodes) < 2 or call is None:
        return 1
    words = (ctypes.c_ulong * 16)()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    library = ctypes.CDLL(None)
    status = library.syscall(call, _INTERLEAVE, words, ctypes.c_ulong(8 * ctypes.sizeof(words)))
    return len(nodes) if status == 0 else 1
