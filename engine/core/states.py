"""The recurrent state of one sequence: where it is; KVCacheManager writes it. See kv/snapshots.py."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

NEVER = sys.maxsize


@dataclass(slots=True, eq=False)
class StateSlots:
    """The slots of a sequence's recurrent state, see kv/snapshots.py; each is a list of blocks."""

    slot: list[int] = field(default_factory=list)  # the state after all planned positions; empty before the first
    is_shared: bool = False  # others may read it: the next chunk writes to another slot
    source: list[int] = field(default_factory=list)  # what the last planned chunk reads: `slot` in a plain decode
    is_moved: bool = False  # no plan has said so yet
    # Slots that were left, with the positions they stand at: until the step that reads them is committed.
    held: list[tuple[int, list[int]]] = field(default_factory=list)
    last: bytes = b""  # the name of the last snapshot behind the prompt

    @property
    def tables(self) -> list[list[int]]:
        """Return the blocks of all slots that the sequence holds."""
        return [self.slot, *[blocks for _, blocks in self.held]] if self.slot else []

    @property
    def due(self) -> int:
        """Return the computed positions at which a slot that was left is no longer read."""
        return self.held[0][0] + 1 if self.held else NEVER
