"""The fields that both generating APIs share, their ranges, and what they become for the engine."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from engine.core.errors import ConfigError, InvalidRequestError, shorten
from engine.core.types import BeamParams, EarlyStopping, SamplingParams
from engine.text.choice import TextRules
from engine.text.detokenizer import SamplingDefaults
from engine.text.grammars.spec import GrammarSpec
from server.http.schema import Integer, RequestBody
from server.openai.limits import Limits
from server.openai.retention import PromptCacheOptions, Retention, retained_s
from server.openai.structured import Choices, ResponseFormat, Schema, StructuredOutputs, WhitespacePattern

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS, MAX_BAD_CHARS = 512, 8192  # encoded on the event loop, in 10 ms
MAX_CACHE_SALT = 128
MAX_DEADLINE_MS = 86_400_000  # a day
MAX_USER = 512
MAX_LENGTH_PENALTY = 10
MAX_REPETITION_PENALTY = 100  # and its inverse at least: logits stay finite in float32, whichever way it pushes them
GREEDY_BELOW = 1e-5  # a temperature too small to divide logits by asks for the most likely token

_OFF: tuple[Any, ...] = (False, 0, [], {}, "")

# Fields of OpenAI, vLLM and others that would change the answer, with the values that ask for nothing special.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "beam_width", "chat_template", "documents", "dry_multiplier", "dynatemp_range", "grammar", "json_schema",
            "logits_processors", "logprob_token_ids", "lora_path", "mirostat", "prompt_embeds", "regex",
            "repetition_detection", "return_prompt_text", "stop_regex", "suffix", "top_n_sigma", "xtc_probability",
        ),
        _OFF,
    ),
    "truncation_side": ("left",),
    "typical_p": (1, 1.0),
}  # fmt: skip

# Fields that ask for another way to the same answer, which is dropped where it cannot be had.
HINTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "mm_processor_kwargs"), _OFF
    ),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}

# What changes how tokens are drawn, with the values that do not, or that say what a search does anyway.
_NEUTRAL_IN_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (None,),
    "bad_words": ([],),
}

# What takes the place of a field that older clients send.
INSTEAD: Mapping[str, str] = {
    "beam_width": "send use_beam_search: true, and the width as n",
    "json_schema": "send structured_outputs: {json: ...}, or response_format",
    "regex": "send structured_outputs: {regex: ...}",
    "grammar": "send structured_outputs: {grammar: ...}",
}

# Fields that by their meaning leave the answer as it is: bookkeeping and hints.
NO_OPS = frozenset({"metadata", "prompt_cache_key", "service_tier", "store", "request_id"})


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(RequestBody):
    """How a stream reports usage."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class EngineBody(RequestBody):
    """Fields of every request that runs on the engine."""

    model: str | None = None
    include_metrics: bool = False  # report in the answer, or in a stream's last chunk, where its time went
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    deadline_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)  # for the whole answer, from its arrival
    max_queue_ms: int | None = Field(None, ge=1, le=MAX_DEADLINE_MS)  # until it is started
    cache_salt: str = Field("", max_length=MAX_CACHE_SALT)
    user: str = Field("", max_length=MAX_USER)  # the tenant that `fair` accounts to, where no API keys name one

    @property
    def tenant(self) -> str:
        """Return the tenant that the request names."""
        return self.user

    @property
    def retained_s(self) -> float:
        """Return for how long the whole prompt should stay cached; 0 for no longer than others."""
        return 0.0

    def dropped_hints(self, limits: Limits) -> list[str]:
        """Return the priority, where the scheduling policy ignores it."""
        return ["priority"] if self.priority and not limits.has_priorities else []


class SamplingBody(EngineBody):
    """Fields of /v1/completions and /v1/chat/completions alike. A default of None is the model's own.

    `use_beam_search` searches with n beams and gives their answers best first, a stream each as one chunk, at the end;
    `length_penalty` and `early_stopping` are transformers'. `allowed_token_ids` and `bad_words` are vLLM's, and so is
    `guided_*`, which older versions of it had instead of `structured_outputs`.
    """

    NO_OPS: ClassVar[frozenset[str]] = NO_OPS
    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = HINTS
    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED
    INSTEAD: ClassVar[Mapping[str, str]] = INSTEAD

    max_tokens: Integer | None = Field(None, ge=0)
    min_tokens: Integer = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_N)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    early_stopping: Literal[False, True, "never"] = False
    stop: Annotated[
        list[StopString],
        BeforeValidator(_listed, json_schema_input_type=StopString | list[StopString]),
        Field(max_length=MAX_STOPS),
    ] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Integer | None = Field(None, ge=0)
    truncate_prompt_tokens: Integer | None = Field(None, ge=-1)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # how logprobs spell tokens
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: str = Field("", max_length=MAX_USER)  # OpenAI's later name for it
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: Choices | None = None
    guided_grammar: str | None = Field(None, min_length=1)
    guided_whitespace_pattern: WhitespacePattern | None = None

    @property
    def tenant(self) -> str:
        """Whom it says it is from."""
        return self.user or self.safety_identifier

    @property
    def retained_s(self) -> float:
        """How long the whole prompt is to stay cached, as far as there is room; 0 for no longer than others."""
        return retained_s(self.prompt_cache_retention, self.prompt_cache_options)

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingBody:
        self._check_beam_search()
        if self.truncate_prompt_tokens == 0:
            _refuse("truncate_prompt_tokens", "truncate_prompt_tokens is 0; give at least 1, or -1 for what fits.")
        names = list(self._constraints())
        for first, other in pairwise(
            names
        ):  # clients send guided_* and structured_outputs alike to old and new versions of vLLM
            if self._spec(other) != self._spec(first):
                _refuse(first, f"{first} and {other} both constrain the answer; send only one.")
        return self

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            return
        for name, neutrals in _NEUTRAL_IN_SEARCH.items():
            if (value := getattr(self, name)) not in neutrals:
                _refuse(
                    name,
                    f"{name} is {shorten(str(value))}, but a beam search draws nothing: it goes by the model's own log "
                    "probabilities; leave it out.",
                )

    @property
    def beam_width(self) -> int:
        """Beams of a search; the n best of its answers are given."""
        return self.n

    @property
    def beam_params(self) -> BeamParams | None:
        """How to search, where that is asked for."""
        if not self.use_beam_search:
            return None
        return BeamParams(
            width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=EarlyStopping(self.early_stopping),
        )

    @property
    def num_drawn(self) -> int:
        """Answers that are drawn for each prompt; n of them are given."""
        return self.n

    @property
    def stream_usage(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def ignored_fields(self) -> list[str]:
        """Those of the body and of the objects in it."""
        names = ("stream_options", "response_format", "structured_outputs", "prompt_cache_options")
        parts = {name: getattr(self, name) for name in names}
        if self.response_format is not None:
            parts["response_format.json_schema"] = self.response_format.json_schema
        nested = [f"{at}.{name}" for at, part in parts.items() if part is not None for name in part.ignored_fields()]
        return super().ignored_fields() + nested

    def dropped_hints(self, limits: Limits) -> list[str]:
        """Return what has a meaning with other fields or other settings only."""
        is_idle = {
            "stream_options": self.stream_options is not None and not self.stream,
            "length_penalty": self.length_penalty != 1.0 and not self.use_beam_search,
            "early_stopping": self.early_stopping is not False and not self.use_beam_search,
        }
        return super().dropped_hints(limits) + [name for name, idle in is_idle.items() if idle]

    def _constraints(self) -> Iterator[str]:
        """Yield the names of the fields that constrain the answer."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        yield from (name for name, value in zip(names, guided, strict=True) if value not in (None, False))
        if self.structured_outputs is not None:
            yield "structured_outputs"
        if self.response_format is not None and self.response_format.type != "text":
            yield "response_format"

    def grammar_spec(self) -> tuple[GrammarSpec, str] | None:
        """Return the constraint on the answer, and the name of the field that asked for it."""
        name = next(self._constraints(), None)
        spec = None if name is None else self._spec(name)
        return None if name is None or spec is None else (spec, name)

    def _spec(self, name: str) -> GrammarSpec | None:
        """Return what one of those fields asks for."""
        asked = self.response_format if name == "response_format" else self.structured_outputs
        if name.startswith("guided_"):
            kind = name.removeprefix("guided_")
            asked = StructuredOutputs.of_guided(kind, getattr(self, name), self.guided_whitespace_pattern)
        return None if asked is None else asked.spec()

    def truncate(self, prompt: list[int], limits: Limits) -> list[int]:
        """The end of the prompt, if truncate_prompt_tokens asks for less than all; -1 keeps what leaves room."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt
        room = limits.max_model_len - (1 if self.max_tokens is None else self.max_tokens)
        return prompt[-(keep if keep > 0 else max(room, 1)) :]

    def sampling_params(
        self, limits: Limits, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """The engine's parameters. Raises InvalidRequestError for what only the model or the server can refuse."""
        self._check_against(limits, max_tokens)
        allowed, bad_words = self._allowed_ids(limits), self._bad_word_ids(limits)
        if allowed is not None and {(token_id,) for token_id in allowed} <= set(bad_words):
            _refuse("allowed_token_ids", "allowed_token_ids has nothing that bad_words does not rule out; allow more.")
        defaults = limits.tokenizer.sampling_defaults
        temperature = _first(self.temperature, defaults.temperature)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_k=max(_first(self.top_k, defaults.top_k), 0),
            top_p=_first(self.top_p, defaults.top_p),
            min_p=_first(self.min_p, defaults.min_p),
            repetition_penalty=_first(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self._logit_bias(limits),
            allowed_token_ids=allowed,
            bad_words=bad_words,
            seed=secrets.randbits(63) if self.seed is None else self.seed & (2**64 - 1),
            n=self.num_drawn,
            min_tokens=self.min_tokens,
            eos_token_ids=frozenset() if self.ignore_eos else limits.tokenizer.eos_token_ids,
            stop_token_ids=frozenset(self.stop_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            beam=self.beam_params,
        )

    def text_rules(self, params: SamplingParams, *, echo: bool = False) -> TextRules:
        """How the answer's text is made."""
        return TextRules(
            stops=tuple(self.stop),
            include_stop=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            min_tokens=self.min_tokens,
            ending_ids=params.eos_token_ids | params.stop_token_ids,
            echo=echo,
        )

    def _check_against(self, limits: Limits, max_tokens: int) -> None:
        limits.check_ids(self.stop_token_ids, "stop_token_ids")
        limits.check_logprobs(self.prompt_logprobs, "prompt_logprobs")
        self._check_width(limits)
        if self.min_tokens > max_tokens:
            _refuse("min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens ({max_tokens}); lower it.")

    def _check_width(self, limits: Limits) -> None:
        """Each step of a search needs `width` tokens to go on with, whatever others end it."""
        beam, num_ends = self.beam_params, len(limits.tokenizer.eos_token_ids | set(self.stop_token_ids))
        if beam is not None and beam.width + num_ends > limits.vocab_size:
            _refuse(
                "n",
                f"{beam.width} beams are too many for {limits.vocab_size} tokens, {num_ends} of which end an answer; "
                "lower n, or best_of.",
            )

    def _logit_bias(self, limits: Limits) -> tuple[tuple[int, float], ...]:
        if not all(key.isascii() and key.isdecimal() and len(key) < 20 for key in self.logit_bias):
            _refuse("logit_bias", "logit_bias has a key that is not a token id; keys are ids in decimal digits.")
        biases = {int(key): bias for key, bias in self.logit_bias.items()}
        limits.check_ids(tuple(biases), "logit_bias")
        return tuple(biases.items())

    def _allowed_ids(self, limits: Limits) -> frozenset[int] | None:
        if self.allowed_token_ids is None:
            return None
        limits.check_ids(self.allowed_token_ids, "allowed_token_ids")
        return frozenset(self.allowed_token_ids)

    def _bad_word_ids(self, limits: Limits) -> tuple[tuple[int, ...], ...]:
        """Return every word's tokens at the beginning of a text and, behind a space, within one."""
        if sum(map(len, self.bad_words)) > MAX_BAD_CHARS:
            _refuse("bad_words", f"bad_words has more than {MAX_BAD_CHARS} characters altogether; shorten it.")
        words = [word.lstrip() or word for word in self.bad_words]
        forms = [
            tuple(limits.tokenizer.encode(space + word, add_special_tokens=False))
            for word in words
            for space in ("", " ")
        ]
        return tuple(dict.fromkeys(form for form in forms if form))


def check_defaults(defaults: SamplingDefaults) -> None:
    """Raise ConfigError if a model recommends values that no request may ask for."""
    try:
        SamplingBody.model_validate(asdict(defaults))
    except ValidationError as error:
        name, reason = error.errors()[0]["loc"][0], error.errors()[0]["msg"]
        raise ConfigError(
            f"The model's generation_config.json has {name} {shorten(repr(getattr(defaults, str(name))))} ({reason}); "
            "correct it, or start with --generation-config quire."
        ) from error


def seconds(milliseconds: int | None) -> float | None:
    """The engine's unit."""
    return None if milliseconds is None else milliseconds / 1e3


def _first(asked: Any, default: Any) -> Any:
    return default if asked is None else asked


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(message, param=param)
