"""`loadtest sessions`: what its count finds in a log, and sessions against the app over invented tokens."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from loadtest.compare import PeerAsking
from loadtest.daemon import fake_daemon
from loadtest.sessions import Server, Session, Turn, common, count, drive


def turn(prompt: str, answer: str, start_s: float, cached: int, number: int = 0) -> Turn:
    return Turn(
        "a", 0, number, start_s, start_s + 1, 0.25 + start_s, cached, list(map(ord, prompt)), list(map(ord, answer))
    )


@pytest.mark.parametrize(
    ("one", "other", "expected"), [("", "a", 0), ("abc", "abd", 2), ("abc", "abcd", 3), ("b", "a", 0)]
)
def test_common_is_the_longest_equal_beginning(one: str, other: str, expected: int) -> None:
    assert common(list(map(ord, one)), list(map(ord, other))) == expected


def test_what_any_earlier_prompt_and_answer_begin_with_can_be_reused() -> None:
    turns = [
        turn("system, ask", "thought", 0, 0),
        turn("system, ask", "no", 0.5, 4),  # beside the first
        turn("system, ask, then", "", 2, 8, 1),  # leaves before the answer
        turn("system, asknot", "", 4, 13, 1),  # has the whole second answer, and one more was found
    ]
    whole = count(reversed(turns))
    assert whole == (4, 11 + 11 + 17 + 14, 11 + 13, 8 + 13, [0, 0, 0, 3], 1.5)
    assert count(turns, 1)[:4] == (2, 31, 24, 21)
    assert count([turn("again", "", at, 4) for at in (0, 2)]).reusable == 4, "the last token is always computed"


def test_sessions_reuse_all_that_their_prompts_have_in_common() -> None:
    sessions = [Session(number, 0.002) for number in range(3)]
    for session in sessions:
        session.num_turns = 5
    with fake_daemon("0.1") as daemon:
        turns = asyncio.run(drive(Server("quire", daemon.port, PeerAsking("fake", "chat")), sessions, 2))
    reuse = count(turns)
    assert reuse.num_turns == 15
    assert 0.5 * reuse.num_tokens < reuse.reusable < reuse.num_tokens
    assert reuse.recomputed[-1] < 16, "less than a block"
    for session in sessions:
        own = [each for each in turns if each.session == session.number]
        assert [each.number for each in own] == [*range(5)]
        assert all(len(after.prompt) > len(before.prompt) for before, after in pairwise(own))
    assert len({tuple(each.prompt[:10]) for each in turns}) == 1, "all begin with the same instructions"
