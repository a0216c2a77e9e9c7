"""Scheduling policies as sort keys: the smallest key runs first, preemption takes the largest.

A key is a *virtual arrival time* in seconds: the real arrival plus a handicap. Because every waiting request ages at
the same rate, "priority minus age" orders requests exactly as "arrival plus priority" does, so a key never changes
while a request waits, nothing is ever re-sorted, and no request can be overtaken for longer than its handicap: that
is the proof that priority and sjf do not starve; sjf's handicap is at most MAX_WORK_S, whatever was asked for. A new
policy is one function and one line in POLICIES.

A deadline moves a request forward, under every policy: the earlier it is, the further, by at most DEADLINE_S. So nothing
waits for longer because of deadlines than for requests that come within DEADLINE_S after it.

Background requests are the exception, on purpose: they stand behind all others, and among themselves as the policy says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.core.types import Request

PRIORITY_STEP_S = 10.0  # one level of priority outweighs this much waiting
TOKEN_STEP_S = 0.05  # sjf: one expected token of work outweighs this much waiting
MAX_WORK_S = 60.0  # ... and all of them no more than this
DEADLINE_S = 10.0  # the most that a deadline moves a request forward; one this far away moves it not at all
BACKGROUND_S = 1e12  # more than any other handicap and any wait; a double still tells 0.1 ms apart there

Policy = Callable[[Request, float], float]  # of a request, and how many tokens one of its answers is expected to have


def fcfs(request: Request, num_expected: float) -> float:  # noqa: ARG001 - a policy's parameters
    """First come, first served."""
    return request.arrival_s


def sjf(request: Request, num_expected: float) -> float:
    """Shortest job first: the prompt, and the answers that length_predictor.py expects."""
    work_s = TOKEN_STEP_S * (len(request.prompt) + request.params.num_sequences * num_expected)
    return request.arrival_s + min(work_s, MAX_WORK_S)


def priority(request: Request, num_expected: float) -> float:  # noqa: ARG001 - a policy's parameters
    """Lower `priority` first; a request gains one level for every PRIORITY_STEP_S it has waited."""
    return request.arrival_s + PRIORITY_STEP_S * request.priority


def sort_key(policy: Policy, request: Request, num_expected: float | None = None) -> float:
    """A request's key under a policy, behind all others for one of the background. None expects max_tokens."""
    num_expected = request.params.max_tokens if num_expected is None else num_expected
    key = policy(request, num_expected) + (BACKGROUND_S if request.is_background else 0.0)
    return key if request.deadline_s is None else key - max(DEADLINE_S - request.deadline_s, 0.0)


# `fair` shares between tenants, see fairness.py; what one tenant sends goes by priority.
POLICIES: Mapping[str, Policy] = {"fcfs": fcfs, "sjf": sjf, "priority": priority, "fair": priority}
