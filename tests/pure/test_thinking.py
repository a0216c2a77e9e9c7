"""A budget of thoughts, token by token: what may come next, and when an inner grammar has its say."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import takewhile

import pytest

from engine.core.types import Matcher, TagIds, Thinking
from engine.text.grammars.thinking import ThinkingGrammar

OPEN, CLOSE, END, VOCAB = 7, 40, 2, 70
TAGS = TagIds(OPEN, CLOSE)


class Spell:
    """A grammar of one sequence of tokens."""

    end_ids = frozenset({END})

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)
        self.taken: list[int] = []
        self.wrong: str | None = None

    def start(self) -> Matcher:
        return Spell(*self.left)

    def accept(self, token_id: int) -> None:
        if token_id == self.left[0]:
            self.taken.append(self.left.pop(0))
        else:
            self.wrong = "no such word"

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        agreeing = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, self.left, strict=False))
        return sum(1 for _ in agreeing)

    def rollback(self, count: int) -> None:
        self.left = self.taken[-count:] + self.left
        del self.taken[-count:]

    def is_complete(self) -> bool:
        return not self.left

    def error(self) -> str | None:
        return self.wrong

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, Spell)
            words = (ctypes.c_uint32 * num_words).from_address(address + 4 * row * num_words)
            words[matcher.left[0] // 32] = 1 << matcher.left[0] % 32


def grammar(budget: int | None, *word: int, within: bool = False) -> ThinkingGrammar:
    inner = Spell(*word) if word else None
    return ThinkingGrammar(Thinking(TAGS, within, budget), inner=inner, end_ids=Spell.end_ids)


def allowed(made: ThinkingGrammar, *matchers: Matcher) -> list[set[int] | str]:
    """What each matcher allows; "all" for everything."""
    words = (ctypes.c_uint32 * (3 * len(matchers)))()
    made.fill_masks(matchers, ctypes.addressof(words), 3)
    masks = [{bit for bit in range(96) if words[3 * row + bit // 32] >> bit % 32 & 1} for row in range(len(matchers))]
    return ["all" if len(mask) == 96 else mask for mask in masks]


def walk(made: ThinkingGrammar, *tokens: int) -> list[set[int] | str]:
    """What is allowed before each token, and after the last."""
    matcher, seen = made.start(), []
    for token in tokens:
        seen += allowed(made, matcher)
        matcher.accept(token)
    return seen + allowed(made, matcher)


@pytest.mark.parametrize("within", [False, True])
def test_a_spent_budget_leaves_one_token(within: bool) -> None:
    begun = [] if within else [OPEN]
    free = ["all"] * len(begun)
    assert walk(grammar(2, within=within), *begun, 1, 1, CLOSE, 1) == [*free, "all", "all", {CLOSE}, "all", "all"]
    assert walk(grammar(0, within=within), *begun, CLOSE) == [*free, {CLOSE}, "all"]
    assert walk(grammar(2, within=within), *begun, CLOSE, 1, 1, 1) == ["all"] * (5 + len(begun))


def test_who_does_not_begin_with_thoughts_has_none() -> None:
    assert walk(grammar(0), 1, OPEN, 1) == ["all"] * 4


def test_an_inner_grammar_begins_behind_the_thoughts_or_at_once() -> None:
    assert walk(grammar(None, 3, 4), OPEN, 1, CLOSE, 3) == [{3, OPEN}, "all", "all", {3}, {4}]
    assert walk(grammar(None, 3, 4), 3) == [{3, OPEN}, {4}]
    assert walk(grammar(1, 3, within=True), 1, CLOSE) == ["all", {CLOSE}, {3}]


def test_completeness_and_faults_are_the_inner_ones() -> None:
    matcher = grammar(None, 3).start()
    for token, complete in ((OPEN, False), (CLOSE, False), (3, True)):
        matcher.accept(token)
        assert matcher.is_complete() is complete
    wrong = grammar(None, 3).start()
    wrong.accept(5)
    assert wrong.error() == "no such word"
    assert grammar(5).start().error() is None


def test_matchers_of_different_grammars_share_a_batch() -> None:
    first, second, third = grammar(0, within=True), grammar(None, 3, within=True), grammar(None, 4)
    matchers = [made.start() for made in (first, second, third)]
    matchers[1].accept(CLOSE)
    assert allowed(first, *matchers) == [{CLOSE}, {3}, {4, OPEN}]


@pytest.mark.parametrize("within", [False, True])
def test_tokens_are_foreseen_and_given_back(within: bool) -> None:
    """However long a run is taken in at once, every matcher afterwards is where one is that never took it in."""
    made = grammar(2, 3, 4, 5, within=within)
    run = [*([] if within else [OPEN]), 1, 1, CLOSE, 3, 4, 5]
    assert made.start().count_allowed([*run[:-1], 6]) == len(run) - 1
    assert made.start().count_allowed([*run[: run.index(CLOSE)], 1]) == run.index(CLOSE)  # the budget is spent
    for begin in range(len(run)):
        for end in range(begin + 1, len(run) + 1):
            matcher = made.start()
            for token in run[:begin]:
                matcher.accept(token)
            assert matcher.count_allowed(run[begin:end]) == end - begin
            for token in run[begin:end]:
                matcher.accept(token)
            matcher.rollback(end - begin)
            assert allowed(made, matcher) == [walk(made, *run[:begin])[-1]]
            assert matcher.count_allowed(run[begin:]) == len(run) - begin
