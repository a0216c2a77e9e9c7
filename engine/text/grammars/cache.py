"""Caches grammars and refusals within a bound of memory. One thread at a time."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from engine.core.errors import OverloadedError
from engine.text.grammars.spec import GrammarSpec
from engine.text.grammars.trial import GrammarError

if TYPE_CHECKING:
    from engine.text.grammars.guidance import GuidanceGrammar

MAX_ENTRIES = 256
MAX_BYTES = 512 << 20
_ERROR_BYTES = 1 << 10  # of an entry, besides its text
_RETRY_S = 10.0


class GrammarCache:
    """Grammars and errors by spec; the least recently used is dropped first.

    A grammar's memory counts for as long as a request follows it, even after it was dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[GrammarSpec, GuidanceGrammar | str] = OrderedDict()
        self._alive: weakref.WeakSet[GuidanceGrammar] = weakref.WeakSet()
        self._latest: weakref.WeakValueDictionary[bytes, GuidanceGrammar] = weakref.WeakValueDictionary()

    def get(self, spec: GrammarSpec) -> GuidanceGrammar | None:
        """Return a usable grammar, or None. Raises GrammarError for a known refusal."""
        found = self._entries.get(spec)
        if found is None:
            return None
        if not isinstance(found, str) and found.is_worn:
            del self._entries[spec]
            return None
        self._entries.move_to_end(spec)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def find(self, digest: bytes) -> GuidanceGrammar | None:
        """Return the latest grammar of a digest, while it is cached or in use. Any thread."""
        return self._latest.get(digest)

    def check_room(self) -> None:
        """Drop old entries. Raises OverloadedError if grammars in use exceed the bound."""
        self._trim()
        if self.num_bytes > self._max_bytes:
            raise OverloadedError(
                f"The grammars of running requests take {self.num_bytes >> 20} MiB; try again later, or make this one smaller.",
                retry_after_s=_RETRY_S,
            )

    def put(self, spec: GrammarSpec, result: GuidanceGrammar | GrammarError) -> None:
        """Add a grammar, or the reason why there is none."""
        if isinstance(result, GrammarError):
            self._entries[spec] = str(result)
        else:
            self._entries[spec] = result
            self._alive.add(result)
            self._latest[spec.digest] = result
        self._trim()

    @property
    def num_bytes(self) -> int:
        """The memory of all entries and of all grammars in use."""
        texts = sum(4 * len(spec.text) + _ERROR_BYTES for spec in self._entries)
        return texts + sum(grammar.num_bytes for grammar in self._alive)

    def _trim(self) -> None:
        while self._entries and (len(self._entries) > MAX_ENTRIES or self.num_bytes > self._max_bytes):
            self._entries.popitem(last=False)
