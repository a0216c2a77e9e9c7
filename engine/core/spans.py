"""Spans of a prompt: places where vectors stand instead of ids, as of an image, and how they are named and divided.

Core knows their places, lengths and digests. An index counts ids and vectors alike: K/V, windows and budgets go by it,
whatever positions a model gives its vectors. The vectors are held for as long as the request lives, like all that it
names by a digest, because they are needed again after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import NamedTuple

_PLACE = Struct("<3q")


class Span(NamedTuple):
    """Vectors at positions of a prompt: at those of `length` from `start` on that have the first one's id.

    Most models have it at all of them; others have text within an image, as marks between its rows. `digest` is of the
    vectors and of all else that their K/V depend on. An atomic span, whose tokens attend both ways, is computed in one step.
    """

    start: int
    length: int
    digest: bytes
    is_atomic: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


class Chain(list[bytes]):
    """The names of a prompt's blocks, after their root; `parts` has what is in some names beside parent and tokens."""

    __slots__ = ("parts",)

    def __init__(self, names: Iterable[bytes], spans: Sequence[Span], block_size: int) -> None:
        """Make the digest of each span, its offset and its place in the block a part of the name."""
        super().__init__(names)
        self.parts: dict[int, bytes] = {}
        for span in spans:
            for index in range(span.start // block_size, (span.end - 1) // block_size + 1):
                first = max(span.start, index * block_size)
                place = first, first - span.start, min(span.end, (index + 1) * block_size) - first
                self.parts[index] = self.parts.get(index, b"") + span.digest + _PLACE.pack(*place)

    def copy(self) -> Chain:
        """Return a chain that is extended apart from this one."""
        copied = Chain(self, (), 1)
        copied.parts = self.parts
        return copied


class Missing:
    """Spans whose vectors are not made yet: those that prompts have come to in the last plan, in order, by digest."""

    def __init__(self) -> None:
        self.has: Callable[[bytes], bool] = lambda _: True  # whether vectors are there
        self.digests: dict[bytes, None] = {}

    def lacks(self, span: Span) -> bool:
        """Return whether the vectors of a span are not there, which is noted."""
        if self.has(span.digest):
            return False
        self.digests[span.digest] = None
        return True

    def clip(self, spans: Iterable[Span], start: int, stop: int) -> int:
        """Return where a chunk start .. stop ends at the latest: before the first span that it lacks."""
        for span in spans:
            if span.start < stop and start < span.end and self.lacks(span):
                return max(span.start, start)
        return stop


def divided(spans: Iterable[Span], stop: int) -> Span | None:
    """Return the atomic span that a chunk which ends at `stop` divides, if there is one.

    A chunk may begin within one: what is cached of it was computed with all of it.
    """
    return next((span for span in spans if span.is_atomic and span.start < stop < span.end), None)


def count_vectors(spans: Iterable[Span], start: int, stop: int) -> int:
    """Return how many of the positions start .. stop - 1 are vectors."""
    return sum([max(min(span.end, stop) - max(span.start, start), 0) for span in spans])
