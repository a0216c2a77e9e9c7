"""The base of every answer's documents, and the usage that many of them have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engine.core.types import PromptInfo


class ResponseBody(BaseModel):
    """Base of every answer: only fields that were set are sent."""

    model_config = ConfigDict(ser_json_inf_nan="null", defer_build=True)

    def json_bytes(self) -> bytes:
        """Return this answer as UTF-8 JSON."""
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True)


class PageQuery(BaseModel):
    """The query of a list."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)

    def page(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the first of the items that follow; if there are more than fit, one of those is enough to tell."""
        shown = items[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(items) > self.limit,
        }


class Headed(ResponseBody):
    """What answers begin with."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    created: int = Field(description="When it was made, in seconds since 1970.")
    model: str = Field(description="The model or adapter that answered.")


class Filtered(ResponseBody):
    """A category of content, in Azure's shape."""

    filtered: bool = Field(description="Whether a guard found it.")


class PromptTokensDetails(ResponseBody):
    cached_tokens: int = Field(description="Tokens of the prompt whose K/V was found.")
    cached_tokens_host: int | None = Field(None, description="Those of them found in host memory.")
    cached_tokens_disk: int | None = Field(None, description="Those of them found on disk.")
    pinned_tokens: int | None = Field(None, description="Tokens of the prompt whose K/V is now pinned.")
    image_tokens: int | None = Field(None, description="Tokens of the prompt that stand for images.")


class CompletionTokensDetails(ResponseBody):
    reasoning_tokens: int = Field(description="Generated tokens that are reasoning.")


class Usage(ResponseBody):
    """OpenAI's usage object. A prompt counts once, for all of its choices."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens generated, reasoning included.")
    total_tokens: int = Field(description="Both together.")
    prompt_tokens_details: PromptTokensDetails = Field(description="What was cached.")
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="What was reasoning.")

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        completion_tokens: int,
        prompts: Collection[PromptInfo] = (),
        reasoning_tokens: int | None = None,
        pinned_tokens: int | None = None,
        image_tokens: int = 0,
    ) -> Usage:
        """Return the counts; `prompts` are the computed ones, None is not reported."""
        details = PromptTokensDetails(cached_tokens=sum([prompt.num_cached_tokens for prompt in prompts]))
        host = sum([prompt.num_host_tokens for prompt in prompts])
        disk = sum([prompt.num_disk_tokens for prompt in prompts])
        if host or disk:
            details.cached_tokens_host, details.cached_tokens_disk = host, disk
        if pinned_tokens is not None:
            details.pinned_tokens = pinned_tokens
        if image_tokens:
            details.image_tokens = image_tokens
        usage = cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=details,
        )
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        return usage
