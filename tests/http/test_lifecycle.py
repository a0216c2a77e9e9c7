"""Clients that leave, queues that are full, engines that fail and servers that stop: every request gets its one end."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from harness import CONFIG, Live, eventually

from engine.core.errors import DeviceLostError, DeviceMemoryError
from engine.core.rows import SequenceSlice
from engine.core.stats import FailureCause
from engine.core.step import StepPlan
from engine.core.types import AbortCause
from engine.overload import QueueLimits
from loadtest.fake_runner import FakeStep
from tests.patience import PATIENCE_S

Serve = Callable[..., Live]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"prompt": "endless", "max_tokens": 500}
SLOW = {"step_s": 0.05}  # 500 tokens would take longer than any test waits


@contextmanager
def asked(live: Live, path: str, *, version: str = "1.1", **fields: Any) -> Iterator[socket.socket]:
    """A bare connection over which one request was sent; leaving closes it."""
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    with closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def aborted(live: Live) -> int:
    return live.engine.stats.aborted[AbortCause.DISCONNECT]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_running_request_frees_it(serve: Serve, stream: bool, n: int) -> None:
    live = serve(**SLOW)
    with asked(live, COMPLETIONS, **ENDLESS, stream=stream, n=n):
        eventually(lambda: live.engine.stats.num_running == n)
    live.check_idle()
    assert aborted(live) == n


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 400}),
    ],
)
def test_a_client_that_leaves_a_stream_of_another_api_frees_it(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    live = serve(**SLOW)
    with asked(live, path, **fields, stream=True, ignore_eos=True):
        eventually(lambda: live.engine.stats.num_running == 1)
    live.check_idle()
    assert aborted(live) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_with_a_second_request_behind_the_first_frees_it(serve: Serve, stream: bool) -> None:
    live = serve(**SLOW)
    with asked(live, COMPLETIONS, **ENDLESS, stream=stream) as connection:
        eventually(lambda: live.engine.stats.num_running == 1)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    eventually(lambda: live.engine.stats.num_running == 0)
    live.check_idle()
    assert aborted(live) == 1


def test_a_client_that_leaves_is_no_failure_of_the_servers(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    live = serve(**SLOW)
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == 1)
    eventually(lambda: 'route="/v1/completions",status="499"} 1.0' in httpx.get(live.url + "/metrics").text)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_frees_its_place(serve: Serve, stream: bool) -> None:
    live = serve(config=replace(CONFIG, max_num_seqs=1), **SLOW)
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == 1)
        with asked(live, CHAT, messages=[{"role": "user", "content": "x"}], stream=stream):
            eventually(lambda: live.engine.stats.num_waiting == 1)
        eventually(lambda: live.engine.stats.num_waiting == 0)
        assert (live.engine.stats.num_running, aborted(live)) == (1, 1)


def test_the_more_urgent_request_leaves_the_queue_first(serve: Serve) -> None:
    live = serve(config=replace(CONFIG, max_num_seqs=1, policy="priority"), **SLOW)
    order: list[int] = []

    def ask(priority: int) -> None:
        fields = {"prompt": "x", "max_tokens": 1, "priority": priority}
        assert httpx.post(live.url + COMPLETIONS, json=fields).status_code == 200
        order.append(priority)

    threads = [threading.Thread(target=ask, args=(priority,)) for priority in (5, -5)]
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == 1)
        for num_waiting, thread in enumerate(threads, start=1):
            thread.start()
            eventually(lambda num=num_waiting: live.engine.stats.num_waiting == num)
    for thread in threads:
        thread.join()
    assert order == [-5, 5]


def test_one_of_several_prompts_does_not_outlive_the_client(serve: Serve) -> None:
    live = serve(config=replace(CONFIG, max_num_seqs=2), **SLOW)
    with asked(live, COMPLETIONS, **{**ENDLESS, "prompt": ["a", "b", "c"]}, stream=True):
        eventually(lambda: live.engine.stats.num_running == 2)
    live.check_idle()
    assert aborted(live) == 3


def test_a_stream_that_has_nothing_to_say_shows_that_it_lives(serve: Serve) -> None:
    live = serve(sse_keep_alive_interval_s=0.01)
    live.gate.close()
    with httpx.stream("POST", live.url + COMPLETIONS, json={"prompt": "hi|", "stream": True}) as response:
        lines = response.iter_lines()
        num_pings = 0
        while num_pings < 2:
            line = next(lines)
            assert not line or line.startswith(":"), "also where it stands, if the engine says so before the step"
            num_pings += line == ": ping"
        live.gate.open()
        said = [line for line in lines if line and not line.startswith(":")]
    assert said[-1] == "data: [DONE]"
    assert json.loads(said[0].removeprefix("data: "))["choices"][0]["text"].startswith("h")


def test_a_stream_to_http_1_0_ends_with_its_connection(live: Live) -> None:
    """It knows no chunks."""
    with asked(live, COMPLETIONS, version="1.0", prompt="hi|", stream=True) as connection:
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    first, *_, end = [line for line in body.decode().split("\n\n") if not line.startswith(":")][:-1]
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"].startswith("h")
    assert end == "data: [DONE]"


def test_a_client_that_leaves_within_its_body_costs_nothing(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
    assert httpx.get(live.url + "/health").status_code == 200


def test_a_reader_that_does_not_read_holds_nobody_up(serve: Serve) -> None:
    live = serve(config=replace(CONFIG, max_model_len=4096, num_blocks=2048))
    with asked(live, COMPLETIONS, prompt="x", max_tokens=1500, stream=True, n=16) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        live_client = httpx.post(live.url + COMPLETIONS, json={"prompt": "hello|"})
        assert live_client.json()["choices"][0]["text"] == "hello"
        eventually(lambda: not live.engine.health().busy)  # the engine finished, though nothing was read


def test_a_full_queue_answers_429_with_the_time_to_wait(serve: Serve) -> None:
    live = serve(config=replace(CONFIG, max_num_seqs=1), limits=QueueLimits(max_requests=1), **SLOW)
    with asked(live, COMPLETIONS, **ENDLESS), asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == live.engine.stats.num_waiting == 1)
        for stream in (False, True):
            response = httpx.post(live.url + COMPLETIONS, json={**ENDLESS, "stream": stream})
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(response.headers["retry-after"]) <= 120
            assert int(response.headers["retry-after-ms"]) <= 1000 * int(response.headers["retry-after"])
        assert live.context.client.num_open == 2


@pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"prompt": ["a|"] * 5}), ("/v1/embeddings", {"input": ["a"] * 5})]
)
def test_several_prompts_are_one_request_of_the_queue(serve: Serve, path: str, fields: dict[str, Any]) -> None:
    """They are admitted together or not at all, and count until the first of them runs."""
    live = serve(config=replace(CONFIG, max_num_seqs=1), limits=QueueLimits(max_requests=2))
    live.gate.close()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        ahead = [pool.submit(httpx.post, live.url + path, json=fields)]
        eventually(lambda: live.engine.stats.num_further == 4)
        for num in (9, 14):
            ahead.append(pool.submit(httpx.post, live.url + path, json=fields))
            eventually(lambda num=num: live.context.client.num_open == num + 1)  # type: ignore[misc]
        refused = httpx.post(live.url + path, json=fields)
        assert (refused.status_code, "2 requests wait already" in refused.text) == (429, True)
        assert live.context.client.num_open == 15
        live.gate.open()
        assert [each.result().status_code for each in ahead] == [200] * 3
    assert live.engine.stats.num_further == 0


def fails_on_exclamation(piece: SequenceSlice) -> str | None:
    return "This prompt broke the model." if ord("!") in piece.tokens[: piece.num_prompt] else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_fails_alone(serve: Serve, stream: bool) -> None:
    live = serve(fail=fails_on_exclamation)
    response = httpx.post(live.url + COMPLETIONS, json={"prompt": ["fine|", "broken!"], "stream": stream})
    if stream:
        assert response.status_code == 200
        *_, error, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        body = json.loads(error.removeprefix("data: "))
    else:
        assert response.status_code == 500
        body = response.json()
    assert body["error"]["code"] == "compute_error"
    assert "broke the model" in body["error"]["message"]
    assert httpx.post(live.url + COMPLETIONS, json={"prompt": "fine|"}).json()["choices"][0]["text"] == "fine"
    assert live.engine.stats.failed[FailureCause.NOT_FINITE] == 1


def full_for(live: Live, letter: str) -> Callable[[StepPlan], FakeStep]:
    """The runner's `run` on a device that has no memory for prompts with this letter in them."""
    honest = live.runner.run

    def run(plan: StepPlan) -> FakeStep:
        if any(ord(letter) in row.ids[: row.num_prompt] for row in plan.rows):
            raise DeviceMemoryError("CUDA out of memory")
        return honest(plan)

    return run


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_device_has_no_memory_for_ends_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool, depth: int
) -> None:
    live = serve(step_s=0.005, depth=depth)
    monkeypatch.setattr(live.runner, "run", full_for(live, "!"))
    fields = {"prompt": "endless", "max_tokens": 60, "stream": True}
    with httpx.stream("POST", live.url + COMPLETIONS, json=fields) as response:
        lines = response.iter_lines()
        begun = next(lines)  # one token, or what a slow reader finds merged
        failed = httpx.post(live.url + COMPLETIONS, json={"prompt": "large!", "n": 2, "stream": stream})
        said = [line.removeprefix("data: ") for line in (begun, *lines) if line]
    assert said[-1] == "[DONE]"
    text = "".join(choice["text"] for line in said[:-1] for choice in json.loads(line)["choices"])
    assert len(text) == 60
    if stream:
        *_, error, done = [line for line in failed.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        body = json.loads(error.removeprefix("data: "))
    else:
        assert failed.status_code == 500
        body = failed.json()
    assert body["error"]["code"] == "compute_error"
    assert "no memory left to compute this request" in body["error"]["message"]
    stats = live.engine.stats
    assert (stats.failed[FailureCause.OUT_OF_MEMORY], stats.out_of_memory_steps) == (2, 2)
    assert httpx.get(live.url + "/health").status_code == 200
    shown = httpx.get(live.url + "/metrics").text
    assert 'quire_requests_failed_total{cause="out_of_memory",model_name="parrot"} 2.0' in shown
    assert 'quire_out_of_memory_steps_total{model_name="parrot"} 2.0' in shown
    live.check_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lost_device_turns_health_red_and_ends_every_stream(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    live = serve(depth=depth, **SLOW)
    with httpx.stream("POST", live.url + COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)

        def lose(plan: StepPlan) -> FakeStep:
            raise DeviceLostError("the CUDA device is lost: CUDA error: unspecified launch failure")

        monkeypatch.setattr(live.runner, "run", lose)
        said = [line.removeprefix("data: ") for line in lines if line]
    assert said[-1] == "[DONE]"
    assert "the CUDA device is lost" in json.loads(said[-2])["error"]["message"]
    health = httpx.get(live.url + "/health")
    assert health.status_code == 503
    assert "the CUDA device is lost: CUDA error" in health.json()["error"]["message"]
    assert (
        'quire_requests_failed_total{cause="engine_death",model_name="parrot"} 1.0'
        in httpx.get(live.url + "/metrics").text
    )


def test_when_the_engine_dies_every_stream_hears_it_and_health_turns_red(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve(**SLOW)
    live.require_thread()
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        answers.append(httpx.post(live.url + COMPLETIONS, json={**ENDLESS, "stream": stream}))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    eventually(lambda: live.engine.stats.num_running == 2)
    assert httpx.get(live.url + "/health").status_code == 200

    def explode(plan: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(live.runner, "run", explode)
    for thread in threads:
        thread.join()
    plain, streamed = sorted(answers, key=lambda answer: answer.headers["content-type"])
    assert (plain.status_code, streamed.status_code) == (503, 200)
    assert plain.json()["error"]["code"] == "engine_dead"
    *_, error, done = [line for line in streamed.text.split("\n\n") if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert done == "data: [DONE]"
    later = [httpx.get(live.url + path) for path in ("/health", "/ready")]
    for response in (*later, httpx.post(live.url + COMPLETIONS, json=ENDLESS)):
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


def test_health_turns_red_when_work_stands_still(serve: Serve) -> None:
    live = serve(stall_limit_s=0.05)
    live.gate.close()
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: httpx.get(live.url + "/health").status_code == 503)
        assert httpx.get(live.url + "/ready").status_code == 503
        live.gate.open()
        eventually(lambda: httpx.get(live.url + "/health").status_code == 200)


def test_a_shutdown_ends_what_is_open_and_refuses_what_comes(serve: Serve) -> None:
    live = serve(**SLOW)
    loop = live.context.client._loop
    with httpx.stream("POST", live.url + COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        loop.call_soon_threadsafe(lambda: loop.create_task(live.app.state.models.stop(0.0)))
        frames = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(frames[-2])["error"]["code"] == "shutting_down"
    assert frames[-1] == "[DONE]"
    refused = httpx.post(live.url + COMPLETIONS, json=ENDLESS)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert httpx.get(live.url + "/ready").status_code == 503
    assert httpx.get(live.url + "/health").status_code == 200


def test_a_request_that_is_still_being_sent_holds_up_no_shutdown() -> None:
    live = Live()
    with live.serving():
        host, port = live.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        )
        assert httpx.get(live.url + "/health").status_code == 200
    with connection:
        assert connection.recv(1) == b""


def test_a_stop_string_ends_its_choices_in_the_engine_too(serve: Serve) -> None:
    live = serve(step_s=0.01)
    answer = httpx.post(live.url + COMPLETIONS, json={**ENDLESS, "stop": "n", "n": 2}).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    live.check_idle()
    assert (live.engine.stats.aborted[AbortCause.STOP_STRING], aborted(live)) == (2, 0)
    assert live.engine.stats.generation_tokens < 100
