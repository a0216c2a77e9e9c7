"""Traces, as a collector receives them: spans, times, statuses; and a collector that is slow or dead."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from harness import Live, eventually
from otlp_receiver import Collector, Received, collecting

from engine.core.errors import ConfigError
from engine.core.rows import SequenceSlice
from server.settings.app_config import AppConfig
from server.telemetry import otlp, tracing
from server.telemetry.otlp_endpoint import find_endpoint
from tests.http.harness import APP, CONFIG
from tests.patience import PATIENCE_S

SERVER, INTERNAL = 2, 1  # kinds in OTLP
UNSET, ERROR = 0, 2  # statuses
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the prompt's own words"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Live, Collector]]:
    """A traced server and its collector, which most tests share."""
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with Live(otlp_traces_endpoint=collector.url).serving() as live:
            yield live, collector


@pytest.fixture
def traced(shared: tuple[Live, Collector]) -> Live:
    """The shared server, whose collector has all earlier spans and forgot them."""
    live, collector = shared
    live.check_idle()
    counts = live.context.otlp.counts
    eventually(lambda: counts.sent == counts.queued)
    collector.spans.clear()
    return live


@pytest.fixture
def received(shared: tuple[Live, Collector]) -> Collector:
    """The shared server's collector."""
    return shared[1]


def complete(live: Live, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    body = {"prompt": f"{SECRET}|", "max_tokens": 5, "temperature": 0.5} | fields
    return httpx.post(
        f"{live.url}/v1/completions", json=body, headers=headers, verify=False
    )  # certificates load slowly


def check_tree(spans: list[Received]) -> None:
    """Children begin and end within their parent, one after the other."""
    root = spans[0]
    assert all(span.trace_id == root.trace_id for span in spans)
    for child in spans[1:]:
        assert child.parent_id == root.span_id
        assert child.kind == INTERNAL
        # Parent and child are read off two clocks, a moment apart.
        assert root.begun_ns - 5_000_000 <= child.begun_ns <= child.ended_ns <= root.ended_ns + 5_000_000


def test_a_request_is_one_server_span_with_its_parts(traced: Live, received: Collector) -> None:
    answer = complete(traced, stop=["own"])
    spans = received.trace(4)
    root, queue, prefill, decode = spans
    check_tree(spans)
    assert [span.name for span in spans] == ["text_completion parrot", "queue", "prefill", "decode"]
    assert root.kind == SERVER
    assert root.status == UNSET
    assert root.parent_id == ""
    assert queue.ended_ns == pytest.approx(prefill.begun_ns, abs=1000)
    assert prefill.ended_ns == pytest.approx(decode.begun_ns, abs=1000)
    assert root.schema_url == tracing.SCHEMA_URL
    assert root.resource["service.name"] == "quire"
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "parrot",
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "parrot",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(SECRET) + 1,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "quire.request.id": answer.headers["x-request-id"],
    }
    assert root.attributes == expected
    assert decode.attributes == {"quire.choice.tokens": 5}
    names, flags = answer.headers["traceparent"].rsplit("-", 1)
    assert names == f"00-{root.trace_id}-{root.span_id}"
    assert int(flags, 16) & 1  # sampled; level 2 of the standard has a second flag
    sent = json.dumps([span._asdict() for span in received.spans])
    assert SECRET not in sent
    assert answer.json()["choices"][0]["text"] not in sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_valid_parent_is_continued(traced: Live, received: Collector, *, stream: bool) -> None:
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    answer = complete(traced, parent, stream=stream)
    root = received.trace(4)[0]
    assert (root.trace_id, root.parent_id) == (TRACE, PARENT)
    assert root.attributes["gen_ai.request.stream"] is stream
    assert answer.headers["traceparent"] == f"00-{TRACE}-{root.span_id}-01"
    assert "tracestate" not in answer.headers


INVALID = [
    [f"00-{'0' * 32}-{PARENT}-01"],
    [f"00-{TRACE}-{'0' * 16}-01"],
    [f"ff-{TRACE}-{PARENT}-01"],
    [f"00-{TRACE.upper()}-{PARENT}-01"],
    [f"00-{TRACE}-{PARENT}-01-more"],
    [f"00-{TRACE}-{PARENT}"],
    ["nonsense"],
    [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-01"],  # sent twice
]


@pytest.mark.parametrize("given", INVALID)
def test_an_invalid_parent_is_ignored(traced: Live, received: Collector, given: list[str]) -> None:
    body = {"prompt": "a|", "max_tokens": 1}
    headers = [("traceparent", value) for value in given]
    answer = httpx.post(f"{traced.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    root = received.trace(4)[0]
    assert root.trace_id != TRACE
    assert root.parent_id == ""


def test_the_sampled_flag_is_respected(traced: Live, received: Collector) -> None:
    answer = complete(traced, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "00")
    assert span_id not in (PARENT, "0" * 16)
    complete(traced)
    assert received.trace(4)[0].trace_id != TRACE
    assert not any(span.trace_id == TRACE for span in received.spans)


def test_probes_and_scrapes_are_not_traced(traced: Live, received: Collector) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert (
            "traceparent"
            not in httpx.get(traced.url + path, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}).headers
        )
    complete(traced)
    received.trace(4)
    assert len(received.spans) == 4


def test_every_prompt_and_choice_has_its_spans(traced: Live, received: Collector) -> None:
    complete(traced, prompt=["ab|", "cd|"], n=2)
    spans = received.trace(1 + 2 * (2 + 2))
    check_tree(spans)
    decodes = [span.attributes for span in spans if span.name == "decode"]
    assert sorted((each["quire.prompt.index"], each["quire.choice.index"]) for each in decodes) == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert spans[0].attributes["gen_ai.request.choice.count"] == 2
    assert spans[0].attributes["gen_ai.response.finish_reasons"] == ["stop"] * 4


def test_a_thousand_choices_do_not_make_a_thousand_spans(
    traced: Live, received: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.telemetry.tracing.MAX_CHILDREN", 3)
    complete(traced, n=8)
    assert [span.name for span in received.trace(4)][1:] == ["queue", "prefill", "decode"]


def test_embeddings_have_a_queue_and_a_prefill(traced: Live, received: Collector) -> None:
    assert httpx.post(f"{traced.url}/v1/embeddings", json={"input": "abc"}).status_code == 200
    spans = received.trace(3)
    assert [span.name for span in spans] == ["embeddings parrot", "queue", "prefill"]
    assert spans[0].attributes["gen_ai.usage.input_tokens"] == 3
    assert "gen_ai.request.max_tokens" not in spans[0].attributes


def test_a_refused_request_is_no_error_of_the_server(traced: Live, received: Collector) -> None:
    assert complete(traced, max_tokens=-1).status_code == 400
    (root,) = received.trace(1)
    assert (root.name, root.status) == ("POST /v1/completions", UNSET)
    assert root.attributes["http.response.status_code"] == 400
    assert "error.type" not in root.attributes


def test_an_unknown_route_has_no_route(traced: Live, received: Collector) -> None:
    assert httpx.post(f"{traced.url}/nowhere", json={}).status_code == 404
    (root,) = received.trace(1)
    assert (root.name, root.status, "http.route" in root.attributes) == ("POST", UNSET, False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_request_is_an_error(collector: Collector, serve: Callable[..., Live], *, stream: bool) -> None:
    def fail(piece: SequenceSlice) -> str | None:
        return "a fault" if piece.start >= 8 else None

    live = serve(otlp_traces_endpoint=collector.url, fail=fail)
    answer = complete(live, stream=stream, prompt="abc", max_tokens=50)
    assert answer.status_code == (200 if stream else 500)
    spans = collector.trace(4)
    assert spans[0].status == ERROR
    assert spans[0].attributes["error.type"] == "compute_error"
    assert spans[0].attributes["http.response.status_code"] == answer.status_code


@pytest.mark.parametrize("stream", [False, True])
def test_an_abandoned_request_ends_its_span(traced: Live, received: Collector, *, stream: bool) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 400, "stream": stream})
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    traced.gate.close()
    with socket.create_connection(("127.0.0.1", httpx.URL(traced.url).port or 0)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        eventually(lambda: traced.context.client.num_open == 1)
    eventually(lambda: traced.context.client.num_open == 0)  # before the engine can answer
    traced.gate.open()
    spans = received.trace(1)
    assert spans[0].status == UNSET
    assert spans[0].attributes["quire.abandoned"] is True
    assert "error.type" not in spans[0].attributes


def test_an_abandoned_stream_keeps_the_parts_it_had(collector: Collector, serve: Callable[..., Live]) -> None:
    live = serve(otlp_traces_endpoint=collector.url, step_s=0.005)
    body = {"prompt": "abc", "max_tokens": 400, "stream": True}
    with httpx.Client(base_url=live.url) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    spans = collector.trace(4)
    assert [span.name for span in spans[1:]] == ["queue", "prefill", "decode"]
    assert spans[0].attributes["quire.abandoned"] is True
    check_tree(spans)


def test_a_stream_that_the_shutdown_ends_is_an_error(collector: Collector, serve: Callable[..., Live]) -> None:
    live = serve(otlp_traces_endpoint=collector.url, step_s=0.002)
    body = {"prompt": "abc", "max_tokens": 400, "stream": True}
    with httpx.Client(base_url=live.url) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.engine.order_stop(0.0)
        assert any("shutting down" in line for line in lines)
    root = collector.trace(4)[0]
    assert (root.status, root.attributes["error.type"]) == (ERROR, "shutting_down")
    assert "quire.abandoned" not in root.attributes


def test_preemptions_are_events(collector: Collector, serve: Callable[..., Live]) -> None:
    small = replace(CONFIG, num_blocks=10, max_num_seqs=4, enable_prefix_caching=False)
    live = serve(otlp_traces_endpoint=collector.url, config=small)
    complete(live, prompt=["abc", "def", "ghi"], max_tokens=60)
    eventually(lambda: any(span.kind == SERVER for span in collector.spans))
    decodes = [span for span in collector.spans if span.name == "decode"]
    counts = [span.attributes.get("quire.preemptions", 0) for span in decodes]
    assert sum(counts) == live.engine.stats.preemptions > 0
    assert [len(span.events) for span in decodes] == counts
    assert {name for span in decodes for name in span.events} == {"quire.preempted"}


def test_a_line_of_a_batch_is_a_trace_of_its_own(
    collector: Collector, serve: Callable[..., Live], tmp_path: Path
) -> None:
    live = serve(otlp_traces_endpoint=collector.url, data_dir=tmp_path)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ab|", "max_tokens": 2}}
    with httpx.Client(base_url=live.url) as client:
        uploaded = client.post(
            "/v1/files", files={"file": ("b.jsonl", json.dumps(line))}, data={"purpose": "batch"}
        ).json()
        body = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=body).json()
        eventually(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    spans = collector.trace(4, "text_completion parrot")
    check_tree(spans)
    assert (spans[0].kind, spans[0].parent_id, spans[0].status) == (INTERNAL, "", UNSET)
    assert spans[0].attributes["quire.batch"] is True
    assert [span.name for span in spans[1:]] == ["queue", "prefill", "decode"]


def span_counts(live: Live) -> dict[str, float]:
    lines = httpx.get(f"{live.url}/metrics", verify=False).text.splitlines()
    shown = [line.rsplit(" ", 1) for line in lines if line.startswith("quire_trace_spans")]
    return {name.removeprefix("quire_trace_spans_"): float(value) for name, value in shown}


def test_a_hanging_collector_delays_no_request_and_no_end(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "MAX_QUEUED", 16)
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE_S))  # a batch given up would make room in the queue
    collector.gate.clear()
    with Live(otlp_traces_endpoint=collector.url).serving() as live:
        for _ in range(12):
            assert complete(live).status_code == 200
        assert collector.asked.wait(PATIENCE_S)
        # A request's spans end just after its answer. All but the queue and the batch that hangs are dropped.
        eventually(lambda: span_counts(live)['dropped_total{reason="queue_full"}'] >= 12 * 4 - 16 - 4)
        assert span_counts(live)["sent_total"] == 0
    # Left, with the collector still silent.
    assert not collector.gate.is_set()


def test_a_dead_collector_is_reported_once_and_its_spans_are_counted(
    serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    monkeypatch.setattr(otlp, "FLUSH_S", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # not listening
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        live = serve(otlp_traces_endpoint=address)
        for sent in (4, 8):
            assert complete(live).status_code == 200
            eventually(lambda sent=sent: span_counts(live)['dropped_total{reason="export_failed"}'] == sent)
    assert caplog.text.count(f"{address}/v1/traces does not take spans") == 1


def test_the_collector_s_headers_come_from_the_environment(
    collector: Collector, serve: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.url}/")
    complete(serve())
    root = collector.trace(4)[0]
    assert root.resource["service.name"] == "shop"
    assert collector.headers[0]["authorization"] == "Basic abc"


def test_without_an_address_nothing_is_imported_and_no_header_is_sent(live: Live) -> None:
    """FastAPI imports opentelemetry-api itself; the SDK and the exporter are ours."""
    assert live.context.tracing is None
    assert "traceparent" not in complete(live).headers
    assert not span_counts(live)
    code = (
        "import sys, server.app; from server.telemetry.otlp_endpoint import find_endpoint as find; "
        "from tests.http.harness import APP; assert find(APP) is None; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    path = f"{ROOT}:{ROOT / 'tests' / 'http'}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def app(**fields: str) -> AppConfig:
    return replace(APP, **fields)


ADDRESSES = [
    (app(), {}, None),
    (app(otlp_traces_endpoint="http://c:4318"), {}, "http://c:4318/v1/traces"),
    (app(otlp_traces_endpoint="https://c/otlp/traces"), {}, "https://c/otlp/traces"),
    (app(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/base/"}, "http://c:4318/base/v1/traces"),
    (
        app(),
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"},
        "http://t/x",
    ),
    (app(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, None),
    (app(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, None),
]


@pytest.mark.parametrize(("config", "environment", "expected"), ADDRESSES)
def test_the_address_of_traces(config: AppConfig, environment: dict[str, str], expected: str | None) -> None:
    assert find_endpoint(config, environment=environment) == expected


@pytest.mark.parametrize("address", ["grpc://c:4317", "c:4317", "http://", "http://c:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="otlp-traces-endpoint"):
        find_endpoint(app(otlp_traces_endpoint=address), environment={})


def test_an_address_of_the_environment_that_is_none_is_a_warning() -> None:
    said: list[str] = []
    assert find_endpoint(app(), said.append, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "localhost:4317"}) is None
    assert len(said) == 1
    assert said[0].startswith("traces are not exported: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is 'localhost:4317'")


def test_a_missing_package_is_an_error_for_the_flag_and_a_warning_for_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.telemetry.otlp_endpoint.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-serve\[otel\]'"):
        find_endpoint(app(otlp_traces_endpoint="http://c"), environment={})
    said: list[str] = []
    assert find_endpoint(app(), said.append, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}) is None
    assert len(said) == 2
    assert "not installed" in said[1]
