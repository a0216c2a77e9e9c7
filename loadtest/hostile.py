"""Sends hostile and heavy bodies to a daemon, and measures its /health probes.

Probes have a fixed schedule, so that a stall delays all that are due in it. Without --base-url the daemon is
loadtest/fake_server.py: the real front over invented tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)

_ECHO = {"prompt": [*range(1000, 9000)], "max_tokens": 1, "echo": True, "logprobs": 5}


@dataclass(frozen=True, slots=True)
class Case:
    """A body, and the number of clients that send it."""

    name: str
    path: str
    make: Callable[[], bytes]
    num_clients: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """The effect of a case: milliseconds of /health, and growth in MiB."""

    name: str
    body_mib: float
    statuses: dict[str, int]
    p50_ms: float
    p99_ms: float
    max_ms: float
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
    )


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
    """Probes /health on a fixed schedule, and measures the daemon's memory."""

    def __init__(self, target: Target, pid: int | None) -> None:
        self._target = target
        self._pid = pid
        self.delays_s: list[float] = []
        self.largest = 0
        self._is_over = threading.Event()

    @contextlib.contextmanager
    def probing(self) -> Iterator[Prober]:
        """Probe until the context ends."""
        threads = [threading.Thread(target=self._probe), threading.Thread(target=self._weigh)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def ms(self, share: float) -> float:
        """Return a quantile of the delays."""
        return 1e3 * percentile(sorted(self.delays_s), share)

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


def family_bytes(pid: int) -> int:
    """Return the resident memory of a process and its direct children."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            pids += map(int, (task / "children").read_text(encoding="ascii").split())
    return sum(map(rss_bytes, pids))


def run_case(target: Target, pid: int | None, case: Case, seconds: float) -> Row:
    """Send a case from all its clients for some seconds."""
    body = case.make()
    statuses: dict[str, int] = {}
    slowest_s = 0.0
    before = family_bytes(pid) if pid is not None else 0
    prober = Prober(target, pid)
    with prober.probing(), ThreadPoolExecutor(case.num_clients) as clients:
        give_up_s = time.perf_counter() + seconds
        sending = [clients.submit(_send, target, case.path, body, give_up_s) for _ in range(case.num_clients)]
        for status, took_s in (outcome for each in sending for outcome in each.result()):
            statuses[status] = statuses.get(status, 0) + 1
            slowest_s = max(slowest_s, took_s)
    growth = max(prober.largest - before, 0) / MIB
    return Row(case.name, len(body) / MIB, statuses, prober.ms(0.5), prober.ms(0.99), prober.ms(1), slowest_s, growth)


def _send(target: Target, path: str, body: bytes, give_up_s: float) -> list[tuple[str, float]]:
    """Return the status and the seconds of each answer."""
    outcomes: list[tuple[str, float]] = []
    headers = {"content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    while not outcomes or time.perf_counter() < give_up_s:
        started_s = time.perf_counter()
        connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", target.prefix + path, body, headers)
            answer = connection.getresponse()
            answer.read()
            status = str(answer.status)
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        finally:
            connection.close()
        outcomes.append((status, time.perf_counter() - started_s))
    return outcomes


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
        return _run(Target.parse(server.url), server.pid, options)


def _run(target: Target, pid: int | None, options: argparse.Namespace) -> int:
    run_case(target, pid, WARM_UP, max(options.seconds, 2.0))  # the first large body starts the child
    prober = Prober(target, pid)
    with prober.probing():
        time.sleep(max(options.seconds, 1.0))
    idle = Row("idle", 0.0, {}, prober.ms(0.5), prober.ms(0.99), prober.ms(1), 0.0, 0.0)
    rows = []
    for case in cases():
        if options.only in case.name:
            print(case.name, flush=True)
            rows.append(run_case(target, pid, case, options.seconds))
    _show([idle, *rows])
    late = [row.name for row in rows if row.p99_ms > idle.p99_ms + MOST_MS]
    broken = [row.name for row in rows if any(status == "500" or not status.isdecimal() for status in row.statuses)]
    print(f"/health p99 within {MOST_MS:.0f} ms of idle: {'yes' if not late else 'no: ' + ', '.join(late)}")
    if broken:
        print(f"answered by a 500, or not at all: {', '.join(broken)}")
    save_json(options.json, {"idle": idle, "cases": rows})
    return 1 if late or broken else 0


def _show(rows: Sequence[Row]) -> None:
    cells = []
    for row in rows:
        delays = [f"{delay:.1f}" for delay in (row.p50_ms, row.p99_ms, row.max_ms)]
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(row.statuses.items()))
        cells.append(
            (row.name, f"{row.body_mib:.1f}", *delays, f"{row.slowest_s:.2f}", f"{row.growth_mib:.0f}", answers)
        )
    print_table(("case", "MiB", "/health p50 ms", "p99", "max", "slowest s", "grew MiB", "answers"), cells)
