"""Tenants over HTTP: keys, limits and their headers on every endpoint, the ledger, the metrics, and who is whose."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from harness import CONFIG, Live, eventually
from test_cli import quire, read_until, ready

FILE = """
tiers: {free: {max_concurrent_requests: 1}}
tenants:
  - {name: acme, key: acme-key, weight: 4}
  - {name: hobby, key: hobby-key, tier: free}
  - {name: poor, key: poor-key, tokens_per_minute: 30}
"""
ENDPOINTS = {
    "/v1/completions": {"prompt": "abc|", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "abc"},
    "/v1/score": {"text_1": "abc", "text_2": "def"},
}


@pytest.fixture
def live(serve: Callable[..., Live], tmp_path: Path) -> Live:
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE, encoding="utf-8")
    return serve(tenants=path, api_keys=("plain",), config=replace(CONFIG, policy="fair"))


def client(live: Live, key: str) -> httpx.Client:
    return httpx.Client(base_url=live.url, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize(("operators", "status"), [(("plain",), 403), ((), 200)])
def test_protected_metrics_are_the_operators(
    serve: Callable[..., Live], tmp_path: Path, operators: tuple[str, ...], status: int
) -> None:
    """Without a key of --api-key there is none but a tenant's for Prometheus to send."""
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE, encoding="utf-8")
    live = serve(tenants=path, api_keys=operators, protect_metrics=True)
    with client(live, "acme-key") as acme:
        assert acme.get("/metrics").status_code == status
    for key in operators:
        with client(live, key) as operator:
            assert operator.get("/metrics").status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_endpoint_is_limited(live: Live, path: str) -> None:
    with client(live, "hobby-key") as hobby:
        live.gate.close()
        with hobby.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 5, "stream": True}) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "0"
            refused = hobby.post(path, json=ENDPOINTS[path])
            assert refused.status_code == 429
            assert refused.headers["x-ratelimit-limit-requests"] == "1"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "Tenant hobby has 1 requests open" in refused.json()["error"]["message"]
            live.gate.open()
            stream.read()
        eventually(lambda: live.context.tenancy.find(["hobby-key"]).num_open == 0)
        answered = hobby.post(path, json=ENDPOINTS[path])
        assert answered.status_code == 200, answered.text


def test_tokens_a_minute_are_spent_on_prompts_and_answers(live: Live) -> None:
    with client(live, "poor-key") as poor:
        answered = poor.post("/v1/completions", json={"prompt": "12345678|", "max_tokens": 60, "ignore_eos": True})
        assert answered.status_code == 200
        assert answered.headers["x-ratelimit-limit-tokens"] == "30"
        eventually(lambda: live.context.tenancy.find(["poor-key"]).num_open == 0)
        refused = poor.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        assert 70 < float(refused.headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 140
        assert int(refused.headers["retry-after"]) >= 60


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_header_counts_the_answer_that_it_comes_with(
    live: Live, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = live.context.tenancy.find(["poor-key"])
    monkeypatch.setattr(account, "_clock", lambda: account._filled_s)  # nothing is refilled meanwhile
    with client(live, "poor-key") as poor:
        answered = poor.post(path, json=ENDPOINTS[path])
        assert answered.status_code == 200, answered.text
        eventually(lambda: account.num_open == 0)
        later = poor.get("/v1/models")  # served after the charge, which this thread could read too early
        left = int(answered.headers["x-ratelimit-remaining-tokens"])
        assert left == int(later.headers["x-ratelimit-remaining-tokens"]) == int(account._tokens) < 30


def test_the_header_of_a_stream_is_sent_before_its_answer(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    account = live.context.tenancy.find(["poor-key"])
    monkeypatch.setattr(account, "_clock", lambda: account._filled_s)
    live.gate.close()
    body = {"prompt": "abc|", "max_tokens": 3, "stream": True}
    with client(live, "poor-key") as poor, poor.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.headers["x-ratelimit-remaining-tokens"] == str(30 - len("abc|")), (
            "its prompt is charged, and no more"
        )
        live.gate.open()
        stream.read()
        eventually(lambda: account.num_open == 0)
        assert poor.get("/v1/models").headers["x-ratelimit-remaining-tokens"] == str(30 - len("abc|") - 3)


def test_the_engine_is_told_whose_a_request_is(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key decides; what a client calls its user does not."""
    seen = []
    add = live.scheduler.add
    monkeypatch.setattr(live.scheduler, "add", lambda request: (seen.append(request), add(request)))
    for key in ("acme-key", "hobby-key", "plain"):
        with client(live, key) as asking:
            assert asking.post("/v1/completions", json={"prompt": "a|", "user": "somebody"}).status_code == 200
        eventually(lambda: not live.context.client.num_open)
    assert [(request.tenant, request.weight) for request in seen] == [("acme", 4.0), ("hobby", 1.0), ("default", 1.0)]
    with client(live, "wrong") as asking:
        assert asking.post("/v1/completions", json={"prompt": "a|"}).status_code == 401


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"user": "ann"}),
        ("/v1/completions", {"safety_identifier": "ann"}),
        ("/v1/chat/completions", {"user": "ann", "safety_identifier": "other"}),
        ("/v1/responses", {"user": "ann"}),
        ("/v1/responses", {"safety_identifier": "ann"}),
        ("/v1/messages", {"metadata": {"user_id": "ann"}}),
        ("/v1/embeddings", {"user": "ann"}),
        ("/v1/score", {"user": "ann"}),
    ],
)
def test_without_a_file_users_are_told_apart(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, object]
) -> None:
    live, seen = serve(), []
    add = live.scheduler.add
    monkeypatch.setattr(live.scheduler, "add", lambda request: (seen.append(request), add(request)))
    answered = httpx.post(live.url + path, json={**ENDPOINTS[path], **fields})
    assert answered.status_code == 200, answered.text
    assert {request.tenant for request in seen} == {"ann"}
    assert "x-quire-ignored-fields" not in answered.headers


def test_a_user_is_a_string_of_reasonable_length(serve: Callable[..., Live]) -> None:
    live = serve()
    for user in (5, "x" * 513):
        refused = httpx.post(live.url + "/v1/completions", json={"prompt": "a|", "user": user})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "user"


def test_the_ledger_and_the_metrics_tell_the_tenant(live: Live) -> None:
    with client(live, "acme-key") as acme:
        answered = acme.post("/v1/completions", json={"prompt": "abc|", "max_tokens": 3})
        found = acme.get("/v1/requests/" + answered.headers["x-request-id"]).json()
        assert found["tenant"] == "acme"
        eventually(lambda: live.context.tenancy.find(["acme-key"]).num_open == 0)
        text = acme.get("/metrics").text
    assert 'quire_tenant_requests_total{tenant="acme"} 1.0' in text
    assert 'quire_tenant_requests_open{tenant="acme"} 0.0' in text
    assert 'quire_tenant_tokens_total{kind="prompt",tenant="acme"} 4.0' in text
    assert 'quire_tenant_tokens_total{kind="generation",tenant="acme"} 3.0' in text
    assert 'quire_tenant_time_to_first_token_seconds_count{tenant="acme"} 1.0' in text
    assert "hobby" not in text


def test_a_client_that_leaves_frees_its_place(live: Live) -> None:
    with client(live, "hobby-key") as hobby:
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        live.gate.close()
        with hobby.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200
        live.gate.open()
        eventually(lambda: live.context.tenancy.find(["hobby-key"]).num_open == 0)
        assert hobby.post("/v1/completions", json={"prompt": "a|"}).status_code == 200


def test_a_request_that_the_engine_refuses_counts_for_nothing(live: Live) -> None:
    with client(live, "hobby-key") as hobby:
        refused = hobby.post("/v1/completions", json={"prompt": "a|", "n": 100})
        assert refused.status_code == 400
        assert refused.headers["x-ratelimit-remaining-requests"] == "1"


def test_on_sighup_the_file_is_read_again_and_a_faulty_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: [{name: a, key: first}]", encoding="utf-8")
    with quire("serve", "--tenants", str(path), "--api-key", "plain") as process:
        read_until(process, "(listening) on")
        process.send_signal(signal.SIGHUP)  # before it is ready, which ended it
        url = ready(process)

        def is_let_in(key: str) -> bool:
            return httpx.get(url + "/v1/models", headers={"x-api-key": key}).status_code == 200

        assert (is_let_in("first"), is_let_in("second")) == (True, False)
        path.write_text("tenants: [{name: a, key: second}]", encoding="utf-8")
        process.send_signal(signal.SIGHUP)
        eventually(lambda: is_let_in("second"))
        assert not is_let_in("first")
        for fault in ("key: third, weight: -1", "key: [third, plain]"):
            path.write_text(f"tenants: [{{name: a, {fault}}}]", encoding="utf-8")
            process.send_signal(signal.SIGHUP)
            read_until(process, "tenants (stay) as they were")
        assert (is_let_in("second"), is_let_in("third")) == (True, False)


def test_a_search_is_paid_for_in_all_of_its_beams(live: Live) -> None:
    body = {"prompt": "hello|", "max_tokens": 4, "use_beam_search": True, "best_of": 8}
    with client(live, "poor-key") as poor:
        answer = poor.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert "used up its 30 tokens a minute" in poor.post("/v1/completions", json=body).json()["error"]["message"]
