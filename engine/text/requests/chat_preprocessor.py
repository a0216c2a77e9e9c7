"""Makes a conversation's prompt, parameters, parser and grammar in one call, and any request's parameters of its fields.

The fields only declare; what the model and its chat format make of them is decided here. Pure, any thread.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.core.errors import HeadlessModelError, InvalidRequestError, UnsupportedError
from engine.core.spans import Span
from engine.core.types import BeamParams, EarlyStopping, GrammarKey, SamplingParams, Thinking
from engine.text.chat.choice import TextRules
from engine.text.chat.history import AnswerHistory, ChatTurn, Encode, Owner
from engine.text.chat.limits import ModelLimits
from engine.text.fields.chat import ChatFields, Conversation
from engine.text.fields.sampling import Constraint, SamplingFields
from engine.text.grammars.spec import GrammarKind
from engine.text.grammars.thinking import EFFORT_BUDGETS
from engine.text.requests.call_plan import plan_calls
from engine.text.tools.tool_format import ToolFormat
from engine.text.types import SamplingDefaults

if TYPE_CHECKING:
    from engine.text.images.preprocessor import ImagePreprocessor, PreparedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A conversation as the engine takes it, once it has compiled the constraint."""

    text: str  # the rendered prompt
    prompt: list[int]
    turn_end: int  # so many tokens come before what the template opens the answer with; 0: not known
    params: SamplingParams
    rules: TextRules  # of the answer's text, with a factory of its parsers
    constraint: Constraint | None
    images: Sequence[PreparedImage] = ()
    spans: tuple[Span, ...] = ()  # where they stand in the prompt


class ChatPreprocessor:
    """`prepare` a conversation, or only `render` and `encode` its prompt."""

    def __init__(
        self,
        limits: ModelLimits,
        template_kwargs: Mapping[str, Any] | None = None,
        history: AnswerHistory | None = None,
        images: ImagePreprocessor | None = None,
    ) -> None:
        """`template_kwargs` are variables of the chat template where a request names none; no `images`: they are refused."""
        self.limits, self._history, self.images = limits, history, images
        self._template_kwargs = template_kwargs or {}
        self._tokenizer = limits.tokenizer
        self._format = limits.chat_format
        self._num_opening = lru_cache(maxsize=64)(
            lambda opening: len(limits.tokenizer.encode(opening, add_special_tokens=False))
        )

    def render(self, chat: Conversation) -> str:
        """Return the prompt's text, waiting for it. Raises InvalidRequestError or ContextLengthError."""
        begun = self.begin(chat)
        return begun if isinstance(begun, str) else begun()

    def begin(self, chat: Conversation) -> str | Callable[[], str]:
        """Return the prompt's text, or a function that waits for it, as ChatTemplate.begin does."""
        template, chat_format = self._tokenizer.chat_template, self._format
        if template is None:
            if not self.limits.generates:
                raise HeadlessModelError(self.limits.vectors.served)
            raise InvalidRequestError(
                "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                param="messages",
            )
        messages: Sequence[Mapping[str, Any]] = [
            message.for_template(arguments_as_text=chat_format.earlier_calls.as_text) for message in chat.messages
        ]
        tools: Sequence[Mapping[str, Any]] = [
            tool.model_dump(exclude_unset=True) for tool in chat.shown_tools if not tool.defer_loading
        ]
        if self.images is not None:
            messages, tools = self.images.hide_marks([messages, tools])
        elif chat.images:
            raise no_images("messages")
        if tools or not chat.is_plain:
            messages, tools = chat_format.fit(messages, tools)
        wants_answer, effort = chat.add_generation_prompt, chat.reasoning_effort
        self.limits.check_length(chat.num_chars, "messages")
        return template.begin(
            messages,
            tools=tools,
            add_generation_prompt=not chat.continue_final_message if wants_answer is None else wants_answer,
            continue_final_message=chat.continue_final_message,
            template_kwargs=self._variables(effort, chat.chat_template_kwargs),
        )

    def _variables(self, effort: str | None, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the variables of the chat template that a request or the settings name."""
        if effort is not None:
            variables = {**self._format.template_kwargs(effort), **variables}
        return {**self._template_kwargs, **variables} if self._template_kwargs else variables

    def _turn_end(self, variables: Mapping[str, Any], text: str, num_prompt: int) -> int:
        """Return how many tokens of a prompt the next turn's has too, whatever the answer; 0 if that is not known."""
        template = self._tokenizer.chat_template
        opening = "" if template is None else template.opening(variables)
        if not opening or not text.endswith(opening):
            return 0
        return max(num_prompt - self._num_opening(opening), 0)

    def encode(
        self, chat: ChatFields, text: str, owner: Owner | None = None, images: Sequence[PreparedImage] = ()
    ) -> list[int]:
        """Return the tokens of a rendered prompt, whose earlier answers are an owner's. Raises ContextLengthError."""
        if self._history is not None and owner is not None and _is_plain_text(chat):
            self.limits.check_length(len(text), "messages")
            return self._history.encode(owner, text, self._encoder(text, images))[0]
        ids = self.encode_text(text, images, add_special_tokens=chat.add_special_tokens)
        return truncated(chat, ids, self.limits, has_images=bool(images))

    def encode_text(self, text: str, images: Sequence[PreparedImage] = (), *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a rendered prompt. Raises ContextLengthError."""
        self.limits.check_length(len(text), "messages")
        encode = self._encoder(text, images, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens) if encode is None else encode(text)

    def _encoder(
        self, text: str, images: Sequence[PreparedImage], *, add_special_tokens: bool = False
    ) -> Encode | None:
        """Return what encodes a prompt with images, or marks of images that a client wrote; None for any other text."""
        if self.images is None:
            return None
        return self.images.encoder(text, images, add_special_tokens=add_special_tokens)

    def follow(self, prompt: Sequence[int], owner: Owner | None) -> ChatTurn | None:
        """Return the turn of an owner's prompt that is no conversation's text; None if no prompts are remembered."""
        return None if self._history is None or owner is None else self._history.follow(owner, prompt)

    def prepare(
        self,
        chat: ChatFields,
        text: str | None = None,
        owner: Owner | None = None,
        images: Sequence[PreparedImage] = (),
    ) -> PreparedChat:
        """Return what the engine takes. `text` is the rendered prompt, whose earlier answers are an owner's.

        Raises ClientError.
        """
        text = self.render(chat) if text is None else text
        if self._history is None or owner is None or not _is_plain_text(chat):
            prompt = self.encode(chat, text, images=images)
            turn = self.follow(prompt, owner)
        else:
            num_answers = sum([message.role == "assistant" for message in chat.messages])
            encoder = self._encoder(text, images)
            self.limits.check_length(len(text), "messages")
            prompt, turn = self._history.begin(owner, text, num_answers, encoder)
        params = self._params(chat, len(prompt))
        constraint, tool_format = next(iter(chat.constraints()), None), None
        tools, effort = chat.shown_tools, chat.reasoning_effort
        if tools:
            constraint, tool_format = plan_calls(chat, self._format, constraint, self._tokenizer.grammar_tokens)
        begins_within, thinking = False, None
        if self._format.tags is not None:
            continued = chat.messages[-1].text if chat.continue_final_message else ""
            begins_within = self._format.tags.begins_within(text, continued)
            thinking = self._thinking(chat, text, begins_within=begins_within)
            # Only tags that are tokens can come before a grammar; without them it binds the answer from its first token.
            has_thoughts = thinking is not None or _has_room(chat, constraint, self._format.tags.closing)
            begins_within = begins_within and has_thoughts
        rules = text_rules(chat, params)
        if tool_format is not None or self._format.tags is not None or self._format.has_channels:
            rules = self._with_parser(rules, chat, tool_format, begins_within=begins_within)
        rules = rules if turn is None else replace(rules, turn=turn)
        constraint = constraint if params.max_tokens else None
        key = None if constraint is None else GrammarKey(constraint.spec.digest)
        if thinking is not None and (key is not None or thinking.budget is not None):
            key = GrammarKey(b"" if key is None else key.digest, thinking, self._tokenizer.eos_token_ids)
        params = params if key is None else replace(params, grammar=key)
        turn_end = self._turn_end(self._variables(effort, chat.chat_template_kwargs), text, len(prompt))
        if turn is not None:
            turn.prompt.turn_end = turn_end or len(prompt)
        return PreparedChat(
            text=text,
            prompt=prompt,
            turn_end=turn_end,
            params=params,
            rules=rules,
            constraint=constraint,
            images=images,
            spans=self.images.spans(prompt, images) if self.images is not None and images else (),
        )

    def _params(self, chat: ChatFields, num_prompt: int) -> SamplingParams:
        limits, asked = self.limits, chat.asked_max_tokens
        limits.check_logprobs(chat.top_logprobs, "top_logprobs")
        longest, default = 0, limits.tokenizer.sampling_defaults.max_tokens
        if asked != 0:
            longest = limits.rest_of_context(num_prompt, "messages")  # names them if they leave no room
            longest = longest if default is None else min(longest, default)
        return sampling_params(
            chat,
            limits,
            max_tokens=longest if asked is None else asked,
            logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
            prompt_logprobs=chat.prompt_logprobs,
        )

    # -- thoughts ----------------------------------------------------------------------------------------------------

    def _thinking(self, chat: ChatFields, text: str, *, begins_within: bool) -> Thinking | None:
        """Return how thoughts are bounded, or None if they cannot be, or are over."""
        chat_format, budget = self._format, chat.thinking_token_budget
        if chat_format.tag_ids is None or chat_format.has_thought(text):
            return None
        if budget is None and chat.reasoning_effort is not None and not chat_format.knows_effort(chat.reasoning_effort):
            budget = EFFORT_BUDGETS.get(chat.reasoning_effort)
        return Thinking(chat_format.tag_ids, begins_within, budget)

    def _with_parser(
        self, rules: TextRules, chat: ChatFields, tool_format: ToolFormat | None, *, begins_within: bool
    ) -> TextRules:
        """Return the rules with a factory of parsers for thoughts and calls."""
        chat_format = self._format
        tools = {tool.function.name: tool.function.parameters for tool in chat.shown_tools}
        make_parser = chat_format.parser_factory(tool_format, tools, begins_within=begins_within)
        rules = replace(rules, make_parser=make_parser, max_calls=None if chat.parallel_tool_calls else 1)
        if chat_format.hidden_ids is None or not rules.skip_special_tokens:
            return rules
        return replace(rules, skip_special_tokens=False, hidden_ids=chat_format.hidden_ids)


def no_images(param: str) -> UnsupportedError:
    """Return the error for an image where the model takes none."""
    return UnsupportedError(
        param,
        "this server's model takes text alone, and there is an image; send text, or serve a checkpoint with a vision tower "
        "that Quire knows, such as Qwen3-VL.",
    )


def _is_plain_text(chat: ChatFields) -> bool:
    """Return whether the tokens of a prompt are those of its text alone, and of all of it."""
    return not chat.add_special_tokens and chat.truncate_prompt_tokens is None


def _has_room(chat: ChatFields, constraint: Constraint | None, closing: str) -> bool:
    """Return whether a constrained answer may begin with thoughts: free text, or what names the tag that ends them."""
    if constraint is None or constraint.spec.kind is GrammarKind.STRUCTURAL_TAG or closing in constraint.spec.text:
        return True
    return chat.choice.mode == "auto" and not chat.constraints()


GREEDY_BELOW = 1e-5  # a temperature too small to divide logits by asks for the most likely token
MAX_BAD_CHARS = 8192  # of all bad words; they are encoded in 10 ms
# Fields whose default depends on the model.
_LENGTHS = ("max_tokens", "max_new_tokens")
_MODELS_OWN = [each.name for each in dataclasses.fields(SamplingDefaults) if each.name not in _LENGTHS]
_SHARED = SamplingFields.model_fields.keys() & {each.name for each in dataclasses.fields(SamplingParams)}


def truncated(fields: SamplingFields, prompt: list[int], limits: ModelLimits, *, has_images: bool = False) -> list[int]:
    """Return what truncate_prompt_tokens keeps of a prompt: its end; -1: what fits; None: all. Raises InvalidRequestError."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return prompt
    if has_images:
        _refuse("truncate_prompt_tokens", "truncate_prompt_tokens may cut an image in two; leave it out.")
    asked = fields.asked_max_tokens
    room = limits.max_model_len - (1 if asked is None else asked)
    return prompt[-(keep if keep > 0 else max(room, 1)) :]


def sampling_params(
    fields: SamplingFields, limits: ModelLimits, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Return the engine's parameters. Raises InvalidRequestError."""
    if fields.prompt_logprobs is not None:
        limits.check_logprobs(fields.prompt_logprobs, "prompt_logprobs")
    defaults = limits.tokenizer.sampling_defaults
    max_tokens = max_tokens if defaults.max_new_tokens is None else min(max_tokens, defaults.max_new_tokens)
    if fields.use_beam_search:
        defaults = SamplingDefaults()  # a search goes by the model's own probabilities
    if fields.min_tokens > max_tokens:
        _refuse("min_tokens", f"min_tokens is {fields.min_tokens}, more than max_tokens ({max_tokens}); lower it.")
    if fields.stop_token_ids:
        limits.check_ids(fields.stop_token_ids, "stop_token_ids")
    if fields.use_beam_search:
        _check_width(fields, limits)
    # A field of the same name is passed on as it is, unless it is converted below.
    values = {name: getattr(fields, name) for name in _SHARED}
    for name in _MODELS_OWN:
        if values[name] is None:
            values[name] = getattr(defaults, name)
    bad_words = _bad_words(fields, limits) if fields.bad_words else ()
    values |= {
        "max_tokens": max_tokens,
        "temperature": values["temperature"] if values["temperature"] >= GREEDY_BELOW else 0.0,
        "top_k": max(values["top_k"], 0),
        "logit_bias": _logit_bias(fields, limits) if fields.logit_bias else (),
        "allowed_token_ids": _allowed_ids(fields.allowed_token_ids, limits, bad_words)
        if fields.allowed_token_ids
        else None,
        "bad_words": bad_words,
        "seed": secrets.randbits(63) if fields.seed is None else fields.seed & (2**64 - 1),
        "n": fields.num_drawn,
        "eos_token_ids": frozenset() if fields.ignore_eos else limits.tokenizer.eos_token_ids,
        "stop_token_ids": frozenset(fields.stop_token_ids),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "beam": beam_params(fields) if fields.use_beam_search else None,
    }
    return SamplingParams(**values)


def text_rules(fields: SamplingFields, params: SamplingParams, *, echo: bool = False) -> TextRules:
    """Return how the answer's text is made."""
    return TextRules(
        stops=tuple(fields.stop),
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        min_tokens=fields.min_tokens,
        ending_ids=params.eos_token_ids | params.stop_token_ids,
        echo=echo,
    )


def beam_params(fields: SamplingFields) -> BeamParams:
    """Return how to search, for a request that asks for a beam search."""
    return BeamParams(
        width=fields.beam_width,
        length_penalty=fields.length_penalty,
        early_stopping=EarlyStopping(fields.early_stopping),
    )


def _check_width(fields: SamplingFields, limits: ModelLimits) -> None:
    """Refuse a search with more beams than tokens that do not end an answer."""
    width, num_ends = fields.beam_width, len(limits.tokenizer.eos_token_ids | set(fields.stop_token_ids))
    if width + num_ends > limits.vocab_size:
        _refuse(
            "n",
            f"{width} beams are too many for {limits.vocab_size} tokens, {num_ends} of which end an answer; "
            "lower n, or best_of.",
        )


def _logit_bias(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, float], ...]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in fields.logit_bias):
        _refuse("logit_bias", "logit_bias has a key that is not a token id; keys are ids in decimal digits.")
    biases = {int(key): bias for key, bias in fields.logit_bias.items()}
    limits.check_ids(tuple(biases), "logit_bias")
    return tuple(biases.items())


def _allowed_ids(ids: list[int], limits: ModelLimits, bad_words: tuple[tuple[int, ...], ...]) -> frozenset[int]:
    limits.check_ids(ids, "allowed_token_ids")
    allowed = frozenset(ids)
    if {(token_id,) for token_id in allowed} <= set(bad_words):
        _refuse("allowed_token_ids", "allowed_token_ids has nothing that bad_words does not rule out; allow more.")
    return allowed


def _bad_words(fields: SamplingFields, limits: ModelLimits) -> tuple[tuple[int, ...], ...]:
    """Return every word's tokens, with and without a space before it."""
    if sum(map(len, fields.bad_words)) > MAX_BAD_CHARS:
        _refuse("bad_words", f"bad_words has more than {MAX_BAD_CHARS} characters altogether; shorten it.")
    words = [word.lstrip() or word for word in fields.bad_words]
    forms = [
        tuple(limits.tokenizer.encode(space + word, add_special_tokens=False)) for word in words for space in ("", " ")
    ]
    return tuple(dict.fromkeys(form for form in forms if form))


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(message, param=param)
