"""Synthetic workloads, each from one seed: those that policies are compared on, and a plain one.

A workload is a function of how many requests, how many a second, and a random generator. Lengths are log-normal, as real
ones are: most are short, a few very long. Knows nothing of schedulers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from math import log
from typing import Any, NamedTuple

from loadtest.simulation.trace import TraceRequest, clipped

_MIN_TOKENS = 4


class Workload(NamedTuple):
    """A summary, a function that draws the rows, and a rate that keeps the default costs busy."""

    summary: str
    draw: Callable[[int, float, random.Random], list[TraceRequest]]
    rate: float  # requests a second
    num: int


def generate(name: str, *, num: int, rate: float | None, seed: int, max_model_len: int) -> list[TraceRequest]:
    """Return the requests of a workload in order of arrival, cut to the length of the model."""
    workload = WORKLOADS[name]
    rows = workload.draw(num, rate or workload.rate, random.Random(seed))
    return clipped(sorted(rows, key=lambda row: row.arrival_s), max_model_len)


def _length(rng: random.Random, median: float, spread: float) -> int:
    """Log-normal: two thirds are between median / e^spread and median * e^spread."""
    return max(int(rng.lognormvariate(log(median), spread)), _MIN_TOKENS)


def _arrivals(rng: random.Random, num: int, rate: float, shape: float = 1.0) -> list[float]:
    """Gamma-distributed gaps: shape 1 is a Poisson process, less comes in bursts. The first arrives at 0."""
    times, now = [], 0.0
    for _ in range(num):
        times.append(now)
        now += rng.gammavariate(shape, 1.0 / (rate * shape))
    return times


def _ask(rng: random.Random, arrival_s: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    """A request whose client allows more than it gets, as clients do: the next power of two, or four times as much."""
    allowed = (1 << output.bit_length()) * rng.choice((1, 2))
    return TraceRequest(arrival_s, prompt, output, allowed, **more)


def steady(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Poisson arrivals of short questions with answers of about their length."""
    return [_ask(rng, at, _length(rng, 120, 0.7), _length(rng, 100, 0.6)) for at in _arrivals(rng, num, rate)]


def bursty_chat(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Bursts of chats; each of eight tenants puts a system prompt of its own before what its users write."""
    prefixes = {f"app-{index}": rng.randrange(64, 320, 16) for index in range(8)}
    rows = []
    for at in _arrivals(rng, num, rate, shape=0.2):
        app = rng.choice(list(prefixes))
        prompt = prefixes[app] + _length(rng, 60, 0.8)
        shared = prefixes[app]
        output = _length(rng, 80, 0.7)
        rows.append(_ask(rng, at, prompt, output, prefix_group=app, prefix_tokens=shared, tenant=app))
    return rows


def long_documents(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """A document of thousands of tokens in every ten requests, among chats that should not feel it."""
    rows = []
    for at in _arrivals(rng, num, rate):
        if rng.random() < 0.1:
            rows.append(_ask(rng, at, _length(rng, 3000, 0.5), _length(rng, 80, 0.4), tenant="documents"))
        else:
            rows.append(_ask(rng, at, _length(rng, 80, 0.6), _length(rng, 80, 0.6), tenant="chat"))
    return rows


def greedy_tenant(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Five tenants ask steadily for a third of it all; a sixth sends the rest in three floods."""
    num_steady = num // 3
    times = _arrivals(rng, num_steady, rate / 3)
    rows = [
        _ask(rng, at, _length(rng, 100, 0.6), _length(rng, 80, 0.5), tenant=f"tenant-{rng.randint(1, 5)}")
        for at in times
    ]
    for index in range(num - num_steady):
        flood_s = times[-1] * (0.1 + 0.3 * (index % 3))
        rows.append(_ask(rng, flood_s, _length(rng, 150, 0.6), _length(rng, 120, 0.5), tenant="greedy"))
    return rows


def batch_and_interactive(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Half arrives at time 0 with priority 1; the other half are interactive users with priority 0."""
    batch = [
        _ask(rng, 0.0, _length(rng, 200, 0.5), _length(rng, 150, 0.4), tenant="batch", priority=1)
        for _ in range(num // 2)
    ]
    times = _arrivals(rng, num - len(batch), rate / 2)
    return batch + [_ask(rng, at, _length(rng, 80, 0.6), _length(rng, 80, 0.6), tenant="interactive") for at in times]


_ALLOWED = 1024  # of clients that all send the same max_tokens, which then says nothing


def _medians(rng: random.Random, num: int) -> list[float]:
    """Lengths from a word to a page, evenly spread over all sizes between, so that no seed has more work than another."""
    return rng.sample([4.0 * 150 ** ((index + 0.5) / num) for index in range(num)], num)


def templates(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Bursts of four tenants with six prompt templates each; a template's answers are alike."""
    kinds = [
        (f"tenant-{index % 4}", f"template-{index}", rng.randrange(48, 320), median)
        for index, median in enumerate(_medians(rng, 24))
    ]
    rows = []
    for at in _arrivals(rng, num, rate, shape=0.2):
        tenant, template, shared, median = rng.choice(kinds)
        prompt, output = shared + _length(rng, 40, 0.7), min(_length(rng, median, 0.35), _ALLOWED)
        rows.append(TraceRequest(at, prompt, output, _ALLOWED, template, shared, tenant))
    return rows


def apps(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Bursts of a dozen tenants, whose prompts share nothing; each is given answers of about its own length."""
    medians = {f"app-{index}": median for index, median in enumerate(_medians(rng, 12))}
    rows = []
    for at in _arrivals(rng, num, rate, shape=0.2):
        app = rng.choice(list(medians))
        output = min(_length(rng, medians[app], 0.5), _ALLOWED)
        rows.append(TraceRequest(at, _length(rng, 120, 0.7), output, _ALLOWED, tenant=app))
    return rows


def unpredictable(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Bursts of requests that differ only in the length of their answers, which cannot be predicted."""
    return [
        TraceRequest(at, _length(rng, 120, 0.2), min(_length(rng, 80, 1.1), _ALLOWED), _ALLOWED)
        for at in _arrivals(rng, num, rate, shape=0.2)
    ]


def long_answers(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Requests that all arrive together and have answers of about 500 tokens: full batches for a long time."""
    return [TraceRequest(index / rate, rng.randint(50, 500), rng.randint(300, 700), _ALLOWED) for index in range(num)]


def long_prompt(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Eight running streams and a short request at a time; in the middle a prompt of 7,000 tokens."""
    rows = [TraceRequest(0.0, 64, 4000, tenant="streams") for _ in range(8)]
    times = _arrivals(rng, num - 9, rate)
    rows.append(TraceRequest(times[-1] / 2, 7000, 1, tenant="long prompt"))
    return rows + [TraceRequest(at, 100, 1, tenant="short requests") for at in times]


def bursts_in_turns(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Two equal tenants; each sends twenty requests together, then leaves the next burst to the other."""
    rows = []
    for index in range(num):
        burst = index // 20
        prompt, output = _length(rng, 100, 0.3), _length(rng, 60, 0.3)
        rows.append(TraceRequest(20 * burst / rate, prompt, output, tenant=f"tenant-{burst % 2}"))
    return rows


def deadlines(num: int, rate: float, rng: random.Random) -> list[TraceRequest]:
    """Bursts in which a third of the clients gives 5 s for the whole answer, a third 20 s, and a third all day."""
    rows = []
    for at in _arrivals(rng, num, rate, shape=0.2):
        deadline_s = rng.choice((5.0, 20.0, 0.0))
        tenant = f"in {deadline_s:g} s" if deadline_s else "no deadline"
        rows.append(
            _ask(rng, at, _length(rng, 100, 0.6), _length(rng, 80, 0.5), tenant=tenant)._replace(deadline_s=deadline_s)
        )
    return rows


WORKLOADS: Mapping[str, Workload] = {
    "steady": Workload("Poisson arrivals of short questions", steady, 5.0, 600),
    "bursty-chat": Workload("bursts of chats behind eight system prompts", bursty_chat, 6.0, 600),
    "long-documents": Workload("one request in ten is a document of thousands of tokens", long_documents, 3.0, 400),
    "greedy-tenant": Workload("five steady tenants, and one that floods", greedy_tenant, 6.0, 600),
    "batch-interactive": Workload("a batch of jobs, and people beside it", batch_and_interactive, 5.0, 600),
    "templates": Workload("answers as long as their prompt's template has them", templates, 7.0, 1200),
    "apps": Workload("answers as long as their tenant's are", apps, 7.0, 1200),
    "long-answers": Workload("a crowd with answers of about 500 tokens", long_answers, 1000.0, 600),
    "long-prompt": Workload("streams and short requests beside a prompt of 7,000 tokens", long_prompt, 2.0, 129),
    "bursts-in-turns": Workload("equal tenants that burst in turns", bursts_in_turns, 12.0, 600),
    "deadlines": Workload("bursts with deadlines of 5 s, 20 s and none", deadlines, 11.0, 600),
    "unpredictable": Workload("answers of any length, and nothing tells", unpredictable, 7.0, 1200),
}
