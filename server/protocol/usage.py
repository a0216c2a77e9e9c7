"""The token counts that every answer ends with."""

from __future__ import annotations

from server.protocol.base import ResponseBody


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
        cached_tokens: int,
        reasoning_tokens: int | None = None,
        cached_below: tuple[int, int] = (0, 0),
        pinned_tokens: int | None = None,
    ) -> Usage:
        """`reasoning_tokens` None: nobody told them apart. `cached_below`: from host memory, from a disk; `pinned_tokens` None: nobody asked."""
        usage = cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )
        if any(cached_below):
            usage.prompt_tokens_details.cached_tokens_host, usage.prompt_tokens_details.cached_tokens_disk = (
                cached_below
            )
        if pinned_tokens is not None:
            usage.prompt_tokens_details.pinned_tokens = pinned_tokens
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return usage
