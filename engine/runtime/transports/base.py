"""What a store behind host memory is opened with, and what the engine asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.core.kv.tiers import Transport
from engine.core.types import Progress
from engine.runtime.transports.host import HostPool
from engine.settings.engine_config import EngineConfig


class Opening(NamedTuple):
    """What stores are made from: the settings, host memory, and what K/V blocks are."""

    config: EngineConfig
    pool: HostPool  # where a store reads and writes: `row` and `finish_copies`
    block_bytes: int
    fingerprint: str  # of everything that K/V depends on
    report: Callable[[Progress], None]
    opened: Mapping[str, Store]  # the stores before this one


class Store(Transport, Protocol):
    """A Transport with its size and the blocks of an earlier process."""

    is_shared: bool  # others write to it, and the engine only reads it

    @property
    def num_slots(self) -> int: ...

    @property
    def kept(self) -> Sequence[tuple[bytes, int]]:
        """Return (name, slot) of each block, oldest first."""
