"""What a runner tells the other ranks of its model; `Alone` is a model on one process, which costs nothing.

engine/ranks/executor.py implements it with processes, and ends them. Engine thread, after the thread that builds the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.runtime.batch import Packet


class Ranks(Protocol):
    """The other ranks, which do in the same order what they are told."""

    def send(self, packet: Packet) -> None:
        """Have them compute a step's forward pass and logits."""
        ...

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Have them copy blocks, in a step without tokens."""
        ...

    def share(self, last_ids: Tensor) -> None:
        """Send them the drawn ids, if they may need them before the host knows them."""
        ...

    def configure(self, config: SchedulerConfig) -> None:
        """Have them allocate the pool with these sizes."""
        ...


class Alone:
    """No other ranks."""

    def send(self, packet: Packet) -> None:
        """Do nothing."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Do nothing."""

    def share(self, last_ids: Tensor) -> None:
        """Do nothing."""

    def configure(self, config: SchedulerConfig) -> None:
        """Do nothing."""


ALONE = Alone()
