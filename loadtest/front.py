"""Measures HTTP alone: the real app over a runner that invents tokens.

Server and client run on different cores. If the client is busy all the time, it is the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from loadtest.arguments import positive_int
from loadtest.bench import Asking, closed_loop
from loadtest.client import Client, Target
from loadtest.daemon import Daemon, fake_daemon
from loadtest.errors import LoadtestError
from loadtest.output import save_json
from loadtest.workload import Job

TARGET_EVENTS_PER_S = 10_000


class FrontError(LoadtestError):
    """The measurement could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run; CPU time is of all threads of the server."""

    events: int
    seconds: float
    events_per_s: float
    cpu_us_per_event: float
    client_busy: float  # share of its core that the client used
    failed: int
    tokens_per_event: float


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def drive(server: Daemon, num_streams: int, num_tokens: int, endpoint: str) -> Figures:
    """Measure concurrent streams, after a warm-up."""
    client, pid = Client(Target.parse(server.url)), server.pid
    asking = Asking("fake", endpoint)
    jobs = [Job("hello", num_tokens)] * num_streams
    await closed_loop(client, asking, [Job("hello", 8)] * num_streams, num_streams)
    server_before, client_before, started = cpu_s(pid), time.process_time(), time.perf_counter()
    outcomes = await closed_loop(client, asking, jobs, num_streams)
    seconds = time.perf_counter() - started
    server_cpu, client_cpu = cpu_s(pid) - server_before, time.process_time() - client_before
    client.close()
    failed = [outcome.error for outcome in outcomes if outcome.error]
    events = sum(len(outcome.chunks) for outcome in outcomes)
    if not events:
        raise FrontError(f"no stream answered: {failed[0] if failed else 'they were empty'}.")
    tokens = sum(outcome.completion_tokens or 0 for outcome in outcomes)
    return Figures(
        events, seconds, events / seconds, server_cpu / events * 1e6, client_cpu / seconds, len(failed), tokens / events
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `front`."""
    parser.add_argument("--streams", type=positive_int, default=256, help="open at the same time; default %(default)s")
    parser.add_argument("--tokens", type=positive_int, default=256, help="events a stream; default %(default)s")
    parser.add_argument("--step-ms", type=float, default=5.0, help="time of a step; default %(default)s")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--json", type=Path, metavar="FILE")


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if a stream failed."""
    cores = sorted(os.sched_getaffinity(0))
    server_core = cores[-1] if len(cores) > 1 else None
    try:
        if server_core is not None:
            os.sched_setaffinity(0, {server_core})  # which the server inherits
        with fake_daemon(str(options.step_ms)) as server:
            if server_core is not None:
                os.sched_setaffinity(0, {cores[0]})
            found = asyncio.run(drive(server, options.streams, options.tokens, options.endpoint))
    finally:
        os.sched_setaffinity(0, cores)
    print(
        f"{found.events_per_s:,.0f} events/s   server {found.cpu_us_per_event:.1f} us/event   client busy "
        f"{found.client_busy:.0%}   {found.tokens_per_event:.2f} tokens/event   {found.failed} failed"
    )
    print(
        f"target {TARGET_EVENTS_PER_S:,} events/s: {'met' if found.events_per_s >= TARGET_EVENTS_PER_S else 'missed'}"
    )
    if server_core is None:
        print("server and client shared the only core, so both figures are too low.")
    save_json(options.json, found)
    return 1 if found.failed else 0
