"""What every answer ends with: the token counts and, on request, where its time went."""

from __future__ import annotations

from collections.abc import Collection

from engine.core.types import PromptInfo
from server.http.bodies import ResponseBody
from server.telemetry.timeline import Spans


class PromptTokensDetails(ResponseBody):
    cached_tokens: int
    cached_tokens_host: int | None = None  # of these, where other tiers than the KV pool are in use
    cached_tokens_disk: int | None = None
    pinned_tokens: int | None = None  # of the prompts' beginnings, where that was asked for


class CompletionTokensDetails(ResponseBody):
    reasoning_tokens: int


class Usage(ResponseBody):
    """OpenAI's usage object. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        prompts: Collection[PromptInfo] = (),
        reasoning_tokens: int | None = None,
        pinned_tokens: int | None = None,
    ) -> Usage:
        """Return the counts; `prompts` are those that have been computed. None is a count that is not reported."""
        details = PromptTokensDetails(cached_tokens=sum([prompt.num_cached_tokens for prompt in prompts]))
        host = sum([prompt.num_host_tokens for prompt in prompts])
        disk = sum([prompt.num_disk_tokens for prompt in prompts])
        if host or disk:
            details.cached_tokens_host, details.cached_tokens_disk = host, disk
        if pinned_tokens is not None:
            details.pinned_tokens = pinned_tokens
        usage = cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
        )
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return usage


class AnswerMetrics(ResponseBody):
    """vLLM's names where they mean the same. With several choices each time is the slowest choice's."""

    queue_time_ms: float
    prefill_time_ms: float
    time_to_first_token_ms: float  # from arrival, so waiting is in it
    generation_time_ms: float  # from the first token to the last
    mean_itl_ms: float | None
    tokens_per_second: float | None
    preemptions: int | None
    cached_tokens: int
    draft_tokens: int  # by speculation ...
    accepted_draft_tokens: int  # ... and of these, those that the answer has

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
    """The header's value: three durations in milliseconds, and counts as descriptions, since it knows no numbers."""
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
    """An answer, or the last chunk of a stream, with one more field."""
    assert document.endswith(b"}")
    return document[:-1] + b',"metrics":' + metrics.json_bytes() + b"}"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
