"""Drives servers with agents' sessions, and counts what of their prompts they could have reused, and have.

    python -m loadtest sessions --models-dir DIR --model NAME --llama-server FILE --kv-gib 0.25 --disk-gib 2

A session is a conversation whose prompts grow turn by turn: results of tools, and answers without what was thought, or
with a call that the client has written in its own way. Quire gets a K/V pool, as much host memory, and a disk; with
`--restart` it is killed (kill -9) halfway, and started again. With `--foresee` the simulator runs the same sessions.

`count` knows no engine: what can be reused of a prompt is what it has in common with any earlier prompt and its answer,
in tokens. A server that does not return these is asked for those of the texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from engine.core.config import SchedulerConfig, StoreSize
from engine.core.step import RowStart
from engine.core.types import Request, SamplingParams, TokenEvent
from loadtest.arguments import not_negative, positive_float, positive_int
from loadtest.bench import PATHS
from loadtest.client import Client, ClientError, Target
from loadtest.compare import PeerAsking
from loadtest.daemon import get_json, total
from loadtest.errors import LoadtestError
from loadtest.output import in_ms, print_table
from loadtest.peers.process import free_port, running
from loadtest.peers.table import DEFAULT_EXECUTABLES, FORMATS, PEERS, PRECISIONS, QUIRE, Peer, Setup
from loadtest.report import percentile
from loadtest.simulation.costs import StepCosts
from loadtest.simulation.replica import Replica
from loadtest.simulation.step_times import read_recording
from loadtest.simulation.variants import plain_settings
from loadtest.workload import Job, text_of

TURNS, CONTEXT, OUTPUT = 43, 142_000, 444  # medians of agents' sessions; the context is that of the last turn
_MOST = 1.5  # times the median: the longest session
_SHARED = 0.06  # of the context: instructions and tools that all sessions begin with
_LONG = 10  # times as long: two turns that reach the median context, to measure steps
_START_LIMIT_S, _SETTLED_S = 600.0, 2.0  # of a server; without a new block on the disk


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session, as HTTP showed it."""

    server: str
    session: int
    number: int
    start_s: float
    end_s: float
    ttft_s: float
    cached: int
    prompt: Sequence[int]
    answer: Sequence[int]


class Reuse(NamedTuple):
    """What was computed of some prompts, in tokens."""

    num_turns: int
    num_tokens: int
    reusable: int
    reused: int
    recomputed: Sequence[int]  # of each turn, ascending: what was reusable and was not reused
    ttft_s: float  # the median


def count(turns: Iterable[Turn], number: int | None = None) -> Reuse:
    """Return what could have been reused, and was, in all turns or in those of one number."""
    earlier, found = list[Turn](), list[tuple[Turn, int]]()
    for turn in sorted(turns, key=lambda turn: turn.start_s):
        if number in (None, turn.number):
            ended = [[*each.prompt, *each.answer] for each in earlier if each.end_s <= turn.start_s]
            most = max([common(turn.prompt, each) for each in ended], default=0)
            found.append((turn, min(most, len(turn.prompt) - 1)))  # the last token is always computed
        earlier.append(turn)
    return Reuse(
        len(found),
        sum(len(turn.prompt) for turn, _ in found),
        sum(most for _, most in found),
        sum(min(turn.cached, most) for turn, most in found),
        sorted(max(most - turn.cached, 0) for turn, most in found),
        median([turn.ttft_s for turn, _ in found]) if found else math.nan,
    )


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


class Session:
    """One agent's conversation, drawn from its number: what it sends next depends on the answers."""

    def __init__(self, number: int, scale: float) -> None:
        self.number, self.turn, self._scale, self._rng = number, 0, scale, random.Random(number)
        self.num_turns = round(min(self._rng.lognormvariate(math.log(TURNS), 0.3), _MOST * TURNS))
        system = text_of(random.Random("shared"), round(_SHARED * CONTEXT * scale))
        self.messages = [{"role": "system", "content": system}, {"role": "user", "content": self._result()}]

    def _result(self) -> str:
        """Return what a tool says: as much as brings a median session to the median context."""
        mean = ((1 - _SHARED) * CONTEXT / TURNS - OUTPUT / 2) * self._scale
        return text_of(self._rng, math.ceil(self._rng.lognormvariate(math.log(mean) - 0.125, 0.5)))

    def num_output(self) -> int:
        """Return how long the next answer is."""
        return max(round(self._rng.lognormvariate(math.log(OUTPUT * self._scale), 0.5)), 4)

    def take(self, answer: str) -> None:
        """Take an answer, and make the next turn's messages."""
        kind = self._rng.randrange(4)
        kept = answer[len(answer) // 3 :] if kind else answer  # the first third was thoughts, which are left out
        if kind > 1:  # there is a call behind them, whose arguments the client's serialiser writes
            call = {"name": "read", "arguments": {"path": text_of(self._rng, 2), "line": self._rng.randrange(999)}}
            kept = kept[: len(kept) // 2] + json.dumps(call, indent=kind - 2 or None)
        self.messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": self._result()}]
        self.turn += 1


class Server(NamedTuple):
    """A running server, and how it is asked."""

    name: str
    port: int
    asking: PeerAsking

    async def ask(self, client: Client, session: Session) -> Turn:
        """Send a session's next turn. Raises ClientError."""
        text, ids = list[str](), {"prompt_token_ids": list[int](), "token_ids": list[int]()}

        def note(event: Any) -> None:
            for each in (event, *(event.get("choices") or ())):
                for kind, found in ids.items():
                    found += each.get(kind) or ()
                text.append((each.get("delta") or {}).get("content") or "")

        body = self.asking.body(Job("", session.num_output())) | {
            "messages": session.messages,
            "return_token_ids": True,
        }
        done = await client.stream(PATHS["chat"], body, on_event=note)
        if done.error or not done.chunks:
            raise ClientError(f"{self.name}, session {session.number}, turn {session.turn}: {done.error or 'no text'}")
        answer = "".join(text)
        prompt_ids, answer_ids = ids.values()
        if not prompt_ids:  # llama-server
            rendered = await self._post("/apply-template", messages=session.messages)
            for whole, found in ((rendered["prompt"], prompt_ids), (answer, answer_ids)):
                found += (await self._post("/tokenize", content=whole, parse_special=True))["tokens"]
        times = done.start_s, done.end_s, done.chunks[0] - done.start_s
        turn = Turn(self.name, session.number, session.turn, *times, done.cached_tokens, prompt_ids, answer_ids)
        session.take(answer)
        return turn

    async def _post(self, path: str, **body: Any) -> Any:
        return await asyncio.to_thread(get_json, self.port, path, body)


async def drive(
    server: Server, sessions: Sequence[Session], num_clients: int, note: Callable[[Turn], None], until: float = math.inf
) -> None:
    """Run sessions up to a turn, some of them concurrently, and note each turn. Raises ClientError."""
    waiting = list(sessions)

    async def work(client: Client) -> None:
        while waiting:
            session = waiting.pop(0)
            while session.turn < min(until, session.num_turns):
                note(await server.ask(client, session))

    with contextlib.closing(Client(Target.local(server.port), math.inf)) as client:
        await asyncio.gather(*(work(client) for _ in range(num_clients)))


def foresee(
    turns: Iterable[Turn],
    settings: SchedulerConfig,
    costs: StepCosts,
    *,
    num_clients: int,
    num_opening: int,
    delay_s: float = 0.0,
) -> list[Turn]:
    """Return a log's turns as a scheduler with these settings would serve them, on a virtual clock.

    A prompt follows the answer before it, which is the logged one, and reaches the engine after a delay. Its last
    `num_opening` tokens open the answer.
    """
    asked = sorted(turns, key=lambda turn: (turn.session, turn.number))
    firsts = deque([at for at, turn in enumerate(asked) if not at or asked[at - 1].session != turn.session])
    coming = deque([(delay_s, firsts.popleft()) for _ in range(min(num_clients, len(firsts)))])

    def submit(at_s: float, at: int) -> None:
        prompt, params = tuple(asked[at].prompt), SamplingParams(max_tokens=len(asked[at].answer), seed=at)
        asked[at] = replace(asked[at], start_s=at_s - delay_s)
        turn_end = len(prompt) - num_opening if num_opening else 0
        request = Request(request_id=str(at), prompt=prompt, params=params, arrival_s=at_s, turn_end=turn_end)
        replica.submit(request, at_s)

    def draw(row: RowStart, position: int) -> int:
        return asked[row.seed].answer[position + 1 - row.num_prompt]

    def begin(event: TokenEvent) -> None:
        at, info = int(event.request_id), event.prompt
        assert info is not None
        ttft_s = delay_s + info.queue_s + info.prefill_s
        asked[at] = replace(asked[at], cached=info.num_cached_tokens, ttft_s=ttft_s)

    def follow(event: TokenEvent) -> None:
        at = int(event.request_id)
        asked[at] = replace(asked[at], end_s=replica.now)
        if at + 1 < len(asked) and asked[at + 1].session == asked[at].session:
            coming.append((replica.now + delay_s, at + 1))
        elif firsts:
            coming.append((replica.now + delay_s, firsts.popleft()))

    replica = Replica(settings, costs, on_finish=follow, on_prompt=begin, draw=draw)
    while coming or replica.has_work:
        if coming and (not replica.has_work or coming[0][0] <= replica.now):
            submit(*coming.popleft())
        else:
            replica.turn()
    return asked


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `sessions`."""
    for peer in PEERS:
        name, default = f"--{peer.name}", DEFAULT_EXECUTABLES.get(peer.name)
        parser.add_argument(name, metavar=peer.executable, type=Path, default=default, help=peer.purpose)
    parser.add_argument("--models-dir", type=Path, metavar="DIR", required=True, help="as of `compare`")
    parser.add_argument("--model", metavar="NAME", required=True, help="a folder of these models")
    parser.add_argument("--precision", choices=(*PRECISIONS, *FORMATS), metavar="NAME", default="bf16")
    parser.add_argument("--scale", type=positive_float, default=0.05, metavar="X", help="of all lengths; default 0.05")
    parser.add_argument("--sessions", type=positive_int, default=8, metavar="N", help="default 8")
    parser.add_argument("--clients", type=positive_int, default=4, metavar="N", help="concurrent sessions; default 4")
    parser.add_argument("--kv-gib", type=positive_float, default=0.25, help="K/V memory; default 0.25")
    parser.add_argument("--disk-gib", type=not_negative, default=4.0, help="behind it; 0: no tiers; default 4")
    parser.add_argument("--restart", action="store_true", help="kill Quire halfway, and start it again")
    parser.add_argument("--foresee", action="store_true", help="add what the simulator finds for Quire's turns")
    parser.add_argument("--num-threads", type=positive_int, metavar="N", default=os.cpu_count(), help="one a core")
    parser.add_argument("--log", type=Path, metavar="FILE", help="append each turn as a line of JSON")


def run(options: argparse.Namespace) -> int:
    """Drive one server after another, and print what each reused."""
    if options.foresee and options.restart:
        raise LoadtestError("The simulator foresees no restart; leave out --foresee or --restart.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = []
    for peer in PEERS:
        if getattr(options, peer.name.replace("-", "_")) is not None:
            turns, half = _measure(options, peer)
            rows.append((peer.name, *_cells(count(turns))))
            rows += [("after kill -9", *_cells(count(turns, half)))] if half else []
            if options.foresee and peer.name == QUIRE:
                rows.append(("foreseen", *_cells(count(_foreseen(options, peer, turns)))))
    head = ("server", "turns", "tokens in", "reusable", "reused", "recomputed a turn p50", "p90", "most", "TTFT p50 ms")
    print_table(head, rows)
    return 0


def _cells(reuse: Reuse) -> list[str]:
    recomputed = [f"{percentile(reuse.recomputed, share):,.0f}" for share in (0.5, 0.9, 1)]
    rates = [f"{reuse.reusable / max(reuse.num_tokens, 1):.2%}", f"{reuse.reused / max(reuse.reusable, 1):.2%}"]
    return [str(reuse.num_turns), f"{reuse.num_tokens:,}", *rates, *recomputed, in_ms(reuse.ttft_s, 0)]


def _measure(options: argparse.Namespace, peer: Peer) -> tuple[list[Turn], int]:
    """Return the turns that one server answered, and the one before which it was killed, or 0."""
    sessions, turns = [Session(number, options.scale) for number in range(options.sessions)], list[Turn]()
    half = min(session.num_turns for session in sessions) // 2 if options.restart and peer.name == QUIRE else 0

    def note(turn: Turn) -> None:
        turns.append(turn)
        if options.log:
            with options.log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(turn)) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for until in (half, math.inf) if half else (math.inf,):
            with _running(options, peer, Path(folder)) as (server, pid):
                asyncio.run(drive(server, sessions, options.clients, note, until))
                signal.signal(signal.SIGTERM, signal.default_int_handler)
                if until == half:
                    _settle(server.port)
                    os.kill(pid, signal.SIGKILL)
    return turns, half


def _foreseen(options: argparse.Namespace, peer: Peer, turns: Sequence[Turn]) -> list[Turn]:
    """Return what is foreseen of Quire's turns, from a recording of other sessions, whose first prompts are long."""
    from loadtest.simulation.fit import fit  # here, because it imports numpy

    seen, others = list[Turn](), [Session(number, _LONG * options.scale) for number in range(-options.clients, 0)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording"
        with _running(options, peer, Path(folder), path) as (server, _):
            asyncio.run(drive(server, others, options.clients, seen.append, 2))
        lines = [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]
        measured = read_recording(path)
    settings, chat = measured.config, [line for line in lines if line.get("op") == "add"][-1]
    if settings.num_host_blocks:  # a recording covers no disk
        num_slots = int(settings.num_blocks * options.disk_gib / options.kv_gib)
        settings = replace(settings, stores=(StoreSize("disk", num_slots),))
    costs = replace(fit(measured.shapes, measured.seconds), settings=plain_settings(settings))
    num_opening = chat["prompt"][0] - chat["turn_end"] if "turn_end" in chat else 0
    delay_s = max(mean(turn.ttft_s for turn in seen) - mean(measured.ttft_s[-len(seen) :]), 0.0)
    return foresee(turns, settings, costs, num_clients=options.clients, num_opening=num_opening, delay_s=delay_s)


def _settle(port: int) -> None:
    """Wait until no more blocks come to the disk."""
    before = -1
    while (found := total(port, "quire_kv_offload_disk_blocks")) != before:
        before = found
        time.sleep(_SETTLED_S)


@contextlib.contextmanager
def _running(
    options: argparse.Namespace, peer: Peer, folder: Path, recording: Path | None = None
) -> Iterator[tuple[Server, int]]:
    """Run a server; Quire with its tiers in a folder, or with none on disk and a recording."""
    model, most = (options.models_dir / options.model).absolute(), 256 * math.ceil(CONTEXT * options.scale / 80)
    threads, clients, memory = options.num_threads, options.clients, options.kv_gib
    setup = Setup(model, free_port(), options.precision, threads, clients, most, memory)
    command = peer.command(str(getattr(options, peer.name.replace("-", "_"))), setup)
    disk = {} if recording else {"folder": str(folder), "disk_gib": options.disk_gib}
    more = ["--kv-offload-config", json.dumps({"host_gib": memory} | disk)] if options.disk_gib else []
    more += ["--record", str(recording)] if recording else []
    command = command._replace(argv=[*command.argv, *(more if peer.name == QUIRE else [])])
    first = {"model": model.name, "prompt": "time", "max_tokens": 1}
    with running(command, setup.port, folder / "log", first, _START_LIMIT_S) as process:
        yield Server(peer.name, setup.port, PeerAsking(model.name, "chat")), process.pid
