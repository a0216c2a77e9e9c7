"""The contract of a KV connector: the blocks of a prompt leave one daemon as a parcel and arrive at another.

A parcel holds K/V of a prompt's first full blocks, in order, and says what made it: only an engine with the same
fingerprint (weights, types, layout of a block) may open it. Any thread; nothing here knows HTTP or the scheduler.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.uint8]  # [blocks, bytes of a block]


class Layout(NamedTuple):
    """What two engines have to agree on."""

    fingerprint: str
    block_size: int  # tokens
    block_bytes: int


class Parcel(Protocol):
    """One that is being packed: fill `rows`, then `send` as many as are good; or `drop` it."""

    @property
    def rows(self) -> Rows: ...

    def send(self, num_blocks: int) -> str:
        """Seal the first so many blocks; returns the name by which another daemon opens it."""
        ...

    def drop(self) -> None:
        """Nothing of it is wanted. Harmless after `send`."""
        ...


class KVConnector(Protocol):
    """Sends parcels and opens them."""

    def pack(self, layout: Layout, num_blocks: int) -> Parcel:
        """Room for a parcel. Raises ParcelError if there is none."""
        ...

    def open(self, name: str, layout: Layout) -> Rows:
        """The blocks of a parcel, checked; it is gone with that, whatever comes of it. Raises ParcelError."""
        ...


class ParcelError(Exception):
    """A parcel could not be packed or opened; the message says why. The prompt is computed instead."""
