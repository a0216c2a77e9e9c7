"""The token counts that every answer ends with."""

from __future__ import annotations

from server.protocol.base import ResponseBody


class PromptTokensDetails(ResponseBody):
    cached_tokens: int


class Usage(ResponseBody):
    """OpenAI's usage object. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )
