"""POST /v1/chat/completions: its request, its answer and its stream's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from engine.core.errors import InvalidRequestError, shorten
from engine.core.types import FinishReason, SamplingParams
from engine.text.choice import CallDelta, Delta, TextRules
from engine.text.grammars.spec import GrammarKind, GrammarSpec
from engine.text.thinking import EFFORT_BUDGETS, ThinkingGrammar
from engine.text.tools.forced import forced_dialect, forced_grammar
from engine.text.tools.parser import Dialect
from engine.text.tools.strict import free_text_grammar
from server.errors import unsupported
from server.protocol.base import Integer, ResponseBody
from server.protocol.conversation import Conversation
from server.protocol.form import ChunkMould, Envelope, new_call_id
from server.protocol.limits import Limits
from server.protocol.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from server.protocol.sampling import HINTS, INSTEAD, NO_OPS, UNSUPPORTED, SamplingBody
from server.protocol.tools import Choice, Tool, ToolChoice
from server.protocol.usage import Usage


class ChatBody(SamplingBody, Conversation):
    """The request. `logprobs` switches them on, `top_logprobs` counts alternatives."""

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS | {"prediction"}
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {**HINTS, "verbosity": ("medium",)}
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **UNSUPPORTED,
        **dict.fromkeys(("audio", "functions", "moderation", "web_search_options"), ()),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none",),
        "modalities": (["text"],),
    }
    INSTEAD: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        "best_of": "answers are ranked by /v1/completions only; send n to have several",
    }

    max_completion_tokens: Integer | None = Field(None, ge=1)
    max_tokens: Integer | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: Integer | None = Field(None, ge=0)
    add_special_tokens: bool = False
    tool_choice: Choice = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Integer | None = Field(None, ge=0)
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; they mean the same, send one.",
                param="max_tokens",
            )
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        choice, names = self.wanted_calls, [tool.function.name for tool in self.tools or []]
        if not names and choice.mode != "none":
            raise InvalidRequestError("tool_choice needs tools; send them, or leave it out.", param="tool_choice")
        if choice.name is not None and choice.name not in names:
            raise InvalidRequestError(
                f"tool_choice names {shorten(choice.name)!r}, which is not one of tools; they are {shorten(', '.join(names))}.",
                param="tool_choice",
            )

    @property
    def wanted_calls(self) -> ToolChoice:
        """Return the choice; "auto" without tools is "none"."""
        choice = self.tool_choice or ToolChoice("auto")
        assert isinstance(choice, ToolChoice)
        return ToolChoice("none") if choice.mode == "auto" and not self.tools else choice

    def shown_tools(self) -> list[Tool]:
        """The tools that the model is told of; none, if it is to call none."""
        return [] if self.wanted_calls.mode == "none" else self.tools or []

    def template_kwargs(self, limits: Limits) -> dict[str, Any]:
        """Return what else the template is given."""
        return {**limits.chat_format.template_kwargs(self.reasoning_effort), **self.chat_template_kwargs}

    def dropped_hints(self, limits: Limits) -> list[str]:
        """Return also what is about thoughts that this model does not have, or that cannot be counted."""
        chat_format = limits.chat_format
        is_idle = {
            "reasoning_effort": self.reasoning_effort not in (None, "none") and not chat_format.takes_effort,
            "thinking_token_budget": self.thinking_token_budget is not None and chat_format.tag_ids is None,
        }
        return super().dropped_hints(limits) + [name for name, idle in is_idle.items() if idle]

    def message_rules(self, params: SamplingParams, limits: Limits, prompt: str) -> TextRules:
        """How the answer to a rendered prompt is taken apart. Raises ApiError for calls that cannot be read."""
        rules, chat_format = self.text_rules(params), limits.chat_format
        tools = {tool.function.name: tool.function.parameters for tool in self.shown_tools()}
        make_reader = chat_format.reader(
            self._dialect(limits), tools, begins_within=self._begins_within(limits, prompt)
        )
        if make_reader is None:
            return rules
        rules = replace(rules, make_reader=make_reader, max_calls=None if self.parallel_tool_calls else 1)
        if chat_format.hidden_ids is None or not rules.skip_special_tokens:
            return rules
        return replace(rules, skip_special_tokens=False, hidden_ids=chat_format.hidden_ids)

    def message_grammar(self, limits: Limits) -> tuple[GrammarSpec, str] | None:
        """What constrains the answer, calls that must be made included, and the field that asked for it."""
        asked, choice = self.grammar_spec(), self.wanted_calls
        if not self._constrains_calls(limits):
            return asked or self._strict_calls(limits)
        if asked is not None and (asked[0].kind is not GrammarKind.JSON_SCHEMA or asked[0].text == "false"):
            raise InvalidRequestError(
                f'{asked[1]} leaves no room for calls of tools; send tool_choice: "none", or leave one of them out.',
                param=asked[1],
            )
        tools = [tool.function for tool in self.tools or [] if choice.name in (None, tool.function.name)]
        grammar = forced_grammar(
            [tool.offered() for tool in tools],
            self._forced_dialect(limits),
            max_calls=1 if choice.name or not self.parallel_tool_calls else None,
            answer=asked[0] if asked and choice.mode == "auto" else None,
        )
        return GrammarSpec.of_lark(grammar), "tools"

    def _strict_calls(self, limits: Limits) -> tuple[GrammarSpec, str] | None:
        """What constrains calls that the model may make, if one of them would be of a strict tool."""
        dialect, tools = self._dialect(limits), [tool.function.offered() for tool in self.shown_tools()]
        if dialect is None or not any(tool.strict for tool in tools):
            return None
        special = limits.tokenizer.special_tokens
        grammar = free_text_grammar(tools, dialect, special, parallel=self.parallel_tool_calls)
        return GrammarSpec.of_lark(grammar), "tools"

    def _constrains_calls(self, limits: Limits) -> bool:
        """True if a grammar has to speak of calls: they must be made, or may be instead of an answer that has one."""
        mode = self.wanted_calls.mode
        if mode == "auto":
            return self.grammar_spec() is not None and not limits.chat_format.calls_stay_text
        return mode != "none"

    def with_thoughts(self, params: SamplingParams, limits: Limits, prompt: str) -> SamplingParams:
        """The parameters, with thoughts before what a grammar constrains, and as many of them as were asked for."""
        chat_format = limits.chat_format
        budget = self.thinking_token_budget
        if budget is None and self.reasoning_effort is not None and not chat_format.knows_effort(self.reasoning_effort):
            budget = EFFORT_BUDGETS.get(self.reasoning_effort)
        tags = chat_format.tag_ids
        if tags is None or chat_format.has_thought(prompt) or (budget is None and params.grammar is None):
            return params
        grammar = ThinkingGrammar(
            tags,
            begins_within=self._begins_within(limits, prompt),
            budget=budget,
            inner=params.grammar,
            end_ids=limits.tokenizer.eos_token_ids,
        )
        return replace(params, grammar=grammar)

    def _begins_within(self, limits: Limits, prompt: str) -> bool:
        """True if the answer begins with thoughts."""
        continued = self.messages[-1].content if self.continue_final_message else ""
        tags = limits.chat_format.tags
        return tags is not None and tags.begins_within(prompt, continued)

    def _forced_dialect(self, limits: Limits) -> Dialect:
        return forced_dialect(limits.chat_format.dialect, marks_are_text=limits.chat_format.hidden_ids is None)

    def _dialect(self, limits: Limits) -> Dialect | None:
        """How calls are found in the answer; None where none are looked for."""
        chat_format, mode = limits.chat_format, self.wanted_calls.mode
        if self._constrains_calls(limits):
            return self._forced_dialect(limits)
        if mode == "none" or chat_format.calls_stay_text:
            return None
        if chat_format.dialect is None:
            raise unsupported(
                "tools",
                "how this model writes calls is not known here; start the server with --tool-call-parser, or send "
                'tool_choice: "none".',
            )
        return chat_format.dialect

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def params(self, limits: Limits, num_prompt: int) -> SamplingParams:
        """The engine's parameters. Raises InvalidRequestError, or ContextLengthError for a prompt that fills all."""
        limits.check_logprobs(self.top_logprobs, "top_logprobs")
        asked = self.asked_max_tokens
        return self.sampling_params(
            limits,
            max_tokens=limits.rest_of_context(num_prompt, "messages") if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


class ChatFunction(ResponseBody):
    name: str | None = None
    arguments: str


class ChatToolCall(ResponseBody):
    """A call of an answer, or what is new of one in a chunk: its first one has id, type and name."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: ChatFunction


class ChatMessage(ResponseBody):
    """An answer, or what is new of it in a chunk. Thoughts go by both names that clients look for."""

    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[ChatToolCall] | None = None


class ChatChoice(ResponseBody):
    """A choice of an answer (with `message`) or of a chunk (with `delta`)."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseBody):
    """The answer, and a chunk of it."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatForm:
    """Implements ChunkForm for the chat API."""

    def __init__(self, body: ChatBody, envelope: Envelope, *, call_id_length: int = 0) -> None:
        self._body = body
        self._envelope = envelope
        self._call_id_length = call_id_length
        self._chunk_fields = envelope.fields("chat.completion.chunk")
        self._mould = ChunkMould(ChatCompletion(**self._chunk_fields, choices=[]))

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        choices = [self._choice(index, delta, {"message": self._message(delta)}) for index, delta in enumerate(deltas)]
        answer = ChatCompletion(**self._envelope.fields("chat.completion"), choices=choices, usage=usage)
        self._add_prompt(answer, deltas[0])
        return answer.json_bytes()

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        choice = self._choice(index, delta, {"delta": self._news(delta)})
        if delta.prompt is None:
            return [self._mould.cast(choice, **usage)]
        chunk = ChatCompletion(**self._chunk_fields, choices=[choice], **usage)
        self._add_prompt(chunk, delta)
        message = ChatMessage(role="assistant", content="")
        role = ChatChoice(index=index, delta=message, logprobs=None, finish_reason=None)
        return [self._mould.cast(role, **usage), chunk.json_bytes()]

    def closing(self, usage: Usage) -> bytes:
        return ChatCompletion(**self._chunk_fields, choices=[], usage=usage).json_bytes()

    def _message(self, delta: Delta) -> ChatMessage:
        """A whole answer; its content is null where there is something else instead."""
        message = ChatMessage(role="assistant", content=delta.text, refusal=None)
        if not delta.text and (delta.reasoning or delta.calls):
            message.content = None
        self._add_thoughts(message, delta)
        if delta.calls:
            message.tool_calls = [self._call(call) for call in delta.calls]
        return message

    def _news(self, delta: Delta) -> ChatMessage:
        message = ChatMessage()
        if delta.text or not (delta.reasoning or delta.calls):
            message.content = delta.text
        self._add_thoughts(message, delta)
        if delta.calls:
            message.tool_calls = [self._call(call, index=call.index) for call in delta.calls]
        return message

    def _add_thoughts(self, message: ChatMessage, delta: Delta) -> None:
        if delta.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = delta.reasoning

    def _call(self, call: CallDelta, **index: int) -> ChatToolCall:
        if call.name is None:
            return ChatToolCall(**index, function=ChatFunction(arguments=call.arguments))
        return ChatToolCall(
            **index,
            id=new_call_id("call_", self._call_id_length),
            type="function",
            function=ChatFunction(name=call.name, arguments=call.arguments),
        )

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> ChatChoice:
        finish = delta.finish_reason
        has_called = finish is FinishReason.STOP and delta.has_called
        choice = ChatChoice(
            index=index,
            **content,
            logprobs=self._logprobs(delta),
            finish_reason="tool_calls" if has_called else finish.value if finish else None,
        )
        if finish is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._envelope.tokenizer, delta, as_ids=self._body.return_tokens_as_token_ids)

    def _add_prompt(self, answer: ChatCompletion, delta: Delta) -> None:
        """What was asked to be told about the prompt, once it is known."""
        if delta.prompt is None:
            return
        if self._body.return_token_ids:
            answer.prompt_token_ids = list(self._envelope.prompts[0])
        if self._body.prompt_logprobs is not None and delta.prompt.logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._envelope.tokenizer, delta.prompt.logprobs, self._body.prompt_logprobs
            )
