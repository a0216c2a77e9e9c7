"""Sends hostile and heavy bodies to a daemon, and measures its /health probes and a running stream.

Probes have a fixed schedule, so that a stall delays all that are due in it. The clients that send bodies run in another
process, whose work delays no probe. Without --base-url the daemon is loadtest/fake_server.py: the real front over invented
tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.client import Target
from loadtest.daemon import fake_daemon
from loadtest.output import print_table, save_json
from loadtest.peers.process import rss_bytes
from loadtest.report import percentile

MOST_MS = 50.0  # by which the p99 of /health may rise
PROBE_EVERY_S = 0.01
TIMEOUT_S = 300.0
MIB = 1 << 20
BURST = 400

CHAT, COMPLETIONS, RESPONSES, MESSAGES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

_ECHO = {"prompt": [*range(1000, 9000)], "max_tokens": 1, "echo": True, "logprobs": 5}


@dataclass(frozen=True, slots=True)
class Case:
    """A body, and the number of clients that send it: repeatedly, or once in a burst."""

    name: str
    path: str
    make: Callable[[], bytes]
    num_clients: int = 1
    is_burst: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of a case: milliseconds of /health and between a stream's events, and growth in MiB."""

    name: str
    body_mib: float
    statuses: dict[str, int]
    p50_ms: float
    p99_ms: float
    max_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    slowest_s: float
    growth_mib: float


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chat(**fields: Any) -> bytes:
    return _json({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields})


def _inserted(name: str, item: bytes, num: int, around: bytes = b"[]") -> bytes:
    """Return a chat with one more field, a list or object of many items."""
    items = b",".join(item % index if b"%d" in item else item for index in range(num))
    return _chat()[:-1] + b',"%s":%s%s%s}' % (name.encode(), around[:1], items, around[1:])


def _messages(num: int, content: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if index % 2 else "user", "content": content} for index in range(num)]


def _tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def cases() -> Sequence[Case]:
    """Return every kind of body that has delayed a daemon, or might."""
    text = "The quick brown fox, " * 50
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(10_000)}}
    regex = {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}, "max_tokens": 4}
    return (
        Case("1 MB of integers as messages", CHAT, lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 500_000)),
        Case("30 MB of integers as messages", CHAT, lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 15_000_000), 2),
        Case("100,000 brackets", CHAT, lambda: b'{"messages":' + b"[" * 100_000),
        Case("250 kB of integers as messages", CHAT, lambda: b'{"messages":[%s]}' % b",".join([b"1"] * 125_000), 4),
        Case("250 kB of tiny messages", CHAT, lambda: _json({"messages": _messages(7_500, "x")}), 4),
        Case("a million unknown fields", CHAT, lambda: _chat()[:-1] + b"," + _fields(1_000_000) + b"}"),
        Case("a thousand unknown fields", CHAT, lambda: _chat()[:-1] + b"," + _fields(1_000) + b"}"),
        Case("a million biases", CHAT, lambda: _inserted("logit_bias", b'"%d":1', 1_000_000, b"{}")),
        Case("100,000 biases", CHAT, lambda: _inserted("logit_bias", b'"%d":1', 100_000, b"{}")),
        Case("a million stops", CHAT, lambda: _inserted("stop", b'"a"', 1_000_000)),
        Case("a million pairs of metadata", CHAT, lambda: _inserted("metadata", b'"k%d":"v"', 1_000_000, b"{}")),
        Case("12 MB of messages of 1 kB", CHAT, lambda: _json({"messages": _messages(11_000, text)})),
        Case("12 MB of tiny messages", CHAT, lambda: _json({"messages": _messages(400_000, "x")})),
        Case("20,000 tiny messages", CHAT, lambda: _json({"messages": _messages(20_000, "x")})),
        Case("30 MB in one message", CHAT, lambda: _chat(messages=_messages(1, text * 30_000)), 2),
        Case("a message of 300,000 parts", CHAT, lambda: _chat(messages=[_parts(300_000)])),
        Case("a message of 8,000 parts", CHAT, lambda: _chat(messages=[_parts(8_000)])),
        Case("a tool of 10,000 properties", CHAT, lambda: _chat(tools=[_tool(wide)])),
        Case("a strict tool, nested 60 deep", CHAT, lambda: _chat(tools=[_tool(_nested(60))])),
        Case("12 MB of responses' items", RESPONSES, lambda: _json({"input": _messages(11_000, text)})),
        Case(
            "12 MB of Anthropic's messages",
            MESSAGES,
            lambda: _json({"max_tokens": 1, "messages": _messages(11_000, text)}),
        ),
        Case("30 MB of instructions", RESPONSES, lambda: _json({"input": "x", "instructions": text * 30_000})),
        Case("900,000 token ids", COMPLETIONS, lambda: _json({"prompt": list(range(900_000)), "max_tokens": 1})),
        Case("1,000 prompts of 900 ids", COMPLETIONS, lambda: _json({"prompt": [[7] * 900] * 1000, "max_tokens": 1})),
        Case("1,000 choices", COMPLETIONS, lambda: _json({"prompt": ["x"] * 1000, "max_tokens": 64, "logprobs": 5})),
        Case("8,000 ids echoed with logprobs", COMPLETIONS, lambda: _json(_ECHO)),
        Case("2,000 inputs of 400 ids", "/v1/embeddings", lambda: _json({"input": [[7] * 400] * 2000})),
        Case("a prompt of 30 MB", "/tokenize", lambda: _json({"prompt": text * 30_000})),
        Case(
            "a prompt of 200 kB, spelled", "/tokenize", lambda: _json({"prompt": text * 200, "return_token_strs": True})
        ),
        Case("900,000 ids to spell", "/detokenize", lambda: _json({"tokens": [7] * 900_000})),
        Case(
            "2,000 texts of 100 B to score", "/v1/score", lambda: _json({"text_1": "x", "text_2": [text[:100]] * 2000})
        ),
        Case("a regex of a billion", COMPLETIONS, lambda: _json({"prompt": "x", **regex})),
        *_crowds("1,000 new fields, 9 kB", CHAT, lambda: _chat()[:-1] + b"," + _fields(1_000) + b"}"),
        *_crowds("10,000 token ids, 60 kB", COMPLETIONS, lambda: _json({"prompt": [*range(20_000, 30_000)]})),
        *_crowds("30,001 token ids, 60 kB", COMPLETIONS, lambda: _json({"prompt": [7] * 30_001})),
        *_crowds("a short chat", CHAT, _chat),
    )


def _crowds(name: str, path: str, make: Callable[[], bytes]) -> Iterator[Case]:
    """Yield a small body's cases: from several clients, and from many once."""
    for num_clients in (8, 32, 128):
        yield Case(f"{name}, {num_clients} clients", path, make, num_clients)
    yield Case(f"{name}, a burst of {BURST}", path, make, BURST, is_burst=True)


def _fields(num: int) -> bytes:
    return b",".join(b'"u%d":1' % index for index in range(num))


def _parts(num: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "x"}] * num}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


WARM_UP = Case("warm-up", CHAT, lambda: _chat(messages=_messages(1, "x" * MIB)))


class Prober:
    """Probes /health on a fixed schedule, reads a stream, and measures the daemon's memory."""

    def __init__(self, target: Target, pid: int | None) -> None:
        self._target = target
        self._pid = pid
        self.delays_s: list[float] = []
        self.gaps_s: list[float] = []
        self.largest = 0
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def probing(self) -> Iterator[Prober]:
        """Probe until the context ends."""
        threads = [threading.Thread(target=work) for work in (self._probe, self._read_streams, self._weigh)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def row(self, name: str, num_bytes: int, statuses: dict[str, int], slowest_s: float, before: int) -> Row:
        """Return the figures of what was probed, beside those of the clients."""
        delays, gaps = sorted(self.delays_s), sorted(self.gaps_s)
        return Row(
            name,
            num_bytes / MIB,
            statuses,
            p50_ms=1e3 * percentile(delays, 0.5),
            p99_ms=1e3 * percentile(delays, 0.99),
            max_ms=1e3 * percentile(delays, 1),
            gap_p99_ms=1e3 * percentile(gaps, 0.99),
            gap_max_ms=1e3 * percentile(gaps, 1),
            slowest_s=slowest_s,
            growth_mib=max(self.largest - before, 0) / MIB,
        )

    def _weigh(self) -> None:
        while self._pid is not None and not self._is_over.wait(PROBE_EVERY_S):
            self.largest = max(self.largest, family_bytes(self._pid))

    def _probe(self) -> None:
        connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=TIMEOUT_S)
        due_s = time.perf_counter()
        while not self._is_over.is_set():
            connection.request("GET", self._target.prefix + "/health")
            connection.getresponse().read()
            now = time.perf_counter()
            while due_s <= now:  # all that were due during this one
                self.delays_s.append(now - due_s)
                due_s += PROBE_EVERY_S
            time.sleep(max(due_s - time.perf_counter(), 0))
        connection.close()

    def _read_streams(self) -> None:
        """Read one stream after another, and note the time between their events."""
        connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=TIMEOUT_S)
        body = _json({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True})
        while not self._is_over.is_set():
            connection.request("POST", self._target.prefix + COMPLETIONS, body, _headers(self._target))
            with connection.getresponse() as answer:
                before_s = 0.0
                while (line := answer.readline()) and not self._is_over.is_set():
                    if line.startswith(b"data:"):
                        now = time.perf_counter()
                        if before_s:
                            self.gaps_s.append(now - before_s)
                        before_s = now
        connection.close()


def family_bytes(pid: int) -> int:
    """Return the resident memory of a process and its direct children."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text(encoding="ascii").split())
    return sum(map(rss_bytes, pids))


def run_case(target: Target, pid: int | None, case: Case, seconds: float, clients: ProcessPoolExecutor) -> Row:
    """Send a case from all its clients for some seconds, or once in a burst."""
    body = case.make()
    before = family_bytes(pid) if pid is not None else 0
    prober = Prober(target, pid)
    with prober.probing():
        time.sleep(0.2)  # the stream has begun
        sending = clients.submit(send_all, target, case.path, body, case.num_clients, 0 if case.is_burst else seconds)
        outcomes = sending.result()
    statuses = dict(Counter(status for status, _ in outcomes))
    return prober.row(case.name, len(body), statuses, max(took_s for _, took_s in outcomes), before)


def send_all(target: Target, path: str, body: bytes, num_clients: int, seconds: float) -> list[tuple[str, float]]:
    """Return the status and the seconds of each answer, of all clients."""
    give_up_s = time.perf_counter() + seconds
    with ThreadPoolExecutor(num_clients) as threads:
        sending = [threads.submit(_send, target, path, body, give_up_s) for _ in range(num_clients)]
        return [outcome for each in sending for outcome in each.result()]


def _send(target: Target, path: str, body: bytes, give_up_s: float) -> list[tuple[str, float]]:
    """Return the status and the seconds of each answer."""
    outcomes: list[tuple[str, float]] = []
    while not outcomes or time.perf_counter() < give_up_s:
        started_s = time.perf_counter()
        connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", target.prefix + path, body, _headers(target))
            answer = connection.getresponse()
            answer.read()
            status = str(answer.status)
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        finally:
            connection.close()
        outcomes.append((status, time.perf_counter() - started_s))
    return outcomes


def _headers(target: Target) -> dict[str, str]:
    key = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return {"content-type": "application/json", **key}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hostile`."""
    parser.add_argument(
        "--base-url", metavar="URL", help="a running daemon; default: one of invented tokens is started"
    )
    parser.add_argument("--pid", type=int, help="of the running daemon, to measure its memory")
    parser.add_argument("--api-key", metavar="KEY", default="", help="sent as a bearer token")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each case is sent for; default %(default)s")
    parser.add_argument("--only", metavar="WORDS", default="", help="cases whose names have these words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure every case; return 1 if /health was late or a body caused a 500."""
    if options.base_url:
        return _run(Target.parse(options.base_url, options.api_key), options.pid, options)
    with fake_daemon("5") as server:
        return _run(Target.local(server.port), server.pid, options)


def _run(target: Target, pid: int | None, options: argparse.Namespace) -> int:
    rows = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        run_case(target, pid, WARM_UP, options.seconds, clients)  # the first large body starts the child
        prober = Prober(target, pid)
        with prober.probing():
            time.sleep(options.seconds)
        idle = prober.row("idle", 0, {}, 0.0, prober.largest)
        for case in cases():
            if options.only in case.name:
                print(case.name, flush=True)
                rows.append(run_case(target, pid, case, options.seconds, clients))
    _show([idle, *rows])
    late = [row.name for row in rows if max(row.p99_ms - idle.p99_ms, row.gap_p99_ms - idle.gap_p99_ms) > MOST_MS]
    broken = [row.name for row in rows if any(status == "500" or not status.isdecimal() for status in row.statuses)]
    print(
        f"/health and the stream's gap, p99 within {MOST_MS:.0f} ms of idle: {'yes' if not late else ', '.join(late)}"
    )
    if broken:
        print(f"answered by a 500, or not at all: {', '.join(broken)}")
    save_json(options.json, {"idle": idle, "cases": rows})
    return 1 if late or broken else 0


def _show(rows: Sequence[Row]) -> None:
    cells = []
    for row in rows:
        times = (row.p50_ms, row.p99_ms, row.max_ms, row.gap_p99_ms, row.gap_max_ms)
        delays = [f"{delay:.1f}" for delay in times]
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(row.statuses.items()))
        cells.append(
            (row.name, f"{row.body_mib:.1f}", *delays, f"{row.slowest_s:.2f}", f"{row.growth_mib:.0f}", answers)
        )
    print_table(
        ("case", "MiB", "/health p50 ms", "p99", "max", "gap p99", "max", "slowest s", "grew MiB", "answers"), cells
    )
