"""Scheduling policies: the order of admission and of preemption.

A policy is one line of POLICIES. The scheduler makes two queues of the chosen policy. Background work waits in the second,
which is served when the first is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from engine.core.errors import ConfigError
from engine.core.queues.fair import FairQueue
from engine.core.queues.keyed import KeyedQueue, fcfs, priority

POLICIES: Mapping[str, Callable[[], KeyedQueue]] = {
    "fcfs": partial(KeyedQueue, fcfs),
    "priority": partial(KeyedQueue, priority),
    "fair": FairQueue,
}


def make_queue(policy: str) -> KeyedQueue:
    """Return an empty queue of a policy. Raises ConfigError for an unknown name."""
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; choose one of {', '.join(POLICIES)}.")
    return POLICIES[policy]()
