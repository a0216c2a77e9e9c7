"""Keeps grammars that were made, and the reasons why others could not be, within bounds of memory. One thread at a time."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.core.errors import OverloadedError
from engine.text.grammars.spec import GrammarSpec
from engine.text.grammars.trials import GrammarError

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar

MAX_KEPT = 256
MAX_BYTES = 512 << 20
_ERROR_BYTES = 1 << 10  # of an entry, besides its text
_RETRY_S = 10.0


class KeptGrammars:
    """Grammars and errors by what was asked for, the least recently used one dropped first.

    A grammar counts as long as a request follows it, kept or not.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[GrammarSpec, GuidanceGrammar | str] = OrderedDict()
        self._alive: weakref.WeakSet[GuidanceGrammar] = weakref.WeakSet()

    def get(self, spec: GrammarSpec) -> GuidanceGrammar | None:
        """The grammar, if it is kept and of use. Raises GrammarError if it is known that there can be none."""
        found = self._kept.get(spec)
        if found is None:
            return None
        if isinstance(found, str):
            self._kept.move_to_end(spec)
            raise GrammarError(found)
        if found.is_worn:
            del self._kept[spec]
            return None
        self._kept.move_to_end(spec)
        return found

    def check_room(self) -> None:
        """Drop what is too much. Raises OverloadedError if what is being followed is too much by itself."""
        self._trim()
        if self.num_bytes > self._max_bytes:
            raise OverloadedError(
                f"The grammars of running requests take {self.num_bytes >> 20} MiB; try again later, or make this one smaller.",
                retry_after_s=_RETRY_S,
            )

    def put(self, spec: GrammarSpec, outcome: GuidanceGrammar | GrammarError) -> None:
        """Keep a grammar, or in a few words why there is none."""
        if isinstance(outcome, GrammarError):
            self._kept[spec] = str(outcome)
        else:
            self._kept[spec] = outcome
            self._alive.add(outcome)
        self._trim()

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        texts = sum(4 * len(spec.text) + _ERROR_BYTES for spec in self._kept)
        return texts + sum(grammar.num_bytes for grammar in self._alive)

    def _trim(self) -> None:
        while self._kept and (len(self._kept) > MAX_KEPT or self.num_bytes > self._max_bytes):
            self._kept.popitem(last=False)
