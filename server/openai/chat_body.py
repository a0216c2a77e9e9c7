"""Messages and what makes a prompt of them; /v1/chat/completions and /tokenize take the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from engine.core.errors import InvalidRequestError, shorten
from engine.core.types import SamplingParams
from engine.text.choice import TextRules
from engine.text.grammars.spec import GrammarKind, GrammarSpec
from engine.text.thinking import EFFORT_BUDGETS, ThinkingGrammar
from engine.text.tools.forced import forced_dialect, forced_grammar
from engine.text.tools.parser import Dialect
from engine.text.tools.prompting import spell_out
from engine.text.tools.strict import free_text_grammar
from server.errors import unsupported
from server.http.schema import Integer, RequestBody
from server.openai.limits import Limits
from server.openai.sampling import HINTS, INSTEAD, NO_OPS, UNSUPPORTED, SamplingBody
from server.openai.tools import Choice, Tool, ToolCall, ToolChoice, check_tools, without_hosted

# What takes about 1 ms to render.
_MANY_MESSAGES = 50
_MANY_TOOLS = 8
_MANY_CHARS = 100_000


def _as_text(content: Any) -> Any:
    """Content may come in parts; those of text are joined, others cannot be read."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (None, None)
        if isinstance(kind, str) and kind != "text":
            raise unsupported("messages", f"content of type {shorten(kind)!r} cannot be read; send text only.")
        if kind is None or not isinstance(text, str):
            raise ValueError('parts must look like {"type": "text", "text": "..."}')
        texts.append(text)
    return "\n".join(texts)


class Message(RequestBody):
    """One turn of a conversation. What else it holds (name, tool_call_id, ...) is for the chat template to read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | list[dict[str, Any]])] = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it, thoughts of earlier turns under the name that they know."""
        shown = {**(self.model_extra or {}), "role": self.role, "content": self.content}
        if "reasoning" in shown:
            shown.setdefault("reasoning_content", shown["reasoning"])
        if self.tool_calls:
            shown["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return shown


class Conversation(RequestBody):
    """A conversation, and how to make a prompt of it."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _drop_hosted_tools(cls, data: Any) -> Any:
        return without_hosted(data, ("function", None))

    @model_validator(mode="after")
    def _check_conversation(self) -> Conversation:
        check_tools(self.tools)
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt contradict each other; set only one.",
                param="continue_final_message",
            )
        last = self.messages[-1].role if self.messages else "none at all"  # /tokenize may have a prompt instead
        if last != "assistant":
            raise InvalidRequestError(
                f"continue_final_message needs a last message of role assistant, not {last}.",
                param="continue_final_message",
            )
        return self

    @property
    def is_long(self) -> bool:
        """True if it takes more than a few milliseconds to render."""
        return (
            len(self.messages) > _MANY_MESSAGES
            or len(self.tools or ()) > _MANY_TOOLS
            or sum(len(message.content) for message in self.messages) > _MANY_CHARS
        )

    def shown_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return self.tools or []

    def template_kwargs(self, limits: Limits) -> dict[str, Any]:  # noqa: ARG002 - for those who know more
        """What else the template is told."""
        return self.chat_template_kwargs

    def render(self, limits: Limits) -> str:
        """The prompt's text. Raises InvalidRequestError where the template refuses, or what it is given cannot fit."""
        limits.check_num_chars(sum(len(message.content) for message in self.messages), "messages")
        wants_prompt = self.add_generation_prompt
        messages = limits.chat_format.roles.fit([message.for_template() for message in self.messages])
        tools = [tool.model_dump(exclude_unset=True) for tool in self.shown_tools()]
        if not limits.chat_format.shows_tools:
            messages, tools = spell_out(messages, tools), []
        return limits.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=not self.continue_final_message if wants_prompt is None else wants_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs(limits),
        )


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
