"""Synthetic workloads, each drawn from one seed.

Lengths are log-normal, as real ones are: most are short, a few very long.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import log
from typing import Any, NamedTuple

from loadtest.simulation.trace import TraceRequest, clipped
from loadtest.workload import arrival_times

_MIN_TOKENS = 4


class Workload(NamedTuple):
    """A function that draws requests, and a rate that keeps the default costs busy."""

    summary: str
    draw: Callable[[int, float, random.Random], list[TraceRequest]]
    rate: float  # requests a second
    num: int


def generate(name: str, *, num: int, rate: float | None, seed: int, max_model_len: int) -> list[TraceRequest]:
    """Return the requests of a workload, cut to the length of the model."""
    workload = WORKLOADS[name]
    rows = workload.draw(num, rate or workload.rate, random.Random(seed))
    return clipped(sorted(rows, key=lambda row: row.arrival_s), max_model_len)


def _length(rng: random.Random, median: float, spread: float) -> int:
    """Return a log-normal length; two thirds are within e^spread of the median."""
    return max(int(rng.lognormvariate(log(median), spread)), _MIN_TOKENS)


def _ask(rng: random.Random, arrival_s: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    """Return a request whose max_tokens is one to four times its answer."""
    allowed = (1 << output.bit_length()) * rng.choice((1, 2))
    return TraceRequest(arrival_s, prompt, output, allowed, **more)


def steady(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return Poisson arrivals of short questions with answers of about their length."""
    return [_ask(rng, at, _length(rng, 120, 0.7), _length(rng, 100, 0.6)) for at in arrival_times(rng, num, rate)]


def bursty_chat(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts of chats of eight tenants, each with a different system prompt."""
    prefixes = {f"app-{index}": rng.randrange(64, 320, 16) for index in range(8)}
    rows = []
    for at in arrival_times(rng, num, rate, 0.2):
        app = rng.choice(list(prefixes))
        prompt = prefixes[app] + _length(rng, 60, 0.8)
        shared = prefixes[app]
        output = _length(rng, 80, 0.7)
        rows.append(_ask(rng, at, prompt, output, prefix_group=app, prefix_tokens=shared, tenant=app))
    return rows


def long_documents(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return chats, and a document of thousands of tokens in every ten requests."""
    rows = []
    for at in arrival_times(rng, num, rate):
        if rng.random() < 0.1:
            rows.append(_ask(rng, at, _length(rng, 3000, 0.5), _length(rng, 80, 0.4), tenant="documents"))
        else:
            rows.append(_ask(rng, at, _length(rng, 80, 0.6), _length(rng, 80, 0.6), tenant="chat"))
    return rows


def greedy_tenant(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return five steady tenants, and one that sends two thirds in three floods."""
    num_steady = num // 3
    times = arrival_times(rng, num_steady, rate / 3)
    rows = [
        _ask(rng, at, _length(rng, 100, 0.6), _length(rng, 80, 0.5), tenant=f"tenant-{rng.randint(1, 5)}")
        for at in times
    ]
    for index in range(num - num_steady):
        flood_s = times[-1] * (0.1 + 0.3 * (index % 3))
        rows.append(_ask(rng, flood_s, _length(rng, 150, 0.6), _length(rng, 120, 0.5), tenant="greedy"))
    return rows


def batch_and_interactive(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return a batch of priority 1 at time 0, and users of priority 0."""
    batch = [
        _ask(rng, 0.0, _length(rng, 200, 0.5), _length(rng, 150, 0.4), tenant="batch", priority=1)
        for _ in range(num // 2)
    ]
    times = arrival_times(rng, num - len(batch), rate / 2)
    return batch + [_ask(rng, at, _length(rng, 80, 0.6), _length(rng, 80, 0.6), tenant="interactive") for at in times]


_ALLOWED = 1024  # the max_tokens of clients that all send the same


def _medians(rng: random.Random, num: int) -> list[float]:
    """Return lengths spread evenly from 4 to 600 tokens, for equal work."""
    return rng.sample([4.0 * 150 ** ((index + 0.5) / num) for index in range(num)], num)


def templates(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts of 24 templates; the answers of each have similar lengths."""
    kinds = [
        (f"tenant-{index % 4}", f"template-{index}", rng.randrange(48, 320), median)
        for index, median in enumerate(_medians(rng, 24))
    ]
    rows = []
    for at in arrival_times(rng, num, rate, 0.2):
        tenant, template, shared, median = rng.choice(kinds)
        prompt, output = shared + _length(rng, 40, 0.7), min(_length(rng, median, 0.35), _ALLOWED)
        rows.append(TraceRequest(at, prompt, output, _ALLOWED, template, shared, tenant))
    return rows


def unpredictable(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts of similar requests with answers of unpredictable length."""
    return [
        TraceRequest(at, _length(rng, 120, 0.2), min(_length(rng, 80, 1.1), _ALLOWED), _ALLOWED)
        for at in arrival_times(rng, num, rate, 0.2)
    ]


def long_answers(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return requests that arrive together and have answers of about 500 tokens."""
    return [TraceRequest(index / rate, rng.randint(50, 500), rng.randint(300, 700), _ALLOWED) for index in range(num)]


def long_prompt(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return eight streams, short requests, and a prompt of 7,000 tokens."""
    rows = [TraceRequest(0.0, 64, 4000, tenant="streams") for _ in range(8)]
    times = arrival_times(rng, num - 9, rate)
    rows.append(TraceRequest(times[-1] / 2, 7000, 1, tenant="long prompt"))
    return rows + [TraceRequest(at, 100, 1, tenant="short requests") for at in times]


def bursts_in_turns(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts of twenty requests, from two equal tenants in turns."""
    rows = []
    for index in range(num):
        burst = index // 20
        prompt, output = _length(rng, 100, 0.3), _length(rng, 60, 0.3)
        rows.append(TraceRequest(20 * burst / rate, prompt, output, tenant=f"tenant-{burst % 2}"))
    return rows


def deadlines(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return bursts with deadlines of 5 s, 20 s and none."""
    rows = []
    for at in arrival_times(rng, num, rate, 0.2):
        deadline_s = rng.choice((5.0, 20.0, 0.0))
        tenant = f"in {deadline_s:g} s" if deadline_s else "no deadline"
        rows.append(
            _ask(rng, at, _length(rng, 100, 0.6), _length(rng, 80, 0.5), tenant=tenant)._replace(deadline_s=deadline_s)
        )
    return rows


def shared_prefixes(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Return short questions after one of 23 prefixes, which fill a pool of 512 blocks of 16 tokens 1.7 times."""
    return [
        TraceRequest(at, 632, 8, prefix_group=f"prefix-{rng.randrange(23)}", prefix_tokens=608)
        for at in arrival_times(rng, num, rate)
    ]


WORKLOADS: Mapping[str, Workload] = {
    "steady": Workload("Poisson arrivals of short questions", steady, 5.0, 600),
    "bursty-chat": Workload("bursts of chats behind eight system prompts", bursty_chat, 6.0, 600),
    "long-documents": Workload("one request in ten is a document of thousands of tokens", long_documents, 3.0, 400),
    "greedy-tenant": Workload("five steady tenants, and one that floods", greedy_tenant, 6.0, 600),
    "batch-interactive": Workload("a batch of jobs, and people beside it", batch_and_interactive, 5.0, 600),
    "templates": Workload("lengths of answers follow from the prompt template", templates, 7.0, 1200),
    "long-answers": Workload("many concurrent answers of about 500 tokens", long_answers, 1000.0, 600),
    "long-prompt": Workload("streams and short requests beside a prompt of 7,000 tokens", long_prompt, 2.0, 129),
    "bursts-in-turns": Workload("equal tenants that burst in turns", bursts_in_turns, 12.0, 600),
    "deadlines": Workload("bursts with deadlines of 5 s, 20 s and none", deadlines, 11.0, 600),
    "shared-prefixes": Workload("short questions after 23 long prefixes", shared_prefixes, 5.0, 200),
    "unpredictable": Workload("answers of unpredictable length", unpredictable, 7.0, 1200),
}
