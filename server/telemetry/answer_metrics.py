"""An answer's times as clients get them: a header, and the field `metrics`."""

from __future__ import annotations

from server.protocol.documents import ResponseBody
from server.telemetry.events import Spans


class AnswerMetrics(ResponseBody):
    """An answer's times for clients, under vLLM's names; of choices the slowest."""

    queue_time_ms: float
    prefill_time_ms: float
    time_to_first_token_ms: float  # from arrival, so waiting is in it
    generation_time_ms: float  # from the first token to the last
    mean_itl_ms: float | None
    tokens_per_second: float | None
    preemptions: int | None
    cached_tokens: int
    draft_tokens: int  # by speculation ...
    accepted_draft_tokens: int  # ... and those of them that were accepted

    @classmethod
    def of(cls, spans: Spans, cached_tokens: int) -> AnswerMetrics:
        return cls(
            queue_time_ms=_ms(spans.queue_s),
            prefill_time_ms=_ms(spans.prefill_s),
            time_to_first_token_ms=_ms(spans.queue_s + spans.prefill_s),
            generation_time_ms=_ms(spans.decode_s),
            mean_itl_ms=None if spans.mean_itl_s is None else _ms(spans.mean_itl_s),
            tokens_per_second=None if spans.tokens_per_s is None else round(spans.tokens_per_s, 2),
            preemptions=spans.num_preemptions,
            cached_tokens=cached_tokens,
            draft_tokens=spans.num_drafted,
            accepted_draft_tokens=spans.num_accepted,
        )


def server_timing(spans: Spans, cached_tokens: int) -> str:
    """Return the header's value: durations in milliseconds, counts as descriptions."""
    entries = [
        f"queue;dur={_ms(spans.queue_s)}",
        f"prefill;dur={_ms(spans.prefill_s)}",
        f"decode;dur={_ms(spans.decode_s)}",
        f'cached_tokens;desc="{cached_tokens}"',
    ]
    if spans.num_preemptions is not None:
        entries.append(f'preemptions;desc="{spans.num_preemptions}"')
    return ", ".join(entries)


def with_metrics(document: bytes, metrics: AnswerMetrics) -> bytes:
    """Return an answer, or the last chunk of a stream, with the field `metrics`."""
    assert document.endswith(b"}")
    return document[:-1] + b',"metrics":' + metrics.json_bytes() + b"}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
