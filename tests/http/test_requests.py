"""What a client is told of its own request: ids, times, its place in the queue, and how it went."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from harness import CONFIG, Live, eventually
from test_completions import stream

from server.answers import respond
from server.telemetry import request_log
from server.telemetry.request_log import LISTED

Post = Callable[..., dict[str, Any]]
PATH = "/v1/completions"
ONE_AT_A_TIME = replace(CONFIG, max_num_seqs=1)


@pytest.mark.parametrize("given", ["x" * 129, "a b", "sch\xf6n", ""])
def test_an_id_that_is_not_sane_is_replaced(http: httpx.Client, given: str) -> None:
    headers = {b"x-request-id": given.encode("latin-1")}
    assert re.fullmatch("[0-9a-f]{32}", http.get("/nowhere", headers=headers).headers["x-request-id"])


def test_what_is_no_http_has_an_id_too(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", connection.recv(4096))


def test_a_plain_answer_says_what_its_time_went_into(http: httpx.Client) -> None:
    fields = {"prompt": "a prompt of more than one block|", "max_tokens": 8}
    http.post(PATH, json=fields)
    header = http.post(PATH, json=fields).headers["server-timing"]
    number = r"[0-9.]+"
    pattern = (
        f'queue;dur={number}, prefill;dur={number}, decode;dur={number}, cached_tokens;desc="16", preemptions;desc="0"'
    )
    assert re.fullmatch(pattern, header)
    assert "server-timing" not in http.post(PATH, json={}).headers


@pytest.mark.parametrize("stop", [None, "l"])
def test_metrics_are_told_when_asked_for(http: httpx.Client, post: Post, stop: str | None) -> None:
    fields = {"prompt": "hello|", "max_tokens": 8, "stop": stop, "n": 2}
    plain, asked = post(PATH, **fields), post(PATH, **fields, include_metrics=True)
    metrics = asked.pop("metrics")
    assert asked.keys() == plain.keys()
    assert asked["choices"] == plain["choices"]
    first_ms = metrics["queue_time_ms"] + metrics["prefill_time_ms"]
    assert metrics["time_to_first_token_ms"] == pytest.approx(first_ms, abs=0.002)
    assert metrics["generation_time_ms"] > 0
    assert metrics["mean_itl_ms"] > 0
    assert metrics["tokens_per_second"] > 0
    assert (metrics["preemptions"], metrics["cached_tokens"]) == (0, 0)
    *chunks, last = stream(http, **fields, include_metrics=True)
    assert not any("metrics" in chunk for chunk in chunks)
    assert (last["choices"], last["metrics"].keys()) == ([], metrics.keys())
    assert last["usage"] == plain["usage"]


def test_one_token_has_no_pace(post: Post) -> None:
    metrics = post(PATH, prompt="hello|", max_tokens=1, include_metrics=True)["metrics"]
    assert (metrics["mean_itl_ms"], metrics["tokens_per_second"]) == (None, None)


@contextmanager
def streaming(live: Live, prompt: str = "hello|", **fields: Any) -> Iterator[httpx.Response]:
    with httpx.stream("POST", live.url + PATH, json={"prompt": prompt, "stream": True, **fields}) as response:
        assert response.status_code == 200
        yield response


def told(live: Live, name: str) -> dict[str, Any]:
    response = httpx.get(f"{live.url}/v1/requests/{name}")
    assert response.status_code == 200, response.text
    return response.json()


def test_a_request_is_told_from_the_queue_to_its_end(serve: Callable[..., Live]) -> None:
    live = serve(config=ONE_AT_A_TIME, step_s=0.05)
    with streaming(live, "endless, and long enough", max_tokens=300) as first, streaming(live, "a secret|") as second:
        name = second.headers["x-request-id"]
        eventually(lambda: told(live, name)["queue"] is not None)
        waiting = told(live, name)
        assert (waiting["state"], waiting["queue"]) == ("waiting", {"position": 1, "num_waiting": 1})
        assert (waiting["endpoint"], waiting["stream"], waiting["metrics"]) == (PATH, True, None)
        assert [event["event"] for event in waiting["history"]] == ["received"]
        eventually(lambda: told(live, first.headers["x-request-id"])["state"] == "running")
        running = told(live, first.headers["x-request-id"])
        [sequence] = running["sequences"]
        assert (sequence["choice"], sequence["state"], sequence["preemptions"]) == (0, "running", 0)
        assert sequence["blocks"] * 16 >= sequence["computed_tokens"] >= 24
        first.close()
        chunks = second.read().decode()
    eventually(lambda: told(live, name)["state"] == "finished")
    ended = told(live, name)
    assert (ended["status"], ended["finish_reasons"]) == (200, ["stop"])
    assert ended["usage"]["completion_tokens"] == len("a secret") + 1
    assert [event["event"] for event in ended["history"]] == [
        "received", "scheduled", "first_token", "last_token", "finished",
    ]  # fmt: skip
    assert [event["at_s"] for event in ended["history"]] == sorted(event["at_s"] for event in ended["history"])
    assert "secret" not in str(ended)
    answer = re.search('"id":"(cmpl-([0-9a-f]+))"', chunks)
    assert answer is not None
    assert told(live, answer[1]) == told(live, answer[2]) == ended


def test_blocks_are_told_by_group_of_layers(serve: Callable[..., Live]) -> None:
    """A window has passed most of the prompt; a state has a slot, and where it is read from another."""
    live = serve(config=replace(CONFIG, windows=(8, 8), state_blocks=3), step_s=0.05)
    with streaming(live, "endless, and " * 6, max_tokens=300) as first:
        name = first.headers["x-request-id"]
        eventually(lambda: told(live, name)["state"] == "running")
        [sequence] = told(live, name)["sequences"]
        found = sequence["blocks_by_group"]
        assert found.keys() == {"full", "window 8", "recurrent"}
        assert sum(found.values()) == sequence["blocks"]
        assert found["full"] >= len("endless, and " * 6) // 16
        assert 2 <= found["window 8"] <= 6, "of both groups"
        assert found["recurrent"] in (3, 6)
        assert httpx.get(f"{live.url}/v1/engine/live").json()["num_groups"] == 4, "the page names the number alone"


def test_who_leaves_the_queue_was_never_scheduled(serve: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    live = serve(config=ONE_AT_A_TIME)
    live.gate.close()
    with streaming(live, "endless"), streaming(live) as second:
        name = second.headers["x-request-id"]
    eventually(lambda: not live.context.client.num_open)  # the server knows that both have left
    live.gate.open()
    eventually(lambda: told(live, name)["state"] == "finished")
    left = told(live, name)
    assert (left["finish_reasons"], left["metrics"]) == ([None], None)
    assert [event["event"] for event in left["history"]] == ["received", "finished"]
    assert f"{name!r}, prompt_tokens 6, cached_tokens 0, completion_tokens 0, finish_reason disconnect" in caplog.text


def test_a_request_nobody_knows_is_a_404(http: httpx.Client) -> None:
    error = http.get("/v1/requests/never").json()["error"]
    assert (error["code"], error["param"]) == ("request_not_found", "id")


def listed(live: Live, key: str = "") -> list[dict[str, Any]]:
    response = httpx.get(f"{live.url}/v1/requests", headers={"authorization": f"Bearer {key}"} if key else {})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def test_the_last_requests_are_listed_with_what_became_of_them(serve: Callable[..., Live]) -> None:
    live = serve()
    assert listed(live) == []
    with httpx.Client(base_url=live.url, headers={"user-agent": "a client/1"}) as http:
        answered = http.post(PATH, json={"prompt": "hello|", "n": 2, "top_a": 1})
        http.post(PATH, json={"prompt": 7})
        http.get("/nowhere")
        http.get("/health")
        http.post("/tokenize", json={"prompt": "hello"})
        live.gate.close()
        with streaming(live, "a secret|"):
            eventually(lambda: len(listed(live)) == 5)
            running, tokenized, missing, refused, first = listed(live)
            live.gate.open()
    assert (running["status"], running["seconds"], running["path"]) == (None, None, PATH)
    assert (tokenized["path"], tokenized["status"], tokenized["usage"]) == ("/tokenize", 200, None)
    assert (missing["method"], missing["status"], missing["error"]["code"]) == ("GET", 404, "not_found")
    assert (refused["status"], refused["error"]["code"], refused["metrics"]) == (400, "invalid_value", None)
    assert refused["error"]["message"].startswith("prompt: must be a string")
    assert (first["status"], first["ignored_fields"], first["error"]) == (200, ["top_a"], None)
    assert (first["address"], first["user_agent"], first["tenant"]) == ("127.0.0.1", "a client/1", None)
    assert first["usage"]["completion_tokens"] == 12
    assert first["metrics"]["time_to_first_token_ms"] >= first["metrics"]["queue_time_ms"]
    assert first["finish_reasons"] == ["stop", "stop"]
    assert first["id"] == answered.headers["x-request-id"][:8]
    assert answered.json()["id"] not in str(listed(live)), "an id of an answer opens it"
    assert "secret" not in str(listed(live))
    eventually(lambda: listed(live)[0]["status"] == 200)


def test_a_stream_that_fails_is_listed_with_its_error(serve: Callable[..., Live]) -> None:
    live = serve(fail=lambda part: "the device is tired" if part.start else None)
    with streaming(live, "hello|") as response:
        response.read()
    eventually(lambda: listed(live)[0]["status"] == 200)
    assert "the device is tired" in listed(live)[0]["error"]["message"]


def test_the_list_is_bounded_and_strangers_do_not_fill_it(serve: Callable[..., Live]) -> None:
    live = serve(api_keys=("k",))
    with httpx.Client(base_url=live.url) as http:
        for _ in range(LISTED + 10):
            http.post("/tokenize", json={"prompt": "hello"}, headers={"authorization": "Bearer k"})
        for _ in range(LISTED + 10):
            assert http.post("/tokenize", json={}).status_code == 401
    found = [each["status"] for each in listed(live, "k")]
    assert (len(found), found.count(401)) == (LISTED, 5)


def test_the_book_forgets_the_oldest(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "RECENT", 2)
    live = serve()
    with httpx.Client(base_url=live.url) as http:
        for name in ("one", "same", "same", "last"):
            http.post(PATH, json={"prompt": "hello|"}, headers={"x-request-id": name})
        assert [http.get(f"/v1/requests/{name}").status_code for name in ("one", "same", "last")] == [404, 200, 200]
    assert len(live.context.request_log._records) == 4  # two names each


def test_the_key_guards_it(serve: Callable[..., Live]) -> None:
    live = serve(api_keys=("k",))
    assert httpx.get(live.url + "/v1/requests/x").status_code == 401


def test_a_silent_stream_is_told_its_place_and_then_that_it_lives(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "STATUS_S", 0.01)
    live = serve(config=ONE_AT_A_TIME, step_s=0.05, sse_keep_alive_interval_s=0.3)
    with streaming(live, "endless", max_tokens=400) as first:
        eventually(lambda: live.engine.stats.num_running == 1)
        with streaming(live, "hello to all of you|", max_tokens=20) as second:
            eventually(lambda: live.engine.stats.num_waiting == 1)
            lines = second.iter_lines()
            heard = up_to(lines, ": ping")
            with streaming(live, "x|") as third:
                late_lines = third.iter_lines()
                late = up_to(late_lines, ": queued, 2 of 2")
                first.close()
                heard += lines
                late += late_lines
    assert heard.index(": queued, 1 of 1") < heard.index(": ping")
    assert heard.count(": queued, 1 of 1") == 1, "a place is told when it changes"
    assert late.index(": queued, 2 of 2") < late.index(": queued, 1 of 1")
    assert heard[-2:] == late[-2:] == ["data: [DONE]", ""]


def up_to(lines: Iterator[str], last: str) -> list[str]:
    """The next lines, as far as this one."""
    found: list[str] = []
    while last not in found:
        found.append(next(lines))
    return found


def test_keep_alive_can_be_turned_off(serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "STATUS_S", 0.01)
    live = serve(config=ONE_AT_A_TIME, step_s=0.02, sse_keep_alive_interval_s=0.0)
    with streaming(live, "endless", max_tokens=10), streaming(live) as second:
        assert "\n:" not in "\n" + second.read().decode()
