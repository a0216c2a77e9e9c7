"""The end of a daemon whose engine hangs in a step: every open request is answered, and the process fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send
from test_batch_restart import lines
from test_cli import Process, outcome, quire, read_until, ready

from server.http.middleware import RequestScope
from tests.patience import PATIENCE_S, eventually

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 900, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 900, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 900, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 900, "model": "any", "ignore_eos": True},
}


@contextmanager
def hanging(folder: Path, *flags: str, step: int = 30) -> Iterator[tuple[Process, str]]:
    """A daemon whose engine hangs in its 30th step for ever, and its URL."""
    hold = folder / "hold"
    hold.write_text(str(step))
    with quire(
        "serve",
        "--served-model-name",
        "any",
        "--shutdown-timeout",
        "0",
        *flags,
        FAKE_HOLD=str(hold),
        FAKE_MARGIN_S="0.2",
    ) as process:
        yield process, ready(process)


def hung(folder: Path) -> bool:
    return (folder / "hold.hung").exists()


def load(url: str) -> int:
    return httpx.get(f"{url}/load").json()["server_load"]


def frames(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if part and not part.startswith(":")]


def test_every_open_request_is_answered_and_the_process_fails(tmp_path: Path) -> None:
    """The ninth waits in the queue, for a slot, and is answered too."""
    with ThreadPoolExecutor(10) as pool, hanging(tmp_path) as (process, url):
        asked = {
            (path, stream): pool.submit(httpx.post, url + path, json={**body, "stream": stream})
            for path, body in BODIES.items()
            for stream in (False, True)
        }
        eventually(lambda: load(url) == len(asked))
        asked["/v1/embeddings", False] = pool.submit(httpx.post, f"{url}/v1/embeddings", json={"input": "hi"})
        eventually(lambda: load(url) == len(asked) and hung(tmp_path))
        process.send_signal(signal.SIGTERM)
        answers = {key: answer.result(PATIENCE_S) for key, answer in asked.items()}
        status, written = outcome(process)
    assert status == 1
    assert "a step of the engine has not returned" in written
    assert "Traceback" not in written
    for (path, stream), answer in answers.items():
        if not stream:
            assert answer.status_code == 503, path
            assert int(answer.headers["retry-after"]) >= 1
            assert "shutting down" in answer.json()["error"]["message"]
            continue
        assert answer.status_code == 200
        *_, last = told = frames(answer.text)
        if path == "/v1/responses":
            assert last.startswith("event: response.failed\n")
        elif path == "/v1/messages":
            assert last.startswith("event: error\n")
        else:
            assert last == "data: [DONE]"
            assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert "shutting down" in answer.text


def test_a_second_signal_does_not_wait_for_the_timeout(tmp_path: Path) -> None:
    with hanging(tmp_path, "--shutdown-timeout", "86400") as (process, url):
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**BODIES["/v1/completions"], "stream": True}
        ) as answer:
            eventually(lambda: hung(tmp_path))
            process.send_signal(signal.SIGTERM)
            read_until(process, "(SIGTERM): finishing 1 open requests")
            process.send_signal(signal.SIGINT)
            told = frames(answer.read().decode())
        assert told[-1] == "data: [DONE]"
        assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert outcome(process)[0] == 1


def test_while_it_drains_refusals_tell_when_to_try_again(tmp_path: Path) -> None:
    path = "/v1/completions"
    with (
        hanging(tmp_path, "--shutdown-timeout", "600") as (process, url),
        httpx.stream("POST", url + path, json={**BODIES[path], "stream": True}),
    ):
        process.send_signal(signal.SIGHUP)  # there are no tenants and no certificate to read again
        read_until(process, "(SIGHUP): finishing 1 open requests")
        for path, body in BODIES.items():
            refused = httpx.post(url + path, json=body)
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 600
        assert int(httpx.get(f"{url}/ready").headers["retry-after"]) >= 1


def test_neither_a_reader_that_does_not_read_nor_a_batch_keeps_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with hanging(tmp_path, "--data-dir", str(data), step=300) as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as stuck, openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            stuck.connect((host, int(port)))
            body = json.dumps({**BODIES["/v1/completions"], "stream": True, "n": 6, "logprobs": 5}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            stuck.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            file = client.files.create(file=lines().replace(b": 30", b": 3000"), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
            eventually(lambda: hung(tmp_path))
            process.send_signal(signal.SIGTERM)
            assert outcome(process)[0] == 1


async def test_a_request_that_is_cancelled_at_the_end_is_answered() -> None:
    """One that waits for something else than the engine; the server cancels it when its patience is over."""
    sent: list[Message] = []
    begun = asyncio.Event()

    async def hang(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/load_lora_adapter", "headers": []}
    task = asyncio.create_task(RequestScope(hang, Mock())(scope, receive, send))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    start, body = sent
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    assert json.loads(body["body"])["error"]["code"] == "shutting_down"
