"""The other ranks of a model, seen from the first rank's runner; `Ranks` itself has none, which costs nothing.

engine/ranks/executor.py has them as processes, and ends them. Engine thread, after the thread that builds the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.pool.batch import DecodeRows, Packet

if TYPE_CHECKING:
    from torch.cuda import Event


class Ranks:
    """The other ranks, which do what they are sent, in the same order; here none."""

    group: Group = SINGLE  # of all ranks

    def send(self, work: Packet | DecodeRows, *, draws: bool) -> None:
        """Have them compute a step; `share` follows where it `draws` ids outside of a graph."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Have them copy blocks, in a step without tokens."""

    def share(self, last_ids: Tensor) -> None:
        """Send them the drawn ids, if they may need them before the host knows them."""

    def configure(self, config: SchedulerConfig) -> None:
        """Have them allocate the pool with these sizes, and drop their graphs."""

    def capture(self) -> None:
        """Have them capture the graphs of decode steps."""

    def least_room(self, room: int) -> int:
        """Return the least of the bytes that all ranks' devices have left for K/V and steps, this one's being `room`."""
        return room

    def hold_to_share(self) -> None:
        """Have them hold torch to their share of their devices' memory."""

    def await_event(self, event: Event) -> None:
        """Wait until the device has reached an event. Raises GroupError if a rank is lost or hangs."""
        event.synchronize()


ALONE = Ranks()
