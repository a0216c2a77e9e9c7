"""Sends spans to a collector over OTLP/HTTP. Imported only if an address is given.

Nothing here waits for the collector on the event loop: spans go into a bounded queue, which a thread of OpenTelemetry's SDK
empties. What does not fit, or could not be sent, is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from engine.core.errors import ConfigError
from engine.system.version import VERSION
from server.telemetry.tracing import Tracing

log = logging.getLogger("quire.otlp")

MAX_QUEUED = 2048  # spans, of about 500 requests; a few megabytes
FLUSH_S = 2.0  # at the end of the process, for the last spans


class SpanCounts:
    """Counts spans. Each number has one writer: `queued` and `refused` the event loop, the others the sending thread."""

    queued = taken = 0  # into the queue, and out of it
    refused = 0  # the queue was full
    sent = failed = 0

    @property
    def dropped(self) -> dict[str, int]:
        """Return the spans that never reach the collector, by reason."""
        return {"queue_full": self.refused, "export_failed": self.failed}


class _CountingExporter(SpanExporter):
    """Passes spans to an exporter, counts them, and logs when it begins or ceases to fail."""

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: SpanCounts) -> None:
        self._exporter, self._endpoint, self._counts = exporter, endpoint, counts
        self._is_well = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; sending thread."""
        self._counts.taken += len(spans)
        result = self._exporter.export(spans)
        is_well = result is SpanExportResult.SUCCESS
        if is_well:
            self._counts.sent += len(spans)
        else:
            self._counts.failed += len(spans)
        if is_well and not self._is_well:
            log.info("traces: %s takes spans again", self._endpoint)
        elif not is_well and self._is_well:
            log.warning("traces: %s does not take spans; they are dropped and counted", self._endpoint)
        self._is_well = is_well
        return result

    def shutdown(self) -> None:
        """End a sending that is in progress."""
        self._exporter.shutdown()


class _BoundedProcessor(SpanProcessor):
    """Drops the newest spans of a full queue; the SDK's own drops the oldest, and counts none."""

    def __init__(self, processor: BatchSpanProcessor, counts: SpanCounts) -> None:
        self._processor, self._counts = processor, counts

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that ended. Event loop."""
        if self._counts.queued - self._counts.taken >= MAX_QUEUED:
            self._counts.refused += 1
        elif span.context is not None and span.context.trace_flags.sampled:
            self._counts.queued += 1
            self._processor.on_end(span)

    def shutdown(self) -> None:
        """Send what is queued. Blocks."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


class Otlp:
    """The provider of tracers, what writes to it, and its end."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it repeats each failure; one line is ours
        self.counts = SpanCounts()
        try:
            self._exporter = _CountingExporter(OTLPSpanExporter(endpoint), endpoint, self.counts)
            self._tracers = TracerProvider(resource=_resource(), shutdown_on_exit=False)
            batches = BatchSpanProcessor(self._exporter, max_queue_size=MAX_QUEUED)
        except ValueError as error:  # of a variable
            raise ConfigError(f"OpenTelemetry's SDK refuses its settings (OTEL_*): {error}.") from error
        self._tracers.add_span_processor(_BoundedProcessor(batches, self.counts))
        self.tracing = Tracing(self._tracers, time.monotonic)
        log.info("traces are sent to %s", endpoint)

    async def close(self) -> None:
        """Send what is queued, for FLUSH_S at most; what is left then is dropped."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._tracers.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=shut_down, name="otlp-flush", daemon=True).start()
        try:
            await asyncio.wait_for(ended.wait(), FLUSH_S)
        except asyncio.TimeoutError:
            log.warning("the collector did not take the last spans within %g s", FLUSH_S)
            self._exporter.shutdown()


def _resource() -> Resource:
    """Return what describes this process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    found = Resource.create()
    ours = {"service.name": "quire", "service.version": VERSION, "service.instance.id": uuid.uuid4().hex}
    unset = [name for name in ours if str(found.attributes.get(name, "unknown_service")).startswith("unknown_service")]
    return found.merge(Resource({name: ours[name] for name in unset}))
