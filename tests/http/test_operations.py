"""Keys, ids, CORS, probes, /metrics, /load, /version and /v1/models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from harness import Live, eventually

from server.operations.unserved import UNSERVED

Serve = Callable[..., Live]
GUARDED = (
    "/v1/models", "/v1/models/parrot", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/load", "/docs",
    "/openapi.json", "/nowhere", "//health", "/v1/engine/live", "/page", "/page/", "/v1/audio/speech", "/metrics/x", "/versions",
)  # fmt: skip


def test_the_lag_of_the_event_loop_is_shown(http: httpx.Client) -> None:
    def lag_s() -> float:
        [value] = re.findall(r"^quire_event_loop_lag_seconds (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return float(value)

    eventually(lambda: lag_s() > 0)  # no timer is on time, so it has been sampled


@pytest.fixture
def locked(serve: Serve) -> str:
    return serve(api_keys=("first", "sécond")).url


@pytest.mark.parametrize("header", [None, "", "first", "Bearer", "Bearer firs", "Bearer firstt", "Basic first"])
def test_without_a_key_nothing_but_the_probes_answers(locked: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    with httpx.Client(headers=headers) as http:
        for path in GUARDED:
            for method in ("GET", "POST", "OPTIONS"):
                response = http.request(method, locked + path)  # as spelled: a base_url would take //health for a host
                assert response.status_code == 401, (method, path)
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
        for path in ("/health", "/ready", "/metrics", "/version", "/health/"):
            assert http.get(locked + path).status_code == 200, path


def test_metrics_may_be_protected_but_probes_are_not(serve: Serve) -> None:
    live = serve(api_keys=("k",), protect_metrics=True)
    for path in ("/metrics", "/version", "/metrics/"):
        assert httpx.get(live.url + path).status_code == 401
        assert httpx.get(live.url + path, headers={"x-api-key": "k"}).status_code == 200
    probes = [httpx.get(live.url + path) for path in ("/health", "/ready")]
    assert [(probe.status_code, probe.text) for probe in probes] == [(200, "ok\n")] * 2
    described = httpx.get(live.url + "/openapi.json", headers={"x-api-key": "k"}).json()["paths"]
    assert [path for path in described if described[path].get("get", {}).get("security") == []] == ["/health", "/ready"]


def test_each_key_opens(locked: str) -> None:
    for key in (b"first", "sécond".encode()):
        for scheme in (b"Bearer ", b"bearer  "):
            assert httpx.get(locked + "/v1/models", headers={b"authorization": scheme + key}).status_code == 200
        assert httpx.get(locked + "/v1/models", headers={b"x-api-key": key}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_either_header_opens_whatever_the_other_says(locked: str, path: str) -> None:
    """Claude Code sends both; each is compared with every key."""
    for right in ("first", "sécond"):
        for wrong in ("wrong", ""):
            for bearer, other in ((right, wrong), (wrong, right), (right, right)):
                headers = {"authorization": f"Bearer {bearer}".strip().encode(), "x-api-key": other.encode()}
                assert httpx.get(locked + path, headers=headers).status_code == 200, (bearer, other)
    assert httpx.get(locked + path, headers={"authorization": "Bearer wrong", "x-api-key": "wrong"}).status_code == 401


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_key_that_is_there_twice_is_refused(locked: str, name: str) -> None:
    key = "Bearer first" if name == "authorization" else "first"
    refused = httpx.get(locked + "/v1/models", headers=[(name, key), (name, key)])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_header")


def test_an_empty_key_opens_nothing_whatever_is_configured(serve: Serve) -> None:
    """Settings refuse it; if one came through nevertheless, it is no key."""
    live = serve(api_keys=("",))
    for headers in ({}, {"authorization": "Bearer"}, {"x-api-key": ""}, {"authorization": "", "x-api-key": b"\xa0"}):
        assert httpx.get(live.url + "/v1/models", headers=headers).status_code == 401


def test_a_clients_request_id_comes_back_but_is_never_the_engines(live: Live, http: httpx.Client) -> None:
    fields = {"prompt": "hello|"}
    answers = [http.post("/v1/completions", json=fields, headers={"x-request-id": "mine"}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert http.get("/version").headers["x-request-id"] != http.get("/version").headers["x-request-id"]


def test_cors_is_off_unless_origins_are_named(live: Live, serve: Serve) -> None:
    headers = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in httpx.get(live.url + "/version", headers=headers).headers
    opened = serve(allowed_origins=("https://a.example",), api_keys=("k",))
    preflight = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    response = httpx.options(opened.url + "/v1/completions", headers=preflight)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://a.example")
    other = httpx.get(opened.url + "/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


ASKED = {
    "/v1/completions": {"prompt": "hi|"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("end", ["/", "//"])
def test_a_slash_at_the_end_of_a_path_changes_nothing(http: httpx.Client, end: str) -> None:
    described = http.get("/openapi.json").json()["paths"]
    plain = [path for path, methods in described.items() if "get" in methods and "{" not in path]
    assert len(plain) >= 8
    for path in (*plain, "/openapi.json", "/page/chat.js"):
        answer, slashed = http.get(path), http.get(path + end)
        assert (slashed.status_code, slashed.history) == (answer.status_code, []), path
    assert http.get("/v1/models/parrot" + end).json()["id"] == "parrot"
    for path, fields in ASKED.items():
        answered = http.post(path + end, json=fields)
        assert answered.status_code == 200, (path, answered.text)
        shown = http.get("/v1/requests/" + answered.headers["x-request-id"] + end)
        assert path == "/tokenize" or shown.json()["endpoint"] == path
    wrong = http.post("/v1/messages" + end, json={})
    assert wrong.json()["type"] == "error", "in Anthropic's words with a slash, too"


def test_an_upload_may_end_in_a_slash_and_has_its_own_limit(serve: Serve, tmp_path: Path) -> None:
    live = serve(data_dir=tmp_path, max_body_bytes=1000)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x" * 2000}}
    files = {"file": ("lines.jsonl", json.dumps(line).encode())}
    answered = httpx.post(live.url + "/v1/files/", data={"purpose": "batch"}, files=files)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/audio/speech", "no audio"), ("/v1/audio/", "no audio"), ("/v1/audio/transcriptions", "no audio"), ("/v1/audio/translations", "no audio"),
        ("/v1/realtime", "no audio"), ("/v1/images/generations", "images"), ("/v1/images/edits", "images"), ("/v1/videos", "images"),
        ("/v1/pooling", "/pooling"), ("/v1/pooling/", "/pooling"),
        ("/v1/assistants", "/v1/responses"), ("/v1/conversations", "previous_response_id"),
        ("/v2/embed", "/v1/embeddings"), ("/info", "/server_info"), ("/v1/threads/t/messages", "/v1/responses"), ("/v1/fine_tuning/jobs", "--lora-modules"),
        ("/api/chat", "/v1"), ("/api/tags", "/v1"), ("/completion", "/v1/completions"), ("/v1/uploads", "/v1/files"),
        ("/v1/messages/batches", "/v1/batches"), ("/reset_prefix_cache", "cache_salt"), ("/sleep", "stop the daemon"), ("/flush_cache", "cache_salt"), ("/slots", "/v1/requests"), ("/ping", "/health"),
    ],
)  # fmt: skip
def test_what_quire_does_not_do_is_a_404_that_says_what_to_use(http: httpx.Client, path: str, instead: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        refused = http.request(method, path)
        assert refused.status_code == 404, path
        assert instead in refused.json()["error"]["message"]
        assert refused.json().get("type") == "error" or refused.json()["error"]["code"] == "not_found"


def test_a_conversation_is_not_compacted(http: httpx.Client) -> None:
    """The path is also that of a response, which is read by GET."""
    refused = http.post("/v1/responses/compact", json={"model": "parrot", "input": "x"})
    assert (refused.status_code, "ask for a summary" in refused.text) == (404, True)


def test_what_a_404_recommends_is_there(http: httpx.Client) -> None:
    served = http.get("/openapi.json").json()["paths"]
    for message in UNSERVED.values():
        for path in re.findall(r"/v1/[a-z/]+", message):
            assert path in served, message


def test_models_are_listed_under_every_name(http: httpx.Client) -> None:
    cards = http.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [(card["id"], card["root"], card["max_model_len"]) for card in cards["data"]] == [
        ("parrot", "some/parrot", 512),
        ("bird", "some/parrot", 512),
    ]
    assert http.get("/v1/models/bird").json() == cards["data"][1]


def test_head_is_get_without_the_body(http: httpx.Client) -> None:
    for path in (
        "/health",
        "/ready",
        "/version",
        "/v1/models",
        "/v1/models/bird",
        "/metrics",
        "/openapi.json",
        "/load",
    ):
        answer, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers.get("content-type") == answer.headers.get("content-type")
        assert "x-request-id" in head.headers
    assert http.get("/health").status_code == 200, "the connection is in order"
    assert http.head("/v1/models/nobody").status_code == 404
    assert http.head("/v1/completions").status_code == 405


def test_a_model_name_may_hold_slashes(serve: Serve) -> None:
    live = serve(served_model_names=("org/model",))
    assert httpx.get(live.url + "/v1/models/org/model").json()["id"] == "org/model"


def test_metrics_count_requests_by_route_and_status(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "hello|"})
    http.post("/v1/completions", json={})
    http.get("/nowhere")
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'quire_http_requests_total{method="POST",route="/v1/completions",status="200"}',
        'quire_http_requests_total{method="POST",route="/v1/completions",status="400"}',
        'quire_http_requests_total{method="GET",route="unmatched",status="404"}',
        "quire_generation_tokens_total",
    ):
        assert line in response.text


def test_load_counts_what_is_open(serve: Serve) -> None:
    live = serve()
    live.gate.close()
    assert httpx.get(live.url + "/load").json() == {"server_load": 0}
    with httpx.stream("POST", live.url + "/v1/completions", json={"prompt": "hello|", "stream": True}) as response:
        assert httpx.get(live.url + "/load").json() == {"server_load": 1}
        live.gate.open()
        response.read()
    eventually(lambda: httpx.get(live.url + "/load").json() == {"server_load": 0})


def test_version(http: httpx.Client) -> None:
    assert set(http.get("/version").json()) == {"version"}


def test_a_generating_request_ends_in_one_log_line_with_its_counts(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="server.http.middleware")
    http.post("/v1/completions", json={"prompt": "hello|", "n": 2, "max_tokens": 3, "ignore_eos": True})
    eventually(lambda: bool(caplog.records))
    (record,) = caplog.records
    fields = vars(record)
    assert (fields["status"], fields["prompt_tokens"], fields["completion_tokens"]) == (200, 6, 6)
    assert fields["preemptions"] == 0
    assert {"queue_s", "prefill_s", "decode_s", "seconds"} <= fields.keys()
    assert "completion_tokens 6" in record.getMessage()
