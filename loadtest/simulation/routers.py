"""Routers: each returns the replica that takes a request.

They exist in the simulator only. Quire serves one replica; a gateway in front of several routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from zlib import crc32

from loadtest.simulation.replica import Replica
from loadtest.simulation.trace import TraceRequest

# With affinity, a replica takes a group's requests until it has so many times the fleet's mean, and a few more.
_MOST_LOAD, _SPARE_REQUESTS = 1.25, 4

Router = Callable[[Sequence[Replica], TraceRequest, int], int]


def round_robin(replicas: Sequence[Replica], _row: TraceRequest, count: int) -> int:
    """Return the replicas in turn."""
    return count % len(replicas)


def least_loaded(replicas: Sequence[Replica], _row: TraceRequest, count: int) -> int:
    """Return the replica with the fewest open requests; equal ones take turns."""
    num = len(replicas)
    return min(range(num), key=lambda place: (replicas[place].num_requests, (place - count) % num))


def prefix_affinity(replicas: Sequence[Replica], row: TraceRequest, count: int) -> int:
    """Return the owner of a prefix by rendezvous hashing, unless it is busy."""
    if row.prefix_group:
        place = max(range(len(replicas)), key=lambda place: crc32(f"{place} {row.prefix_group}".encode()))
        mean = sum(replica.num_requests for replica in replicas) / len(replicas)
        if replicas[place].num_requests <= _MOST_LOAD * mean + _SPARE_REQUESTS:
            return place
    return least_loaded(replicas, row, count)


ROUTERS: Mapping[str, Router] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-affinity": prefix_affinity,
}
