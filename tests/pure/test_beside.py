"""`loadtest beside`: which gaps count as alone, and which as beside the long prompt."""

from __future__ import annotations

import pytest

from loadtest.beside import Figures, split_gaps


def test_gaps_are_split_at_the_long_prompt() -> None:
    stream = [0.0, 1.0, 2.0, 3.5, 5.0, 7.0, 8.0]
    alone, beside = split_gaps([stream, [4.0, 4.5]], begun=1.0, sent=3.0, first=7.0)
    assert alone == [1.0, 1.0]  # 0 to 1 was before the beginning, 2 to 3.5 straddles the sending
    assert beside == [1.5, 2.0, 0.5]


def test_the_ratio_is_of_the_gaps_beside_to_those_alone() -> None:
    assert Figures(10.0, 15.0, 40.0, 50.0, 60.0, 7000.0).gap_ratio == pytest.approx(1.5)
