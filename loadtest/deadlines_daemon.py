"""A burst with deadlines on a real daemon with the default model: what is in time, late or dropped, as its clients see it.

How many requests a second the daemon answers is measured first, with requests like those of the burst; then twice as many
as it can answer within their deadline come at once. Their lengths are known: `min_tokens` is `max_tokens`. A few rounds on
one daemon, each with prompts of its own. A deadline begins when the daemon has read a request, which for the last of such a
burst is a while after its client began: who is late by the daemon's own clock is told too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from loadtest.bench import Asking, first_model
from loadtest.client import Client, Target
from loadtest.daemon import daemon, get
from loadtest.workload import Job, Length, synthetic

PROMPT, OUTPUT = 100, 48  # tokens
OVERLOAD = 2.0  # times what can be answered within the deadline
ROUNDS = 3
_WARM_UPS = (1, 4, 8)  # at once
_RATED = 48  # the same, whose rate is what the daemon can do


class Answer(NamedTuple):
    """To one request: its HTTP status, and seconds until it was complete."""

    status: int
    seconds: float


@dataclass(frozen=True)
class Burst:
    """What became of one."""

    rate: float  # requests a second, without deadlines
    num: int
    in_time: int
    late: int
    broken: int  # of the late ones, by the daemon's own clock
    dropped: int  # HTTP 408
    failed: int  # in any other way
    slowest_s: float  # the slowest of those answered
    goodput: float  # those in time, of what can be answered within the deadline at that rate

    @classmethod
    def of(cls, answers: Sequence[Answer], deadline_s: float, rate: float, broken: int) -> Burst:
        """Count them."""
        times = [each.seconds for each in answers if each.status == 200]
        dropped = sum(each.status == 408 for each in answers)
        in_time = sum(seconds <= deadline_s for seconds in times)
        failed = len(answers) - len(times) - dropped
        slowest_s = max(times, default=0.0)
        goodput = in_time / (rate * deadline_s)
        return cls(rate, len(answers), in_time, len(times) - in_time, broken, dropped, failed, slowest_s, goodput)


def run(deadline_ms: int, report: Path | None) -> int:
    """Measure, print, write; 1 if a request failed other than by its deadline."""
    print("requests/s  burst  in time  late  by its own clock  dropped  failed  slowest  in time, of what can be")
    with daemon([]) as port:
        bursts = asyncio.run(_drive(port, deadline_ms))
    if report:
        asked = {"deadline_ms": deadline_ms, "prompt": PROMPT, "output": OUTPUT, "overload": OVERLOAD}
        document = {"asked": asked, "bursts": [asdict(each) for each in bursts]}
        report.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(each.failed for each in bursts) else 0


async def _drive(port: int, deadline_ms: int) -> list[Burst]:
    client, found = Client(Target.parse(f"http://127.0.0.1:{port}")), []
    try:
        asking = Asking(await first_model(client))
        for number in range(ROUNDS):
            jobs = iter(synthetic(20_000, prompt=Length(PROMPT, PROMPT), output=Length(OUTPUT, OUTPUT), seed=number))
            for num in _WARM_UPS:
                await _ask(client, asking, islice(jobs, num))
            begun = time.perf_counter()
            await _ask(client, asking, islice(jobs, _RATED))
            rate, deadline_s = _RATED / (time.perf_counter() - begun), deadline_ms / 1e3
            burst = islice(jobs, max(round(OVERLOAD * rate * deadline_s), 1))
            before = _count_broken(port)
            answers = await _ask(client, asking, burst, deadline_ms=deadline_ms)
            found.append(Burst.of(answers, deadline_s, rate, _count_broken(port) - before))
            _show(found[-1])
    finally:
        client.close()
    return found


def _count_broken(port: int) -> int:
    """Requests so far that were answered after their deadline, as the daemon counts them."""
    wanted = {"quire_requests_missed_targets_total": 1, "quire_requests_dropped_total": -1}
    samples = [each for family in text_string_to_metric_families(get(port, "/metrics")) for each in family.samples]
    found = [(each.name, each.value) for each in samples if "deadline" in each.labels.values() and each.name in wanted]
    assert len(found) == len(wanted), "the daemon's metrics have other names now"
    return round(sum([wanted[name] * value for name, value in found]))


async def _ask(client: Client, asking: Asking, jobs: Iterable[Job], **fields: int) -> list[Answer]:
    """All at once, each for an answer in one piece: one that is dropped has a status of its own."""

    async def one(job: Job) -> Answer:
        begun = time.perf_counter()
        status = await client.post(asking.path, asking.body(job) | {"stream": False, "stream_options": None} | fields)
        return Answer(status, time.perf_counter() - begun)

    return await asyncio.gather(*map(one, jobs))


def _show(burst: Burst) -> None:
    print(
        f"{burst.rate:>10.1f}{burst.num:>7}{burst.in_time:>9}{burst.late:>6}{burst.broken:>18}{burst.dropped:>9}{burst.failed:>8}"
        f"{burst.slowest_s:>7.2f} s{burst.goodput:>24.0%}",
        flush=True,
    )
