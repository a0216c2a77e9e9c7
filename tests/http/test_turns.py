"""One request works in a turn of the event loop, callers in rotation; probes wait for no turn."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from harness import Live, eventually

from engine.core.types import TokenEvent
from server.answers import client as client_module
from server.answers.client import EngineClient
from server.http.bodies import BodyReader
from server.http.connection import TURN_CALLS, Connection
from server.http.middleware import CALLER, SMALL_BYTES, RequestState, Turns, TurnTaker, _network
from server.http.threads import Worker
from server.protocol.errors import STATE
from tests.patience import PATIENCE_S
from tests.pure.driver import request as engine_request

Serve = Callable[..., Live]


class TurnCounter:
    """Numbers the turns of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.number, self._loop = 0, loop
        self._count()

    def _count(self) -> None:
        self.number += 1
        self._loop.call_soon(self._count)


def scope(name: str, num_bytes: int | None = 10, path: str = "/v1/completions") -> dict[str, Any]:
    headers = [(b"transfer-encoding", b"chunked")] if num_bytes is None else [(b"content-length", b"%d" % num_bytes)]
    return {"type": "http", "path": path, "headers": headers, "client": (name, 1), STATE: RequestState("r")}


async def begun(scopes: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Let requests arrive in one turn; return the order in which they begin, each with its turn."""
    counter, order = TurnCounter(asyncio.get_running_loop()), []

    async def app(scope: Any, *_: Any) -> None:
        order.append((scope["client"][0], counter.number))

    taker = TurnTaker(app, Turns(), {"/health"})
    await asyncio.gather(*(taker(each, None, None) for each in scopes))  # type: ignore[arg-type]  # they are not called
    return order


async def test_requests_that_arrive_together_begin_one_a_turn_and_callers_alternate() -> None:
    order = await begun([scope("a") for _ in range(4)] + [scope("b"), scope("c"), scope("b")])
    assert [name for name, _ in order] == ["a", "a", "b", "c", "a", "b", "a"]
    turns = [turn for _, turn in order]
    assert turns == sorted(set(turns))


async def test_small_requests_of_a_caller_do_not_wait_for_its_large_ones() -> None:
    large = [scope("large", SMALL_BYTES + 1), scope("large", None)] * 3
    for each in large:
        each["client"] = ("a", "large")
    small = [scope("a") for _ in range(2)]
    order = []

    async def app(scope: Any, *_: Any) -> None:
        order.append(scope["client"][1])

    taker = TurnTaker(app, Turns(), ())
    await asyncio.gather(*(taker(each, None, None) for each in large + small))  # type: ignore[arg-type]
    assert order == ["large", "large", 1, "large", 1, "large", "large", "large"]


async def test_probes_begin_in_the_turn_in_which_they_arrive() -> None:
    order = await begun([scope("a") for _ in range(5)] + [scope("probe", path="/health")])
    assert order[1][0] == "probe"
    assert order[1][1] == order[0][1]


async def test_a_request_keeps_its_turn_until_the_next() -> None:
    turns, counter = Turns(), TurnCounter(asyncio.get_running_loop())
    await turns.take()
    first = counter.number
    await turns.take()
    assert counter.number == first
    await asyncio.sleep(0)
    await turns.take()
    assert counter.number == first + 1


async def test_a_request_that_leaves_while_it_waits_costs_no_turn_and_loses_none() -> None:
    turns, order = Turns(), []

    async def work(name: int) -> None:
        await turns.take()
        order.append(name)

    tasks = [asyncio.create_task(work(name)) for name in range(6)]
    await asyncio.sleep(0)
    for name in (1, 2, 4):
        tasks[name].cancel()
    granted = asyncio.create_task(work(7))
    await asyncio.gather(*tasks, granted, return_exceptions=True)
    assert order == [0, 3, 5, 7]
    cancelled_when_granted = [asyncio.create_task(work(name)) for name in (8, 9)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the second one's turn is next, and it leaves
    cancelled_when_granted[1].cancel()
    await asyncio.gather(*cancelled_when_granted, return_exceptions=True)
    await turns.take()


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("", ""),
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:aaaa::7", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
    ],
)
def test_a_caller_without_an_account_is_an_address(host: str, caller: str) -> None:
    assert _network(host) == caller


async def test_a_worker_serves_its_callers_in_rotation() -> None:
    worker, order, begin = Worker("test"), [], threading.Event()

    async def ask(caller: str, work: Callable[[], object]) -> None:
        CALLER.set(caller)
        await worker.run(work)

    tasks = [asyncio.create_task(ask("a", lambda: begin.wait(PATIENCE_S)))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(ask(name, lambda name=name: order.append(name))) for name in "aaabcb"]  # type: ignore[misc]
    tasks.append(asyncio.create_task(ask("c", lambda: 1 / 0)))
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0)  # the loop's next turn passes the cancellation on to the worker
    begin.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    worker.close()
    assert order == ["b", "c", "a", "b", "a"]
    assert [type(outcome) for outcome in outcomes if outcome] == [asyncio.CancelledError, ZeroDivisionError]


# -- the application ------------------------------------------------------------------------------------------------------


@contextmanager
def held_turn(live: Live) -> Iterator[None]:
    """Grant no turn of the loop until the block ends."""
    turns, loop = live.context.bodies.turns, live.context.client._loop
    assert loop is not None
    held = threading.Event()

    def hold() -> None:
        turns._holder = held
        held.set()

    loop.call_soon_threadsafe(hold)
    assert held.wait(PATIENCE_S)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(turns._pass_on)


def test_probes_are_answered_while_others_wait(serve: Serve) -> None:
    live = serve()
    with ThreadPoolExecutor(2) as clients, held_turn(live):
        waiting = [
            clients.submit(httpx.get, live.url + path, timeout=PATIENCE_S) for path in ("/metrics", "/v1/models")
        ]
        for path in ("/health", "/ready"):
            assert httpx.get(live.url + path, timeout=PATIENCE_S).status_code == 200
        assert not any(each.done() for each in waiting)
    assert [each.result().status_code for each in waiting] == [200, 200]


def test_bodies_that_arrive_together_are_parsed_one_a_turn(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    live, parsed = serve(), Counter[int]()
    loop = live.context.client._loop
    assert loop is not None
    counter = TurnCounter(loop)
    read_small = BodyReader.read_small

    def count(self: BodyReader, *given: Any) -> Any:
        parsed[counter.number] += 1
        return read_small(self, *given)

    monkeypatch.setattr(BodyReader, "read_small", count)
    with ThreadPoolExecutor(24) as clients, held_turn(live):
        sent = [
            clients.submit(httpx.post, live.url + "/v1/completions", json={"prompt": [300] * 500}, timeout=PATIENCE_S)
            for _ in range(24)
        ]
        waiting = live.context.bodies.turns._waiting._queues
        eventually(lambda: len(waiting.get(("127.0.0.1", True), ())) == 24)
    assert {each.result().status_code for each in sent} == {400}
    assert parsed.total() == 24
    assert set(parsed.values()) == {1}


def test_tiny_chunks_are_parsed_some_a_turn(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    live, pieces = serve(), dict[int, list[int]]()
    loop, parse_piece = live.context.client._loop, Connection.parse_piece
    assert loop is not None
    counter = TurnCounter(loop)

    def count(self: Connection) -> int:
        num_calls = parse_piece(self)
        pieces.setdefault(counter.number, []).append(num_calls)
        return num_calls

    monkeypatch.setattr(Connection, "parse_piece", count)

    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "a|"}' + b" " * 3000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    host, port = live.url.removeprefix("http://").split(":")

    def send(_: int) -> bytes:
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
            return connection.recv(12)

    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(send, range(8))) == [b"HTTP/1.1 200"] * 8
    assert sum(map(sum, pieces.values())) > 8 * 3000
    assert all(sum(calls[:-1]) < TURN_CALLS for calls in pieces.values())


async def test_readers_of_a_steps_events_are_woken_some_a_turn_and_events_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "TURN_READERS", 4)

    class NoEngine:
        def submit(self, *_: object) -> None: ...
        def abort(self, *_: object) -> None: ...

    client = EngineClient(NoEngine())  # type: ignore[arg-type]
    client._loop = asyncio.get_running_loop()
    answers = [client.submit([engine_request(request_id=str(number), prompt=(1,))]) for number in range(10)]
    counter, woken = TurnCounter(client._loop), Counter[int]()

    async def read(number: int) -> list[tuple[int, ...]]:
        heard: list[tuple[int, ...]] = []
        while sum(map(len, heard)) < 3:
            events = await answers[number].take()
            woken[counter.number] += 1
            heard.append(tuple(token for event in events for token in event.token_ids))
        return heard

    reading = [asyncio.create_task(read(number)) for number in range(10)]
    await asyncio.sleep(0)
    reading[5].cancel()
    for step in (1, 2):
        client._dispatch([TokenEvent(str(number), 0, (step,)) for number in range(10)])
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first readers have run, the last have not been woken
    client._dispatch([TokenEvent(str(number), 0, (3,)) for number in range(10)])
    heard = await asyncio.gather(*reading[:5], *reading[6:])
    assert max(woken.values()) <= 4
    assert heard[0] == [(1, 2), (3,)]
    assert heard[-1] == [(1, 2, 3)]
    assert all(sum(each, ()) == (1, 2, 3) for each in heard)
