"""The recurrent state of one sequence: where it is; KVCacheManager writes it. See kv/snapshots.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

NEVER = sys.maxsize


class LeftSlot(NamedTuple):
    """A slot that its sequence has left at a position."""

    position: int
    blocks: list[int]
    ready_at: int  # computed positions from which on it surely has the state before `position`


@dataclass(slots=True, eq=False)
class StateSlots:
    """The slots of a sequence's recurrent state, see kv/snapshots.py; each is a list of blocks."""

    slot: list[int] = field(default_factory=list)  # the state after all planned positions; empty before the first
    is_shared: bool = False  # others may read it: the next chunk writes to another slot
    source: list[int] = field(default_factory=list)  # what the last planned chunk reads: `slot` in a plain decode
    is_moved: bool = False  # no plan has said so yet
    num_behind: int = 0  # accepted drafts that `slot` lacks: the next step takes them in first
    # Slots that were left, until the step that reads them is committed.
    held: list[LeftSlot] = field(default_factory=list)
    last: bytes = b""  # the name of the last snapshot behind the prompt
    continued: bytes = b""  # that of the snapshot which no sequence but this one has resumed from

    @property
    def tables(self) -> list[list[int]]:
        """Return the blocks of all slots that the sequence holds."""
        return [self.slot, *[left.blocks for left in self.held]] if self.slot else []

    @property
    def due(self) -> int:
        """Return the computed positions at which a slot that was left is no longer read."""
        return self.held[0].position + 1 if self.held else NEVER
