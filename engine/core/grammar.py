"""What a constrained answer's grammar looks like to the engine: an opaque handle, and a matcher for each sequence.

The server makes grammars (engine/text/grammars/) and hands them over inside a request's SamplingParams; the sampler starts
a matcher a sequence, tells it what was drawn and asks it what may come next. Nothing here knows how that is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Matcher(Protocol):
    """Where one sequence stands in its grammar. Engine thread."""

    def accept(self, token_id: int) -> None:
        """Take in a drawn token. Never raises: one that does not fit shows in `error()`, from then on."""
        ...

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of some tokens it would take in one after the other; it stays where it is."""
        ...

    def rollback(self, count: int) -> None:
        """Be where it was before the last `count` tokens, all of which it could take in."""
        ...

    def is_complete(self) -> bool:
        """True once nothing but the end of the answer can follow."""
        ...

    def error(self) -> str | None:
        """What went wrong; such a matcher allows nothing any more."""
        ...


class Grammar(Protocol):
    """An immutable handle that any thread may hold; its methods are the engine thread's."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer; a matcher allows them where the answer so far is whole."""
        ...

    def start(self) -> Matcher:
        """A matcher before the first token. Takes microseconds: what is slow was done when the grammar was made."""
        ...

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        """Write what each of some matchers, of this grammar or of others of its class, allows next.

        Row i at `address` has `num_words` 32-bit words; token t is bit t % 32 of word t // 32, set where it is allowed.
        """
        ...
