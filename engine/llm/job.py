"""One prompt of an offline run: from the engine's events to a result.

Runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.core.types import FinishReason, PromptInfo, Request, RequestTimings, TokenEvent
from engine.llm.unserved import missing
from engine.text.chat.choice import Choice, Delta, TextRules
from engine.text.fields.chat import ImageSource
from engine.text.tokenizer import PromptLogprobs, TextTokenizer, prompt_logprobs
from engine.text.tools.formats import new_call_id

Outputs = TypeVar("Outputs")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result(Generic[Outputs]):
    """What has become of one prompt or pair."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: Outputs
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The vector's length."""
        return len(self.embedding)


class EmbeddingRequestOutput(_Result[EmbeddingOutput]):
    """The result of one prompt of LLM.embed."""


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of all labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


class ClassificationRequestOutput(_Result[ClassificationOutput]):
    """The result of one prompt of LLM.classify."""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, its place among those given, and how well it answers the query."""

    index: int
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts match, or the log likelihood of one after the other."""

    score: float


class ScoringRequestOutput(_Result[ScoringOutput]):
    """The result of one pair of LLM.score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's answers; in a chat, `text` has no thoughts or tool calls."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length", "dropped" (see deadline_ms), or "tool_calls" for "stop" after a tool call
    stop_reason: int | str | None  # the stop token or stop string that ended it
    logprobs: PromptLogprobs | None  # by token id, one entry for each token
    timings: RequestTimings | None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(self.tool_calls, functions, strict=True)
            ]
        return message

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of the whole answer, or None without logprobs."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(entry[token_id].logprob for token_id, entry in pairs if entry is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    request_id: str = ""
    finished: bool = True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(missing("RequestOutput", name))


class Job:
    """A prompt that is being answered, and how many of its choices are open."""

    def __init__(
        self, text: str | None, request: Request, rules: TextRules, tokenizer: TextTokenizer, *, call_id_length: int = 0
    ) -> None:
        self.request = request
        self.images: Sequence[ImageSource] = ()  # which its spans name; they are large, and read when it is submitted
        self.num_open = request.params.n
        self._text = text
        self._tokenizer = tokenizer
        self._call_id_length = call_id_length
        self._choices = [Choice(tokenizer, request.prompt, rules) for _ in range(self.num_open)]
        self._timings: dict[int, RequestTimings | None] = {}

    def accept(self, event: TokenEvent) -> bool:
        """Return True if a stop string ended the event's choice. Raises its error."""
        choice = self._choices[event.choice]
        if event.finish_reason is FinishReason.DROPPED:
            choice.drop()
        is_first_end = not choice.is_done and choice.accept(event)
        if event.finish_reason is None:
            return is_first_end
        self.num_open -= 1
        self._timings[event.choice] = event.timings
        return False

    def info(self) -> PromptInfo:
        """Return the results of reading the prompt, once no choice is open."""
        info = self._choices[0].take().prompt
        assert info is not None, "the first event of a choice has it"
        return info

    def output(self) -> RequestOutput:
        """Return the result, once no choice is open."""
        params, tokenizer = self.request.params, self._tokenizer
        deltas = [choice.take() for choice in self._choices]
        prompt = deltas[0].prompt
        scored = None if prompt is None else prompt.logprobs
        return RequestOutput(
            prompt=self._text,
            prompt_token_ids=list(self.request.prompt),
            prompt_logprobs=None if scored is None else prompt_logprobs(tokenizer, scored, params.prompt_logprobs or 0),
            num_cached_tokens=0 if prompt is None else prompt.num_cached_tokens,
            outputs=[self._completion(index, delta) for index, delta in enumerate(deltas)],
            request_id=self.request.request_id,
        )

    def _completion(self, index: int, delta: Delta) -> CompletionOutput:
        num_top = self.request.params.logprobs
        assert delta.finish_reason is not None
        has_called = delta.has_called and delta.finish_reason is FinishReason.STOP
        return CompletionOutput(
            index=index,
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason="tool_calls" if has_called else delta.finish_reason.value,
            stop_reason=delta.stop_reason,
            logprobs=None if num_top is None else prompt_logprobs(self._tokenizer, delta.logprobs, num_top),
            timings=self._timings[index],
            reasoning=delta.reasoning,
            tool_calls=[
                ToolCall(
                    id=call.id or new_call_id("call_", self._call_id_length),
                    name=call.name or "",
                    arguments=call.arguments,
                )
                for call in delta.calls
            ],
        )
