"""The documents of /v1/responses: a response, its items and its events. Pure data."""

from __future__ import annotations

from typing import Any

from server.openai.logprobs import ChatLogprob
from server.protocol.documents import ResponseBody, Usage


class OutputPart(ResponseBody):
    """Text with annotations and logprobs, or reasoning, without."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[ChatLogprob] | None = None


class OutputItem(ResponseBody):
    """A message, a call or reasoning; its fields depend on its type."""

    id: str
    type: str
    status: str
    role: str | None = None
    content: list[OutputPart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(ResponseBody):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """The token counts under this API's names."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(ResponseBody):
    reason: str


class ResponseError(ResponseBody):
    code: str
    message: str


class ResponseDocument(ResponseBody):
    """The answer, complete or in progress. It repeats the request."""

    id: str
    object: str
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None


class ResponseEvent(ResponseBody):
    """One event of a stream; its fields depend on its type."""

    type: str
    sequence_number: int = 0
    response: ResponseDocument | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatLogprob] | None = None
    arguments: str | None = None
