"""The load generator against servers that behave, and servers that do not: nothing is hidden and nothing hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.bench import Asking, Level, Sweep, closed_loop, first_model, open_loop
from loadtest.client import Client, ClientError, Outcome, Target
from loadtest.daemon import fake_daemon
from loadtest.texts import of_streams
from loadtest.workload import Job
from tests.patience import PATIENCE_S

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str | None = None, reason: str | None = None, **fields: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


GOOD = event("a") + event("bcd", "length") + event(usage=USAGE) + b"data: [DONE]\n\n"


class Scripted:
    """A server whose every answer is written by a handler; keeps the requests it was sent."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.bodies: list[dict[str, Any]] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                self.bodies.append(body)
                await self.handler(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


Serve = Callable[[Handler], Awaitable[tuple[Scripted, Client]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    opened: list[tuple[asyncio.AbstractServer, Client]] = []

    async def start(handler: Handler) -> tuple[Scripted, Client]:
        scripted = Scripted(handler)
        server = await asyncio.start_server(scripted, "127.0.0.1", 0)
        client = Client(Target.parse(f"127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "key"), timeout_s=PATIENCE_S)
        opened.append((server, client))
        return scripted, client

    yield start
    for server, client in opened:
        client.close()
        server.close()
        await server.wait_closed()


def answering(data: bytes) -> Handler:
    async def handler(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return handler


async def ask(client: Client) -> Outcome:
    asking = Asking("m")
    return await client.stream(asking.path, asking.body(Job("hello", 4)))


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
async def test_an_answer_reads_the_same_however_it_is_cut(serve: Serve, step: int) -> None:
    data = STREAM + b"".join(chunk(GOOD[start : start + 11]) for start in range(0, len(GOOD), 11)) + chunk(b"")

    async def handler(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for start in range(0, len(data), step):
            writer.write(data[start : start + step])
            await asyncio.sleep(0)

    _, client = await serve(handler)
    outcome = await ask(client)
    assert outcome.error == ""
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (3, 4, 2)
    assert len(outcome.chunks) == 2
    assert outcome.start_s <= outcome.chunks[0] <= outcome.chunks[1] <= outcome.end_s
    assert outcome.finish_reason == "length"


async def test_requests_carry_what_was_asked_and_reuse_a_connection(serve: Serve) -> None:
    scripted, client = await serve(answering(STREAM + chunk(GOOD) + chunk(b"")))
    outcomes: list[Outcome] = []
    jobs = [Job("one", 5), Job("two", 6)]
    await closed_loop(client, Asking("m", "chat", 0.5), jobs, 1, outcomes.append)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert scripted.connections == 1
    assert scripted.bodies[1] == {
        "model": "m",
        "messages": [{"role": "user", "content": "two"}],
        "max_tokens": 6,
        "min_tokens": 6,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_connection_that_the_server_closed_is_replaced(serve: Serve) -> None:
    async def once(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(GOOD) + chunk(b""))
        await writer.drain()
        writer.close()

    scripted, client = await serve(once)
    assert [(await ask(client)).error for _ in range(3)] == ["", "", ""]
    assert scripted.connections == 3


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            b'HTTP/1.1 429 Too Many\r\ncontent-length: 42\r\n\r\n{"error": {"message": "full", "code": null}}'[:-2]
            + b"}}",
            "HTTP 429: full",
        ),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", "HTTP 500: no body"),
        (STREAM + chunk(event("a") + event(error={"message": "the engine died"})) + chunk(b""), "the engine died"),
        (STREAM + chunk(event("a")) + chunk(b""), "without a finish_reason"),
        (STREAM + chunk(b"data: {oops\n\n") + chunk(b""), "not what the API promises"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not what the API promises"),
    ],
)
async def test_faults_become_sentences(serve: Serve, answer: bytes, sentence: str) -> None:
    _, client = await serve(answering(answer))
    assert sentence in (await ask(client)).error


async def test_a_server_that_hangs_up_midway_is_an_error(serve: Serve) -> None:
    async def cut(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(event("a")))
        await writer.drain()
        writer.close()

    _, client = await serve(cut)
    assert "lost before the answer's end" in (await ask(client)).error


async def test_a_server_that_never_answers_is_an_error(serve: Serve) -> None:
    _, client = await serve(answering(b""))
    client.timeout_s = 0.05
    assert "no complete answer within 0.05 s" in (await ask(client)).error


async def test_closed_loop_keeps_its_concurrency_and_open_loop_does_not_wait(serve: Serve) -> None:
    in_flight, peak, wanted, full = 0, 0, 3, asyncio.Event()

    async def slow(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal in_flight, peak
        in_flight += 1
        peak = max(peak, in_flight)
        if peak == wanted:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)  # one more could come now
        in_flight -= 1
        writer.write(STREAM + chunk(GOOD) + chunk(b""))

    _, client = await serve(slow)
    outcomes: list[Outcome] = []
    await closed_loop(client, Asking("m"), [Job("x", 4)] * 12, 3, outcomes.append)
    assert (len(outcomes), peak) == (12, 3)
    peak, wanted = 0, 12
    full.clear()
    await open_loop(client, Asking("m"), [Job("x", 4)] * 12, outcomes.append)
    assert (len(outcomes), peak) == (24, 12)


async def test_an_interrupted_sweep_keeps_what_it_has(serve: Serve) -> None:
    answered = 0

    async def three(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        if answered > 3:
            running.cancel()
            return
        writer.write(STREAM + chunk(GOOD) + chunk(b""))

    _, client = await serve(three)
    sweep = Sweep()
    levels = [Level("concurrency 1", 1, 1, [Job("x", 4)] * 9), Level("concurrency 2", 2, 2, [Job("x", 4)] * 9)]
    running = asyncio.ensure_future(sweep.run(client, Asking("m"), [], levels))
    await running
    assert sweep.is_interrupted
    assert [(point.load, point.num_requests) for point in sweep.points] == [("concurrency 1", 3)]


async def test_the_first_model_is_asked_for(serve: Serve) -> None:
    listing = b'{"data": [{"id": "first"}, {"id": "second"}]}'
    _, client = await serve(answering(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(listing), listing)))
    assert await first_model(client) == "first"
    _, client = await serve(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"))
    with pytest.raises(ClientError, match="lists no model"):
        await first_model(client)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://[::1"])
def test_a_bad_url_is_one_sentence(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--base-url", url]) == 2
    assert "--base-url" in capsys.readouterr().err


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Two fake daemons, in which a long prompt takes several steps."""
    with fake_daemon("5", "1024") as one, fake_daemon("5", "1024") as two:
        yield [f"http://127.0.0.1:{each.port}" for each in (one, two)]


def test_the_command_sweeps_and_writes(urls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--base-url", urls[0], "--concurrency", "1", "4"]
    arguments += ["--num-prompts", "8", "--output-len", "5", "--json", str(report), "--plot", str(plot)]
    assert main(["bench", *arguments]) == 0
    points = json.loads(report.read_text())["points"]
    assert [point["load"] for point in points] == ["concurrency 1", "concurrency 4"]
    assert all((point["num_requests"], point["num_failed"], point["output_tokens"]) == (8, 0, 40) for point in points)
    assert plot.stat().st_size > 10_000
    assert "TTFT" in capsys.readouterr().out


def test_texts_are_measured_alone_and_beside_streams_of_another_daemon(
    urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_BEGIN_S", "_ALONE_S", "_AFTER_S"):
        monkeypatch.setattr(f"loadtest.texts.{name}", 0.2)
    report = tmp_path / "texts.json"
    arguments = [*urls, "--model", "fake", "--texts", "50", "--batch", "10", "--rounds", "1", "--json", str(report)]
    assert main(["texts", *arguments, "--chat", "fake", "--chat-url", *reversed(urls), "--streams", "2"]) == 0
    rounds = json.loads(report.read_text())
    assert list(rounds) == urls
    assert all(each["texts_per_s"] > 0 and each["texts_per_s_beside"] > 0 for (each,) in rounds.values())
    assert all(name in each for (each,) in rounds.values() for name in of_streams([], 0.0, 1.0, 2.0))


def test_streams_are_counted_alone_and_beside_texts() -> None:
    arrivals = [[1.0, 1.5, 2.0, 3.0, 4.0], [1.25, 1.75, 2.75, 3.75, 4.75]]
    assert of_streams(arrivals, 1.0, 2.0, 4.0) == {
        "gap_p99_s": 0.5,
        "gap_p99_beside_s": 1.0,
        "tokens_per_s": 4.0,
        "tokens_per_s_beside": 2.0,
    }


def test_requests_beside_a_long_prompt_are_measured_on_each_daemon_in_turns(
    urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("_BEGIN_S", 0.2), ("_ALONE_S", 0.2), ("_PAUSE_S", 0.01), ("_NUM_SHORTS", 2)):
        monkeypatch.setattr(f"loadtest.beside.{name}", value)
    monkeypatch.setattr("loadtest.beside._STREAM_ANSWER", 4000)
    report = tmp_path / "beside.json"
    assert main(["beside", *urls, "--rounds", "2", "--streams", "2", "--json", str(report)]) == 0
    told, rounds = capsys.readouterr().out, json.loads(report.read_text())
    assert list(rounds) == urls
    for url, measured in rounds.items():
        assert f"| {url} | " in told
        assert len(measured) == 2
        assert all(min(each["gap_p99"], each["short_ttft_p99_beside"], each["long_ttft"]) > 0 for each in measured)
