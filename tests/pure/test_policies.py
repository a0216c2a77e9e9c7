"""Policies as virtual arrival times: order, and the bound on how long anyone can be overtaken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.queues import POLICIES
from engine.core.queues.keyed import PRIORITY_STEP_S
from tests.pure.driver import Driver, config, request


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["early", "short", "urgent"]),
        ("priority", ["urgent", "early", "short"]),
    ],
)
def test_who_is_admitted_first(policy: str, order: list[str]) -> None:
    driver = Driver(config(policy=policy, max_num_seqs=1))
    driver.add(request("early", arrival_s=0.0, max_tokens=40))
    driver.add(request("short", arrival_s=0.1, max_tokens=2))
    driver.add(request("urgent", arrival_s=0.2, max_tokens=9, priority=-1))
    driver.drain()
    finished = sorted(driver.ends, key=lambda key: driver.scheduler.stats.steps)
    assert [key[0] for key in finished] == order
    driver.check_streams()


@given(st.floats(0, 1e6), st.integers(-5, 5), st.integers(1, 30), st.sampled_from(sorted(POLICIES)))
def test_nobody_waits_longer_than_its_handicap(arrival: float, level: int, max_tokens: int, policy: str) -> None:
    """Any request that comes later than the largest handicap stands behind: age always counts in the end."""
    old = request(arrival_s=arrival, priority=level, max_tokens=max_tokens)
    bound = PRIORITY_STEP_S * 10 + 1
    newcomer = request(arrival_s=arrival + bound, priority=-5, max_tokens=1)
    queue = POLICIES[policy]()
    assert queue.key(old) < queue.key(newcomer)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_deadline_moves_a_request_forward_within_a_bound(policy: str) -> None:
    queue = POLICIES[policy]()
    plain, late, soon, sooner = (
        queue.key(request(arrival_s=100.0, deadline_s=limit)) for limit in (None, 3600.0, 5.0, 0.5)
    )
    assert sooner < soon < plain == late
    assert plain - sooner <= PRIORITY_STEP_S
