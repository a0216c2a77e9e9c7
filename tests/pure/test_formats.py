"""The figures of `tools formats`: rates while all answers run, and the row of a format. No server is started."""

from __future__ import annotations

import pytest

from loadtest.client import ClientError, Outcome
from loadtest.comparison import QUIRE
from tools.formats import Row, _cells, _head, decode_rate


def answer(first_s: float, gap_s: float, num: int, tokens: int | None = None) -> Outcome:
    return Outcome(0.0, chunks=[first_s + gap_s * i for i in range(num)], completion_tokens=tokens or num)


def test_the_rate_is_of_the_time_in_which_all_answers_run() -> None:
    assert decode_rate([answer(5.0, 0.1, 11)]) == pytest.approx(10)
    late = [answer(1.0, 0.1, 41), answer(3.0, 0.1, 41)]  # together from 3 to 5 s
    assert decode_rate(late) == pytest.approx(20, rel=0.06)


def test_a_chunk_may_carry_several_tokens() -> None:
    assert decode_rate([answer(5.0, 0.1, 11, tokens=22)]) == pytest.approx(20)


def test_answers_that_never_ran_together_have_no_rate() -> None:
    with pytest.raises(ClientError, match="at the same time"):
        decode_rate([answer(0.0, 0.1, 3), answer(9.0, 0.1, 3)])


def test_a_row_has_ratios_of_rounds_only_beside_a_peer() -> None:
    rates = {QUIRE: {1: [20.0, 30.0, 10.0], 8: [80.0] * 3}, "llama-server": {1: [10.0, 10.0, 10.0], 8: [40.0] * 3}}
    row = Row("q4_0", 10**9, {QUIRE: 2.0, "llama-server": 1.0}, {QUIRE: 2 * 10**9, "llama-server": 10**9}, rates)
    both = ["q4_0", "1.00", "20.0", "2.00", "80.0", "2.00", "2.00", "1.00", "2.00", "1.00"]
    assert _cells(row) == both
    alone = row._replace(ready_s={QUIRE: 2.0}, peak_bytes={QUIRE: 10**9}, rates={QUIRE: rates[QUIRE]})
    assert _cells(alone) == ["q4_0", "1.00", "20.0", "-", "80.0", "-", "2.00", "-", "1.00", "-"]


def test_a_server_that_fails_leaves_a_row_with_its_sentence() -> None:
    cells = _cells(Row("q4_0", 10**9, {}, {}, {QUIRE: {1: [], 8: []}}, error="it died.\nlog"))
    assert cells[:3] == ["q4_0", "1.00", "it died."]
    assert len(cells) == len(_head((1, 8)))
