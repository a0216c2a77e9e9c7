"""The documents of /v1/responses: a response, its items and its events. Pure data."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from server.openai.logprobs import ChatLogprob
from server.protocol.documents import CompletionTokensDetails, ResponseBody, Usage


class OutputPart(ResponseBody):
    """Text with annotations and logprobs, or reasoning, without."""

    type: str = Field(description="Which kind of object this is.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = Field(None, description="Empty.")
    logprobs: list[ChatLogprob] | None = Field(None, description="Log probabilities of the tokens.")


class OutputItem(ResponseBody):
    """A message, a call or reasoning; its fields depend on its type."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    type: str = Field(description="Which kind of object this is.")
    status: str = Field(description="How far it is.")
    role: str | None = Field(None, description="Who speaks.")
    content: list[OutputPart] | None = Field(None, description="The text, or the parts.")
    summary: list[Any] | None = Field(None, description="Empty: reasoning is not summarised.")
    call_id: str | None = Field(None, description="The call's name, for its result.")
    name: str | None = Field(None, description="Its name.")
    arguments: str | None = Field(None, description="The arguments as JSON.")


class InputTokensDetails(ResponseBody):
    cached_tokens: int = Field(description="Tokens of the prompt whose K/V was found.")
    cache_write_tokens: int = Field(description="Always 0.")


class ResponseUsage(ResponseBody):
    """The token counts under this API's names."""

    input_tokens: int = Field(description="Tokens of the prompt.")
    input_tokens_details: InputTokensDetails = Field(description="What was cached.")
    output_tokens: int = Field(description="Tokens generated, reasoning included.")
    output_tokens_details: CompletionTokensDetails = Field(description="What was reasoning.")
    total_tokens: int = Field(description="Both together.")

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        details = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens, cache_write_tokens=0
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=CompletionTokensDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(ResponseBody):
    reason: str = Field(description="max_output_tokens, or what else ended it.")


class ResponseError(ResponseBody):
    code: str = Field(description="For programs; see the page of errors.")
    message: str = Field(description="A sentence for people.")


class ResponseDocument(ResponseBody):
    """The answer, complete or in progress. It repeats the request."""

    id: str = Field(description="The object's name; stored objects are found by it.")
    object: str = Field(description="Which kind of object this is.")
    created_at: int = Field(description="When it was made, in seconds since 1970.")
    completed_at: int | None = Field(None, description="When it was complete.")
    status: str = Field(description="How far it is.")
    background: bool = Field(description="Always false.")
    error: ResponseError | None = Field(None, description="Why it failed, or null.")
    incomplete_details: IncompleteDetails | None = Field(None, description="Why it ended early, or null.")
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    max_tool_calls: None = Field(None, description="Always null.")
    metadata: dict[str, str] = Field(description="As in the request.")
    model: str = Field(description="The model or adapter that answered.")
    output: list[OutputItem] = Field(description="The items of the answer: messages, reasoning, calls.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    previous_response_id: str | None = Field(description="As in the request.")
    reasoning: dict[str, Any] = Field(description="As in the request.")
    service_tier: str = Field(description="Always default.")
    store: bool = Field(description="Whether it can be read and continued later.")
    temperature: float = Field(description="The value that was used.")
    text: dict[str, Any] = Field(description="As in the request.")
    tool_choice: str | dict[str, Any] = Field(description="As in the request.")
    tools: list[dict[str, Any]] = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    top_p: float = Field(description="The value that was used.")
    truncation: str = Field(description="Always disabled.")
    usage: ResponseUsage | None = Field(None, description="How many tokens were read and generated.")


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
