"""POST /v1/completions: the route, its request, its answer and its chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field, PlainValidator, model_validator
from starlette.responses import Response

from engine.core.errors import InvalidRequestError, read_each
from engine.core.types import SamplingParams
from engine.text.chat.choice import Delta
from engine.text.chat.limits import ModelLimits
from engine.text.fields.body import Integer, Refused
from engine.text.fields.sampling import MAX_N
from engine.text.requests.chat_preprocessor import sampling_params, text_rules, truncated
from engine.text.tokenizer import PromptLogprobs
from server.answers.body import HINTS, SamplingBody
from server.answers.formatter import ChunkFormatter
from server.answers.model import ServedModel, aside
from server.answers.parts import InModel, InResponder
from server.http.bodies import json_body
from server.http.openapi import answers
from server.openai.logprobs import CompletionLogprobs, completion_logprobs
from server.protocol.documents import Filtered, Headed, ResponseBody, Usage

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024  # of all prompts together


class CompletionBody(SamplingBody):
    """The request.

    `logprobs` counts alternatives. `echo` begins the answer with the prompt. Of `best_of` answers that are drawn, the n
    likeliest are given, by the mean log probability of a token; with a beam search it is the width.
    """

    HINTS: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **HINTS,
        "thinking_token_budget": (),
        "mm_processor_kwargs": ({},),
    }
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        **SamplingBody.UNSUPPORTED,
        "max_completion_tokens": Refused((), "send max_tokens"),
    }

    prompt: Prompts = Field(description="A text, a list of texts, a list of token ids, or a list of such lists.")
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="Generate so many answers and return the n best.")
    max_tokens: Integer = Field(DEFAULT_MAX_TOKENS, ge=0, description="The most tokens to generate.")
    echo: bool = Field(False, description="Return the prompt before the completion.")
    logprobs: Integer | None = Field(
        None, ge=0, description="Return log probabilities of the drawn and of so many most probable tokens."
    )
    add_special_tokens: bool = Field(True, description="Whether the tokenizer adds its special tokens, such as BOS.")

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        num_choices = len(self.prompt) * self.num_drawn
        if num_choices > MAX_CHOICES:
            drawn = f"n = {self.n}" if self.best_of is None else f"best_of = {self.best_of}"
            raise InvalidRequestError(
                f"{len(self.prompt)} prompts with {drawn} make {num_choices} choices; one request may have at most "
                f"{MAX_CHOICES}.",
                param="prompt",
            )
        if self.beam_width < self.n:
            raise InvalidRequestError(
                f"best_of is {self.best_of}, of which n = {self.n} cannot be chosen; raise best_of or lower n.",
                param="best_of",
            )
        if self.num_drawn > self.n and self.stream:
            raise InvalidRequestError(
                "best_of beyond n cannot be streamed, as the best are known at the end only; leave stream out.",
                param="best_of",
            )
        if not self.max_tokens and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens is 0, which answers nothing; give at least 1, or set echo or prompt_logprobs to score.",
                param="max_tokens",
            )
        return self

    @property
    def num_drawn(self) -> int:
        return self.n if self.use_beam_search else self.beam_width

    @property
    def beam_width(self) -> int:
        return self.n if self.best_of is None else self.best_of


class CompletionChoice(ResponseBody):
    index: int = Field(description="Its place in the list.")
    text: str = Field(description="The text.")
    logprobs: CompletionLogprobs | None = Field(description="Log probabilities of the tokens.")
    finish_reason: str | None = Field(description="stop, length, content_filter, or error.")
    stop_reason: int | str | None = Field(description="The stop string or token id that ended the answer.")
    token_ids: list[int] | None = Field(None, description="The answer's token ids, if return_token_ids asks for them.")
    prompt_token_ids: list[int] | None = Field(
        None, description="The prompt's token ids, if return_token_ids asks for them."
    )
    prompt_logprobs: PromptLogprobs | None = Field(None, description="Log probabilities of the prompt's tokens.")
    content_filter_results: dict[str, Filtered] | None = Field(
        None, description="The guard's categories, if it ended the answer."
    )


class Completion(Headed):
    """The answer, and a chunk of it, which has the same shape."""

    system_fingerprint: str = Field(description="The daemon's version.")
    choices: list[CompletionChoice] = Field(description="The answers, n of them.")
    usage: Usage | None = Field(None, description="How many tokens were read and generated.")


class CompletionFormatter(ChunkFormatter):
    """Formats answers of the completions API."""

    chunk, object_name = Completion, "text_completion"
    _body: CompletionBody

    def answer(self, deltas: Sequence[Delta], usage: Usage) -> bytes:
        # Each choice is written alone: a thousand in one call would hold the GIL for long.
        choices = [self._choice(index, delta).json_bytes() for index, delta in enumerate(self._best(deltas))]
        return self._render(b",".join(choices), usage=usage)

    def _best(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Return the n likeliest answers of each prompt, best first."""
        n, num_drawn = self._body.n, self._body.num_drawn
        if n == num_drawn:
            return deltas
        prompts = [deltas[begin : begin + num_drawn] for begin in range(0, len(deltas), num_drawn)]
        return [delta for drawn in prompts for delta in sorted(drawn, key=_mean_logprob, reverse=True)[:n]]

    def chunks(self, index: int, delta: Delta, **usage: Usage | None) -> list[bytes]:
        return [self._render(self._choice(index, delta).json_bytes(), **usage)]

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        finish = delta.finish_reason
        choice = CompletionChoice(
            index=index,
            text=delta.text,
            logprobs=None,
            finish_reason=finish.value if finish else None,
            stop_reason=delta.stop_reason,
        )
        if self._body.logprobs is not None:
            choice.logprobs = completion_logprobs(
                self._meta.tokenizer, delta, self._body.logprobs, as_ids=self._spells_ids
            )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if delta.prompt is not None:
                choice.prompt_token_ids = list(self._meta.prompts[index // self._body.n])
        if (logprobs := self._prompt_logprobs(delta)) is not None:
            choice.prompt_logprobs = logprobs
        if delta.filtered is not None:
            choice.content_filter_results = {name: Filtered(filtered=True) for name in delta.filtered}
        return choice


def _mean_logprob(delta: Delta) -> float:
    """Return the mean log probability of an answer's tokens, without an echo; of one that a guard ended, the least."""
    if delta.filtered is not None:
        return -inf
    num_tokens = len(delta.token_ids)
    drawn = [entry.logprob for entry in delta.logprobs[len(delta.logprobs) - num_tokens :] if entry is not None]
    return sum(drawn) / max(num_tokens, 1)


router = APIRouter()


def completion_params(body: CompletionBody, limits: ModelLimits) -> SamplingParams:
    """Return the engine's parameters, for every prompt. Raises InvalidRequestError."""
    limits.check_logprobs(body.logprobs, "logprobs")
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    scored = max((count for count in wanted if count is not None), default=None)
    logprobs = (body.logprobs or 0) if body.num_drawn > body.n else body.logprobs
    return sampling_params(body, limits, max_tokens=body.max_tokens, logprobs=logprobs, prompt_logprobs=scored)


@router.post("/v1/completions", responses=answers(Completion, streams=True))
async def create_completion(
    http: Request,
    body: Annotated[CompletionBody, Depends(json_body(CompletionBody, spends=True))],
    model: InModel,
    responder: InResponder,
) -> Response:
    """Continue one or several prompts."""
    named = model.find(body.model)
    params, constraints = await aside(lambda: (completion_params(body, model.limits), body.constraints()))
    if constraints and params.max_tokens:
        params = replace(params, grammar=await model.compile(constraints[0]))
    prompts = await prompt_ids(model, body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    prompts = [truncated(body, prompt, model.limits) for prompt in prompts]
    rules = text_rules(body, params, echo=body.echo)
    if len(prompts) == 1:
        owner = named.history_owner(http, body)
        rules = replace(rules, turn=await aside(lambda: model.preprocessor.follow(prompts[0], owner), len(prompts[0])))
    requests = responder.requests(body, named.adapter, prompts, [params] * len(prompts))
    meta = responder.meta(requests, id_prefix="cmpl", model=named.name)
    return await responder.respond(http, body, requests, rules, partial(CompletionFormatter, body, meta))


Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}  # ten times as fast as a generator


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not all(
        isinstance(each, str) or each == [] or _is_ids(each) for each in prompts
    ):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not all(prompts or [""]):
        which = f"item {next(index for index, each in enumerate(prompts) if not each)}" if len(prompts) > 1 else "it"
        raise ValueError(f"{which} is empty; send at least one token")
    return prompts


Prompts = Annotated[
    list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


async def prompt_ids(
    model: ServedModel, prompts: Sequence[Prompt], param: str, *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each prompt. Errors name `param`."""

    def read(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            model.limits.check_length(len(prompt), param)
            ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            model.limits.check_ids(prompt, param)
            ids = prompt
        if not ids:
            raise InvalidRequestError(f"The {param} has no tokens; send at least one.", param=param)
        return ids

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await aside(lambda: read_each(read, prompts), num_chars)
