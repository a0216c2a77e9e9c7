"""The burst of `python -m loadtest deadlines --daemon`, counted."""

from __future__ import annotations

from loadtest.deadlines_daemon import Answer, Burst


def test_what_became_of_a_burst_is_counted_by_its_clients_clock() -> None:
    answers = [Answer(200, 2.0), Answer(200, 1.0), Answer(200, 2.5), Answer(408, 0.1), Answer(429, 3.0)]
    found = Burst.of(answers, deadline_s=2.0, rate=2.0, broken=0)
    assert found == Burst(rate=2.0, num=5, in_time=2, late=1, broken=0, dropped=1, failed=1, slowest_s=2.5, goodput=0.5)
