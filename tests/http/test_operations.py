"""Keys, ids, CORS, probes, /metrics, /load, /version and /v1/models."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from harness import Live, eventually

Serve = Callable[..., Live]
GUARDED = (
    "/v1/models", "/v1/models/parrot", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/metrics",
    "/version", "/load", "/docs", "/openapi.json", "/nowhere", "/health/", "//health", "/v1/engine/live", "/page", "/page/",
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
        assert [http.get(locked + path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_each_key_opens(locked: str) -> None:
    for key in (b"first", "sécond".encode()):
        for scheme in (b"Bearer ", b"bearer  "):
            assert httpx.get(locked + "/v1/models", headers={b"authorization": scheme + key}).status_code == 200


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
    caplog.set_level("INFO", logger="server.middleware")
    http.post("/v1/completions", json={"prompt": "hello|", "n": 2, "max_tokens": 3, "ignore_eos": True})
    eventually(lambda: bool(caplog.records))
    (record,) = caplog.records
    fields = vars(record)
    assert (fields["status"], fields["prompt_tokens"], fields["completion_tokens"]) == (200, 6, 6)
    assert fields["preemptions"] == 0
    assert {"queue_s", "prefill_s", "decode_s", "seconds"} <= fields.keys()
    assert "completion_tokens 6" in record.getMessage()
