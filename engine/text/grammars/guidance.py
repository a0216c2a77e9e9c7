"""Implements the Grammar of engine/core/types.py over llguidance.

Built by the compiler's worker threads, then used by the engine thread alone. All matchers of a grammar share its lexer, whose tables grow with the answers. The memory that a call into the library
adds to this process is therefore charged to the grammar. A grammar that grew is `is_worn` and not given to new requests;
one that grew too much fails the requests that follow it. A lexer that ran into a limit stays broken; it is worn too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from engine.core.types import Matcher
from engine.text.grammars.trial import GrammarError, clean
from engine.text.grammars.trial_process import MAX_BUILT_BYTES, build, private_bytes

MAX_GROWN_BYTES = MAX_BUILT_BYTES  # of one grammar while it is followed
_WORN_BYTES = MAX_GROWN_BYTES // 2
_FEW = 8  # so few matchers are not worth waking other threads
_NUM_QUIET = 32  # calls in a row below _NOTICED_BYTES, after which a grammar is measured less closely
_NOTICED_BYTES = 16 << 10
_SUSPECT_BYTES = 1 << 20  # by masks that were filled together
_STATM = Path("/proc/self/statm")


_statm = os.open(_STATM, os.O_RDONLY) if _STATM.exists() else None


def _memory() -> int:
    """Return the private memory of this process; 0 where the system does not report it. Takes 2 us."""
    return 0 if _statm is None else private_bytes(os.pread(_statm, 256, 0))


class GuidanceMatcher:
    """The position of one sequence in a grammar."""

    __slots__ = ("grammar", "inner")

    def __init__(self, grammar: GuidanceGrammar, inner: LLMatcher) -> None:
        self.grammar = grammar
        self.inner = inner

    def accept(self, token_id: int) -> None:
        """Advance by a drawn token; a token that does not fit is reported by `error`."""
        if self.grammar.is_quiet:  # its masks are measured, and would grow too
            self.inner.consume_token(token_id)
            return
        before = _memory()
        self.inner.consume_token(token_id)
        self.grammar.charge(_memory() - before)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        if self.inner.is_stopped():
            return 0
        before = _memory()
        count = self.inner.validate_tokens(list(token_ids))
        self.grammar.charge(_memory() - before)
        return count

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def is_complete(self) -> bool:
        return self.inner.is_stopped() and not self.inner.is_error()

    def error(self) -> str | None:
        """Return the error in one line, or None."""
        if self.inner.is_error():
            self.grammar.is_broken = True
            return clean(self.inner.get_error())
        if self.grammar.has_outgrown:
            return f"it takes more than {MAX_GROWN_BYTES >> 20} MiB to follow; make the grammar smaller"
        return None


class GuidanceVocabulary:
    """The model's tokens in llguidance's form, and the threads that fill masks."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Takes 0.2 s for 49,152 tokens, holding the GIL; a trial has done it before."""
        self.tokens = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids) or None)
        self.end_ids = end_ids
        self.executor = LLExecutor()


class GuidanceGrammar:
    """A compiled grammar, from which matchers start."""

    def __init__(self, vocabulary: GuidanceVocabulary, grammar: str, num_bytes: int) -> None:
        """Build a grammar that took `num_bytes` in its trial. Raises GrammarError."""
        self._executor = vocabulary.executor
        self.end_ids = vocabulary.end_ids
        self.is_broken = False  # a matcher failed, perhaps with the lexer that all share
        self._is_suspect = False  # it may be what took much memory while masks were filled together
        self._built_bytes = num_bytes
        self._grown_bytes = 0
        self._num_quiet = 0
        try:
            self._first = build(vocabulary.tokens, grammar)
        except ValueError as error:
            raise GrammarError(clean(str(error))) from None

    @property
    def num_bytes(self) -> int:
        """The memory it takes."""
        return self._built_bytes + self._grown_bytes

    @property
    def is_worn(self) -> bool:
        """True if the next request should get a new one."""
        return self.is_broken or self._is_suspect or self._grown_bytes > _WORN_BYTES

    @property
    def has_outgrown(self) -> bool:
        """True if the requests that follow it must fail."""
        return self._grown_bytes > MAX_GROWN_BYTES

    @property
    def is_quiet(self) -> bool:
        """True if its last calls took hardly any memory."""
        return self._num_quiet >= _NUM_QUIET and not self._is_suspect

    def charge(self, num_bytes: int) -> None:
        """Count memory that a call took."""
        self._grown_bytes += max(num_bytes, 0)
        self._num_quiet = 0 if num_bytes > _NOTICED_BYTES else self._num_quiet + 1

    def share(self, num_bytes: int, num_grammars: int) -> None:
        """Count a share of memory; after a large one its masks are filled alone."""
        self._grown_bytes += max(num_bytes, 0) // num_grammars
        self._is_suspect = self._is_suspect or num_bytes > _SUSPECT_BYTES

    def start(self) -> GuidanceMatcher:
        return GuidanceMatcher(self, self._first.deep_copy())

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        """Fill a row of words for each matcher, many of them on several threads.

        The masks of grammars that took memory lately are filled one by one, to find which of them takes it.
        """
        num_bytes = 4 * num_words
        rows = [(matcher, row) for row, matcher in enumerate(matchers) if isinstance(matcher, GuidanceMatcher)]
        together = [(matcher, row) for matcher, row in rows if matcher.grammar.is_quiet] if len(rows) > _FEW else []
        filled = {row for _, row in together}  # a grammar may become quiet while others are filled one by one
        for matcher, row in rows:
            if row not in filled:
                before = _memory()
                matcher.inner.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
                matcher.grammar.charge(_memory() - before)
        if together:
            before = _memory()
            inner = [(matcher.inner, row) for matcher, row in together]
            self._executor.unsafe_compute_mask_ptr(inner, address, num_bytes, len(rows))
            grown, grammars = _memory() - before, {matcher.grammar for matcher, _ in together}
            for grammar in grammars:
                grammar.share(grown, len(grammars))
