"""The causes of misses: what the engine found of random prompts, and what earlier prompts would have let it find."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.chat.history import Forks, Owner, RecentPrompt, RecentPrompts
from server.telemetry.prefix_ends import Cause, prefix_end
from tests.pure.driver import Driver, config, request

ANN, OTHER = Owner("ann"), Owner("ann", salt="s")
SIZE = 4
# Conversations over few tokens, so that many begin alike.
PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=30)), min_size=2, max_size=8)


def add(recent: RecentPrompts, owner: Owner, ids: Sequence[int]) -> tuple[RecentPrompt, Forks]:
    """Remember a prompt, as of a request that the engine takes."""
    prompt, forks = recent.compare(owner, ids)
    recent.add(prompt, forks.own)
    return prompt, forks


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), min(len(one), len(other))
    )


@pytest.mark.parametrize("groups", [{}, {"windows": (5,)}, {"state_blocks": 2}, {"windows": (5,), "state_blocks": 1}])
@settings(max_examples=40)
@given(prompts=PROMPTS, num_blocks=st.sampled_from([34, 400]))
def test_a_cause_is_what_the_engine_lacked_of_the_longest_common_prefix(
    groups: dict[str, Any], num_blocks: int, prompts: list[tuple[int, list[int]]]
) -> None:
    """A prompt may begin with an earlier one and its answer. Nothing is evicted from the large pool."""
    driver, recent = Driver(config(num_blocks=num_blocks, max_model_len=100, **groups)), RecentPrompts(SIZE)
    said: list[tuple[int, ...]] = [()]
    for number, (back, own) in enumerate(prompts):
        ids = (*said[-1 - back % len(said)][:50], *own, 2)
        prompt, forks = add(recent, ANN, ids)
        longest = max(num_common(ids, each) for each in said)
        assert (0 if forks.own is None else forks.own.num_common) in range(longest - SIZE + 1, longest + 1)
        name = str(number)
        driver.add(request(name, ids, max_tokens=9, eos_token_ids=frozenset()))
        driver.drain()
        info = driver.prompts[name, 0]
        computed = driver.streams[name, 0][:-1]
        said.append((*ids, *computed))
        recent.answer(prompt, computed)
        turn: Any = SimpleNamespace(history=SimpleNamespace(prompts=recent), prompt=prompt, forks=forks)
        end = prefix_end(turn, info, request().params)
        reusable = min(longest, len(ids) - 1) // SIZE * SIZE
        assert info.num_cached_tokens <= info.num_matched_tokens <= reusable
        lacks_blocks, lacks_states = (
            info.num_matched_tokens < reusable,
            info.num_cached_tokens < info.num_matched_tokens,
        )
        if len(ids) <= SIZE:
            assert end.cause is Cause.SHORT
        else:
            assert (end.cause is Cause.NO_STATE) == lacks_states
            assert (end.cause is Cause.EVICTED) == (lacks_blocks and not lacks_states)
        assert not (lacks_blocks and num_blocks == 400)
        assert not (lacks_states and not groups)
        if end.cause in (Cause.NEW, Cause.BROKEN, Cause.ANSWER, Cause.EXTENDED):
            assert end.position in range(longest - SIZE + 1, longest + 1)
    driver.check_streams()


def test_an_edit_is_told_from_another_conversation_that_begins_alike() -> None:
    recent = RecentPrompts(SIZE)
    begin, rest = tuple(range(20)), tuple(range(100, 150))
    mine, _ = add(recent, ANN, (*begin, 1, *rest))
    add(recent, ANN, (*begin, 2, *range(200, 250)))
    add(recent, OTHER, (*begin, 3, *rest, 9))
    _, forks = add(recent, ANN, (*begin, 3, *rest, 9, 9))
    assert forks.own is not None
    assert (forks.own.earlier, forks.own.num_common, forks.own.is_edit) == (mine, 20, True)
    assert forks.other is not None
    assert forks.other.num_common == 72
    _, forks = add(recent, ANN, (*begin, 4, *range(300, 350)))
    assert forks.own is not None
    assert not forks.own.is_edit
    assert add(recent, Owner("bob"), begin)[1] == (None, None)


def test_a_prompt_is_forgotten_once_its_answer_has_come_back() -> None:
    recent = RecentPrompts(SIZE)
    first, _ = add(recent, ANN, range(10))
    first.turn_end = 8  # two tokens open the answer
    second, forks = add(recent, ANN, (*range(8), *range(20, 30)))
    assert (len(first.ids), forks.own) == (40, forks.own)  # its answer is not there yet
    recent.answer(first, range(50, 60))
    changed, _ = add(recent, ANN, (*range(10), 50, 51))
    assert first.ids
    third, forks = add(recent, ANN, (*range(10), *range(50, 60), 70))
    assert forks.own is not None
    assert (forks.own.earlier, forks.own.num_common, first.ids) == (first, 20, b"")
    assert [*recent._order] == [second, changed, third]


def test_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentPrompts(SIZE)
    first, _ = add(recent, ANN, range(10))
    monkeypatch.setattr("engine.text.chat.history.MAX_BYTES", 100)
    second, _ = add(recent, Owner("bob"), range(10))
    assert (first.ids, add(recent, ANN, range(10))[1].own) != (b"", None)
    assert (first.ids, len(second.ids)) == (b"", 40)
    recent.answer(second, range(10))  # its prompt is the oldest now
    recent.answer(first, range(10))
    assert (first.ids, second.ids, first.is_answered) == (b"", b"", True)
    monkeypatch.setattr("engine.text.chat.history.MAX_PROMPTS", 1)
    add(recent, ANN, (1,))
    assert [len(each.ids) for each in recent._order] == [4]
    assert recent._num_bytes == 4
