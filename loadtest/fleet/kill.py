"""Kills a daemon of a fleet under load, starts it again, and counts what clients lost."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.bench import Asking
from loadtest.client import Client, Outcome, Target
from loadtest.daemon import samples, total
from loadtest.fleet.daemons import Fleet, Sizes, fleet
from loadtest.fleet.load import Load, draw
from loadtest.fleet.routers import Routing
from loadtest.fleet.runs import answered
from loadtest.output import print_table

_BEFORE_S = 3.0  # of load until the kill
_DOWN_S = 3.0  # until the daemon is started again
_LIMIT_S = 90.0  # for the router to find it
_AFTER_S = 3.0  # of load once it is found
_LOAD = Load(num_requests=4000, num_prefixes=0, prefix_words=32, own_words=8, max_tokens=48)


class Story(NamedTuple):
    """What happened, in seconds of the clock of the outcomes."""

    killed_s: float
    ready_s: float  # the daemon answers again
    found_s: float  # the router has sent it a request; 0.0: it did not
    num_open: int  # requests that the daemon was answering when it was killed
    outcomes: Sequence[Outcome]
    num_wrong: int  # requests that the other daemons ended with an error or an abort


def kill_and_return(routing: Routing, sizes: Sizes, num: int, num_clients: int, folder: Path) -> int:
    """Run, print; 1 if a stream was lost that the daemon did not have, or it was not found again."""
    with fleet(routing, sizes, num, folder) as found:
        story = asyncio.run(_story(found, num_clients))
    failed = [outcome for outcome in story.outcomes if outcome.error]
    late = [outcome for outcome in failed if outcome.start_s > story.killed_s]
    print_table(
        ("router", "requests", "open at the kill", "streams lost", "refused after it", "ready after s", "found after s"),
        [(
            routing.name, len(story.outcomes), story.num_open, len(failed) - len(late), len(late),
            f"{story.ready_s - story.killed_s:.1f}", f"{story.found_s - story.ready_s:.1f}" if story.found_s else "never",
        )],
    )  # fmt: skip
    for error in dict.fromkeys(outcome.error for outcome in failed):
        print(f"{sum(outcome.error == error for outcome in failed)} x {error}")
    print(f"Requests that the other daemons ended with an error or an abort: {story.num_wrong}.")
    return int(len(failed) - len(late) > story.num_open or story.num_wrong > 0 or not story.found_s)


async def _story(found: Fleet, num_clients: int) -> Story:
    """Kill the first daemon under load and start it again."""
    client = Client(Target.local(found.port), timeout_s=60.0)
    asking, prompts, outcomes = Asking(found.model, "chat"), iter(draw(_LOAD, 1)), list[Outcome]()
    is_over = asyncio.Event()

    async def worker() -> None:
        for prompt in prompts:
            if is_over.is_set():
                return
            outcomes.append(await client.stream(asking.path, asking.body(prompt.job)))
            if outcomes[-1].error:
                await asyncio.sleep(0.05)

    workers = [asyncio.create_task(worker()) for _ in range(num_clients)]
    victim = found.members[0]
    await asyncio.sleep(_BEFORE_S)
    num_open = await asyncio.to_thread(_num_open, victim.port)
    killed_s = time.perf_counter()
    os.kill(victim.process.pid, signal.SIGKILL)
    await asyncio.sleep(_DOWN_S)
    victim.start_again()  # here: stopping what is left of it sets a signal handler
    await asyncio.to_thread(victim.wait_ready)
    ready_s, found_s, base = time.perf_counter(), 0.0, await asyncio.to_thread(answered, victim.port)
    while not found_s and time.perf_counter() < ready_s + _LIMIT_S:
        await asyncio.sleep(0.1)
        if await asyncio.to_thread(answered, victim.port) > base:
            found_s = time.perf_counter()
    await asyncio.sleep(_AFTER_S)
    is_over.set()
    await asyncio.gather(*workers)
    client.close()
    num_wrong = sum([await asyncio.to_thread(_num_wrong, member.port) for member in found.members[1:]])
    return Story(killed_s, ready_s, found_s, num_open, outcomes, num_wrong)


def _num_open(port: int) -> int:
    return total(port, "quire_num_requests_running") + total(port, "quire_num_requests_waiting")


def _num_wrong(port: int) -> int:
    good = 'reason="stop"', 'reason="length"'
    ended = samples(port, "quire_requests_finished_total")
    return int(sum(value for labels, value in ended if not any(each in labels for each in good)))
