"""A step from its plan to its commit; or back again, where nothing of it was computed. Scheduler's own, engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from engine.core.plan import SequenceSlice
from engine.core.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """The slices, whose they are, and who else draws from one that forks."""

    slices: list[SequenceSlice] = field(default_factory=list)
    owners: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    children: dict[int, list[Sequence]] = field(default_factory=dict)  # by slice index
    step_id: int = -1

    @property
    def num_tokens(self) -> int:
        return sum([piece.num_tokens for piece in self.slices])

    def largest(self, request_ids: Container[str]) -> str | None:
        """Which of some requests has most tokens and draws in it; of equals, the one that came last."""
        sizes = [piece.num_tokens + len(piece.samples) for piece in self.slices]
        ours = [i for i, seq in enumerate(self.owners) if seq.request_id in request_ids]
        return self.owners[max(ours, key=lambda i: (sizes[i], i))].request_id if ours else None

    def undo(self) -> dict[Sequence, bool]:
        """See take_back."""
        filled = {destination for _, destination in self.copies}
        stand: dict[Sequence, bool] = {}
        for index, (piece, seq) in enumerate(zip(self.slices, self.owners, strict=True)):
            children = self.children.get(index, ())
            stand[seq] = filled.isdisjoint(seq.page_table.blocks)
            stand.update(dict.fromkeys(children, False))
            seq.num_planned = piece.start
            for each in (seq, *children):
                each.num_in_flight -= 1
        return stand


def take_back(flights: deque[Flight]) -> dict[Sequence, bool]:
    """Have the sequences of all flights stand where they stood before; whether they can go on from there.

    Choices that were to be born in them cannot, nor can a sequence whose last block was to be filled by a copy: the
    block it was to be copied from may have been written to since.
    """
    stand: dict[Sequence, bool] = {}
    while flights:
        for seq, is_whole in flights.pop().undo().items():
            stand[seq] = stand.get(seq, True) and is_whole
    return stand
