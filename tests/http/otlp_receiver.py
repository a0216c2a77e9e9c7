"""A collector: takes OTLP over HTTP on a free loopback port and decodes it with opentelemetry-proto."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.patience import PATIENCE_S, eventually


class Received(NamedTuple):
    """A span as a test reads it."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    status: int
    attributes: dict[str, Any]
    events: list[str]
    resource: dict[str, Any]
    schema_url: str


class Collector:
    """What arrived. While `gate` is cleared, requests are taken and not answered; `status` is the answer's."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.status = 200
        self.url = ""

    def take(self, body: bytes) -> None:
        """Decode a document."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            described = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_received(span, described, scope.schema_url) for span in scope.spans]

    def trace(self, num: int, name: str | None = None) -> list[Received]:
        """Wait for `num` spans of one trace (of that with a span of this name), and return them by their beginning."""
        found: list[Received] = []

        def is_there() -> bool:
            spans = list(self.spans)
            named = [span.trace_id for span in spans if name in (None, span.name)]
            found[:] = [span for span in spans if named and span.trace_id == named[-1]]
            return len(found) >= num

        eventually(is_there)
        assert len(found) == num, [span.name for span in found]
        return sorted(found, key=lambda span: (span.begun_ns, -span.ended_ns))


def _plain(attributes: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        return [value(item) for item in each.array_value.values] if kind == "array_value" else getattr(each, kind)

    return {each.key: value(each.value) for each in attributes}


def _received(span: Any, resource: dict[str, Any], schema_url: str) -> Received:
    return Received(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        _plain(span.attributes),
        [event.name for event in span.events],
        resource,
        schema_url,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector until left."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            collector.asked.set()
            collector.gate.wait(PATIENCE_S)
            if collector.status == 200:
                collector.take(body)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
