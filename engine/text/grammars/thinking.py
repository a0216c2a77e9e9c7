"""Bounds a model's thoughts, and applies a grammar to the answer behind them.

A Grammar of engine/core/types.py. A matcher counts tokens and looks for two of them, the tags; once the budget is spent,
the closing tag is the only token allowed. An inner grammar begins where the thoughts end, or immediately if there are
none. Made where a request is accepted, then used by the engine thread alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import Enum, auto

from engine.core.types import Grammar, Matcher, TagIds, Thinking

_WORD_BYTES = 4
# Tokens of thoughts by effort, for models whose template has no switch for it. Other efforts are unbounded.
EFFORT_BUDGETS = {"none": 0, "minimal": 128, "low": 512, "medium": 2048}


class _State(Enum):
    START = auto()  # the opening tag may come
    THOUGHTS = auto()
    ANSWER = auto()


class ThinkingMatcher:
    """The position of one sequence in its thoughts and answer."""

    __slots__ = ("_budget", "_grammar", "_inner", "_num_thoughts", "_past", "_state", "_tags")

    def __init__(self, thinking: Thinking, inner: Grammar | None) -> None:
        self._tags, begins_within, self._budget = thinking
        self._num_thoughts = 0
        self._state = _State.THOUGHTS if begins_within else _State.START
        self._past: list[
            tuple[_State, bool]
        ] = []  # for each token: the state before it, and whether it is part of the answer
        self._grammar = inner
        self._inner = None if inner is None else inner.start()

    def accept(self, token_id: int) -> None:
        """Advance by a drawn token."""
        before = self._state
        self._state, is_answers = _next(before, token_id, self._tags)
        self._past.append((before, is_answers))
        self._num_thoughts += before is _State.THOUGHTS
        if is_answers and self._inner is not None:
            self._inner.accept(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        state, num_thoughts = self._state, self._num_thoughts
        for count, token_id in enumerate(token_ids):
            if state is _State.THOUGHTS:
                if self._is_spent(num_thoughts) and token_id != self._tags.closing:
                    return count
                num_thoughts += 1
            state, is_answers = _next(state, token_id, self._tags)
            if is_answers and self._inner is not None:
                return count + self._inner.count_allowed(token_ids[count:])
        return len(token_ids)

    def rollback(self, count: int) -> None:
        undone = self._past[-count:]
        del self._past[-count:]
        self._state = undone[0][0]
        self._num_thoughts -= sum(before is _State.THOUGHTS for before, _ in undone)
        num_inner = sum(is_answers for _, is_answers in undone)
        if num_inner and self._inner is not None:
            self._inner.rollback(num_inner)

    def is_complete(self) -> bool:
        return self._state is _State.ANSWER and self._inner is not None and self._inner.is_complete()

    def error(self) -> str | None:
        """Return the inner grammar's error; counting cannot fail."""
        return None if self._inner is None else self._inner.error()

    def _is_spent(self, num_thoughts: int) -> bool:
        return self._budget is not None and num_thoughts >= self._budget

    def fill_mask(self, address: int, num_words: int) -> None:
        """Write the tokens that may come next; see Grammar.fill_masks."""
        is_thinking = self._state is _State.THOUGHTS
        if is_thinking and self._is_spent(self._num_thoughts):
            ctypes.memset(address, 0, num_words * _WORD_BYTES)
            _allow(address, self._tags.closing)
        elif is_thinking or self._grammar is None or self._inner is None:
            ctypes.memset(address, 0xFF, num_words * _WORD_BYTES)
        else:
            self._grammar.fill_masks([self._inner], address, num_words)
            if self._state is _State.START:
                _allow(address, self._tags.opening)


class ThinkingGrammar:
    """A grammar of thoughts and an answer, from which matchers start."""

    def __init__(self, thinking: Thinking, *, inner: Grammar | None, end_ids: frozenset[int]) -> None:
        self._thinking = thinking
        self._inner = inner
        self.end_ids = end_ids

    def start(self) -> ThinkingMatcher:
        return ThinkingMatcher(self._thinking, self._inner)

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, ThinkingMatcher)
            matcher.fill_mask(address + row * num_words * _WORD_BYTES, num_words)


def _next(state: _State, token_id: int, tags: TagIds) -> tuple[_State, bool]:
    """Return the state after a token, and whether the token is part of the answer."""
    if state is _State.THOUGHTS:
        return (_State.ANSWER if token_id == tags.closing else state), False
    if state is _State.START and token_id == tags.opening:
        return _State.THOUGHTS, False
    return _State.ANSWER, True


def _allow(address: int, token_id: int) -> None:
    word = ctypes.c_uint32.from_address(address + token_id // 32 * _WORD_BYTES)
    word.value |= 1 << token_id % 32
