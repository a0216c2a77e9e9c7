"""The fields of sampling, stopping and queueing: names, types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.shown import shorten
from engine.text.fields.body import IdleFields, Integer, RequestBody, or_text
from engine.text.fields.structured import Choices, ResponseFormat, Schema, StructuredOutputs, WhitespacePattern
from engine.text.grammars.spec import GrammarSpec
from engine.text.types import SamplingDefaults

MAX_N = 128
MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 512
MAX_DEADLINE_MS = 86_400_000  # a day
MAX_LENGTH_PENALTY = 10
MAX_REPETITION_PENALTY = 100  # and its inverse at least: logits stay finite in float32, whichever way it pushes them

# Fields that change how tokens are drawn, with the values that do not, or that ask for what a beam search does anyway.
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

_CONSTRAINING = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)


listed = or_text(lambda text: [text])


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class QueueFields(RequestBody):
    """How a request waits for the engine."""

    IDLE: ClassVar[IdleFields] = {"priority": lambda body, limits: body.priority != 0 and not limits.has_priorities}

    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="Lower goes first, under the policies priority and fair."
    )
    deadline_ms: int | None = Field(
        None,
        ge=1,
        le=MAX_DEADLINE_MS,
        description="Drop the request if the whole answer cannot be ready this long after its arrival.",
    )
    max_queue_ms: int | None = Field(
        None, ge=1, le=MAX_DEADLINE_MS, description="Drop the request if it cannot start this long after its arrival."
    )


class Constraint(NamedTuple):
    """A grammar that an answer must follow, and the field that asks for it."""

    spec: GrammarSpec
    param: str


class ConstraintFields(RequestBody):
    """The fields that constrain the answer; `guided_*` is of older vLLMs."""

    response_format: ResponseFormat | None = Field(None, description="text, any JSON, or JSON of a schema.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="A schema, regular expression, choice or grammar that the answer matches."
    )
    guided_json: Schema | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, min_length=1, description="The older name of structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="The older name of structured_outputs.choice.")
    guided_grammar: str | None = Field(None, min_length=1, description="The older name of structured_outputs.grammar.")
    guided_whitespace_pattern: WhitespacePattern | None = Field(
        None, description="The older name of structured_outputs.whitespace_pattern."
    )

    def constraints(self) -> list[Constraint]:
        """Return every constraint; a valid request has one, perhaps in several fields."""
        return [] if _CONSTRAINING.isdisjoint(self.model_fields_set) else self._constraints()

    def _constraints(self) -> list[Constraint]:
        found: list[tuple[str, ResponseFormat | StructuredOutputs | None]] = []
        guided = zip(
            ("json", "regex", "choice", "grammar"),
            (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
            strict=True,
        )
        for kind, value in guided:
            if value is not None:
                named = {kind: value, "whitespace_pattern": self.guided_whitespace_pattern}
                found.append((f"guided_{kind}", StructuredOutputs.model_validate(named)))
        found += [("structured_outputs", self.structured_outputs), ("response_format", self.response_format)]
        specs = [(None if asked is None else asked.spec(), param) for param, asked in found]
        return [Constraint(spec, param) for spec, param in specs if spec is not None]


class SamplingFields(QueueFields, ConstraintFields):
    """How to choose tokens and when to stop. A default of None is the model's own.

    `use_beam_search` searches with n beams and returns their answers best first, each at the end of the search;
    `length_penalty` and `early_stopping` are transformers'. `allowed_token_ids` and `bad_words` are vLLM's.
    """

    IDLE: ClassVar[IdleFields] = {
        **QueueFields.IDLE,
        "guided_whitespace_pattern": lambda body, _: body.guided_json is None,
        "length_penalty": lambda body, _: body.length_penalty != 1.0 and not body.use_beam_search,
        "early_stopping": lambda body, _: body.early_stopping is not False and not body.use_beam_search,
    }

    max_tokens: Integer | None = Field(None, ge=0)
    min_tokens: Integer = Field(
        0, ge=0, description="No stop token or stop string ends the answer before this many tokens."
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="Divides the logits; 0 takes the most probable token."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Draw from the smallest set of tokens with this total probability."
    )
    top_k: Integer | None = Field(None, ge=-1, description="Draw from the k most probable tokens; 0 or -1 means all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drop tokens less probable than this share of the most probable one."
    )
    repetition_penalty: float | None = Field(
        None,
        ge=1 / MAX_REPETITION_PENALTY,
        le=MAX_REPETITION_PENALTY,
        description="Divides positive logits of tokens in prompt and answer, and multiplies negative ones.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logit of each token that was generated."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from a token's logit once for each time that it was generated."
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, description="Added to the logits of the named token ids."
    )
    allowed_token_ids: list[int] | None = Field(None, min_length=1, description="The only token ids that may be drawn.")
    bad_words: list[BadWord] = Field(
        default_factory=list, max_length=MAX_BAD_WORDS, description="Texts that the answer must not contain."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed and request give the same answer.")
    n: int = Field(1, ge=1, le=MAX_N, description="The number of answers.")
    use_beam_search: bool = Field(False, description="Search with n beams instead of drawing tokens.")
    length_penalty: float = Field(
        1.0,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="The power of the length by which a beam's score is divided.",
    )
    early_stopping: Literal[False, True, "never"] = Field(
        False, description="When a beam search ends, as in transformers."
    )
    stop: Annotated[
        list[StopString],
        BeforeValidator(listed, json_schema_input_type=StopString | list[StopString]),
        Field(max_length=MAX_STOPS),
    ] = Field(default_factory=list, description="Texts that end the answer; they are not part of it.")
    stop_token_ids: list[int] = Field(
        default_factory=list, max_length=MAX_STOP_TOKEN_IDS, description="Token ids that end the answer."
    )
    include_stop_str_in_output: bool = Field(False, description="Keep the stop string at the end of the answer.")
    ignore_eos: bool = Field(False, description="Do not end at the model's end tokens.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    prompt_logprobs: Integer | None = Field(
        None, ge=0, description="Return log probabilities of the prompt's tokens, with so many alternatives."
    )
    truncate_prompt_tokens: Integer | None = Field(
        None, ge=-1, description="Keep only the last so many tokens of the prompt."
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> SamplingFields:
        if self.use_beam_search:
            self._check_beam_search()
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0; give at least 1, or -1 for what fits.", param="truncate_prompt_tokens"
            )
        # Clients send guided_* and structured_outputs alike, to old and new versions of vLLM.
        for (spec, first), (other_spec, other) in pairwise(self.constraints()):
            if spec != other_spec:
                raise InvalidRequestError(f"{first} and {other} both constrain the answer; send only one.", param=first)
        return self

    def _check_beam_search(self) -> None:
        for name, neutral in _NEUTRAL_IN_SEARCH.items():
            if (value := getattr(self, name)) not in neutral:
                raise InvalidRequestError(
                    f"{name} is {shorten(str(value))}, but a beam search draws nothing: it goes by the model's own log "
                    "probabilities; leave it out.",
                    param=name,
                )

    @property
    def asked_max_tokens(self) -> int | None:
        """The most tokens of an answer, where the request names them."""
        return self.max_tokens

    @property
    def beam_width(self) -> int:
        """The beams of a search; the n best of its answers are returned."""
        return self.n

    @property
    def num_drawn(self) -> int:
        """The answers that are drawn for each prompt; n of them are returned."""
        return self.n


def check_defaults(defaults: SamplingDefaults) -> None:
    """Raise ConfigError if a model recommends values that no request may ask for."""
    values = asdict(defaults)
    lengths = {name: values.pop(name) for name in ("max_tokens", "max_new_tokens")}
    name, reason = "", ""
    try:
        SamplingFields.model_validate(values)
    except ValidationError as error:
        name, reason = str(error.errors()[0]["loc"][0]), error.errors()[0]["msg"]
    for each, value in lengths.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            name, reason = each, "it must be a whole number of at least 1"
    if name:
        raise ConfigError(
            f"The model's generation_config.json has {name} {shorten(repr(getattr(defaults, name)))} ({reason}); correct it, start "
            "with --generation-config vllm, or set others with --override-generation-config."
        )
