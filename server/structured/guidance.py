"""Implements engine/core/grammar.py over llguidance: a compiled grammar, and a matcher a sequence.

Made by the maker's worker threads, then the engine thread's alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from engine.core.grammar import Matcher
from server.structured.trials import GrammarError, clean

_LIMITS = LLParserLimits(verbose_errors=False)  # else a message tells the whole grammar
_FEW = 8  # matchers that are not worth waking other threads for


class GuidanceMatcher:
    """One sequence's place in a grammar."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_id: int) -> None:
        """Take in a drawn token; one that does not fit is in `error`."""
        self.inner.consume_token(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these could follow."""
        return 0 if self.inner.is_stopped() else self.inner.validate_tokens(list(token_ids))

    def rollback(self, count: int) -> None:
        """Undo the last tokens."""
        self.inner.rollback(count)

    def is_complete(self) -> bool:
        """Whether only the end can follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def error(self) -> str | None:
        """What went wrong, in one line."""
        return clean(self.inner.get_error()) if self.inner.is_error() else None


class Vocabulary:
    """The model's tokens as llguidance has them, and the threads that fill masks together."""

    def __init__(self, tokenizer_json: str, vocab_size: int, end_ids: frozenset[int]) -> None:
        """Takes 0.2 s for 49,152 tokens, and holds the GIL meanwhile. Raises GrammarError for an unknown kind."""
        try:
            self.tokens = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(end_ids) or None)
        except Exception as error:  # the library raises ValueError, and a bare one of its own
            reason = clean(str(error))
            raise GrammarError(f"this model's tokenizer cannot be used for structured outputs: {reason}") from error
        self.end_ids = end_ids
        self.executor = LLExecutor()


class GuidanceGrammar:
    """A grammar that compiled, from which matchers start."""

    def __init__(self, vocabulary: Vocabulary, grammar: str) -> None:
        """Compile for this vocabulary. Raises GrammarError."""
        self._executor = vocabulary.executor
        self.end_ids = vocabulary.end_ids
        self._first = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
        # The first mask of all fills tables that every matcher of this grammar shares; here nobody waits for it.
        trial = self._first.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()
        if trial.is_error():
            raise GrammarError(clean(trial.get_error()))

    def start(self) -> GuidanceMatcher:
        """A matcher before the first token."""
        return GuidanceMatcher(self._first.deep_copy())

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        """A row of words for each matcher, many of them on several threads at once."""
        num_bytes = 4 * num_words
        rows = [(matcher.inner, row) for row, matcher in enumerate(matchers) if isinstance(matcher, GuidanceMatcher)]
        if len(rows) <= _FEW:
            for inner, row in rows:
                inner.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
            return
        self._executor.unsafe_compute_mask_ptr(rows, address, num_bytes, len(rows))
