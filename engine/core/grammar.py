"""Grammars as the core sees them: an opaque handle, and a matcher per sequence.

The server makes grammars (engine/text/grammars/) and hands them over inside a request's SamplingParams; the sampler starts
a matcher a sequence, tells it what was drawn and asks it what may come next. Nothing here knows how that is done.
"""

from __future__ import annotations

from collections import abc
from typing import Protocol


class Matcher(Protocol):
    """The state of one sequence in its grammar. Engine thread."""

    def accept(self, token_id: int) -> None:
        """Advance by a sampled token. Never raises: after a token that does not fit, `error()` says so."""
        ...

    def count_allowed(self, token_ids: abc.Sequence[int]) -> int:
        """Return the length of the longest accepted prefix, without advancing."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens, all of which were accepted."""
        ...

    def is_complete(self) -> bool:
        """Return whether only the end of the answer can follow."""
        ...

    def error(self) -> str | None:
        """Return why the matcher failed, if it did; then it allows nothing any more."""
        ...


class Grammar(Protocol):
    """An immutable handle that any thread may hold; its methods are the engine thread's."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer; a matcher allows them where the answer is complete."""
        ...

    def start(self) -> Matcher:
        """Return a matcher before the first token. Takes microseconds: the slow work was done before."""
        ...

    def fill_masks(self, matchers: abc.Sequence[Matcher], address: int, num_words: int) -> None:
        """Write the masks of tokens that these matchers, of any grammar of this class, allow next.

        Row i at `address` has `num_words` 32-bit words; token t is bit t % 32 of word t // 32, set where it is allowed.
        """
        ...
