"""deadline_ms and max_queue_ms over HTTP: refused when they make no sense, 408 when they cannot be kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from harness import CONFIG, Live, eventually
from test_lifecycle import CHAT, COMPLETIONS, ENDLESS, SLOW, asked

from engine.core.stats import Target

Serve = Callable[..., Live]
ONE_AT_A_TIME = replace(CONFIG, max_num_seqs=1)
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 4},
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "parrot"},
    "/v1/embeddings": {"input": "x"},
}


@pytest.mark.parametrize("field", ["max_queue_ms", "deadline_ms"])
def test_what_waits_too_long_is_a_408_on_every_path(serve: Serve, field: str) -> None:
    live = serve(config=ONE_AT_A_TIME, **SLOW)
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == 1)
        for path, body in BODIES.items():
            response = httpx.post(live.url + path, json={**body, field: 20})
            assert response.status_code == 408, path
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert f"{field} is 20" in error["message"]
            assert error["type"] == "timeout_error"
            assert path == "/v1/messages" or error["code"] == "deadline_unreachable"
            ended = httpx.get(f"{live.url}/v1/requests/{response.headers['x-request-id']}").json()
            assert [event["event"] for event in ended["history"]] == ["received", "dropped", "finished"]
            assert ended["metrics"] is None
        assert live.engine.stats.num_running == 1, "nobody else is harmed"
    stats = live.engine.stats
    target = Target.QUEUE if field == "max_queue_ms" else Target.DEADLINE
    assert stats.dropped[target] == stats.missed[target] == stats.targeted == len(BODIES)
    assert f'reason="{target.value}"}} {len(BODIES)}.0' in httpx.get(live.url + "/metrics").text


def test_a_prompt_dropped_beside_one_that_ran_leaves_a_true_history(serve: Serve) -> None:
    live = serve(config=ONE_AT_A_TIME, **SLOW)
    fields = {"prompt": ["endless", "x", "y"], "max_tokens": 100, "max_queue_ms": 2000}
    response = httpx.post(live.url + COMPLETIONS, json=fields)
    assert response.status_code == 408
    ended = httpx.get(f"{live.url}/v1/requests/{response.headers['x-request-id']}").json()
    names = [event["event"] for event in ended["history"]]
    assert names == ["received", "scheduled", "first_token", "last_token", "finished"]
    assert ended["history"][1]["at_s"] < 2.0
    assert ended["metrics"]["queue_time_ms"] < 2000


def test_a_stream_that_has_begun_ends_on_an_error(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server")
    live = serve(config=ONE_AT_A_TIME, **SLOW)
    with asked(live, COMPLETIONS, **ENDLESS):
        eventually(lambda: live.engine.stats.num_running == 1)
        fields = {"prompt": "x", "stream": True, "max_queue_ms": 20}
        response = httpx.post(live.url + COMPLETIONS, json=fields)
    assert response.status_code == 200
    *_, error, done = [part for part in response.text.split("\n\n") if part]
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_unreachable"
    eventually(lambda: ", completion_tokens 0, finish_reason dropped, " in caplog.text)


@pytest.mark.parametrize("field", ["max_queue_ms", "deadline_ms"])
@pytest.mark.parametrize("value", [0, -1, 86_400_001, 1.5, "20", True])
def test_times_that_make_no_sense_are_refused(http: httpx.Client, field: str, value: object) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "x|", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_an_answer_in_time_is_like_any_other_and_counted(serve: Serve) -> None:
    live = serve()
    plain = httpx.post(live.url + COMPLETIONS, json={"prompt": "hello|"}).json()
    fields = {"prompt": "hello|", "deadline_ms": 60_000, "max_queue_ms": 60_000}
    assert httpx.post(live.url + COMPLETIONS, json=fields).json()["choices"] == plain["choices"]
    assert httpx.get(live.url + "/v1/engine/live").json()["targets"] == {"held": 1, "met": 1}
