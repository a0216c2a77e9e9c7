"""The shared part of /v1/embeddings and /v1/score, which only read prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

from fastapi import Request
from pydantic import Field

from engine.core.errors import InvalidRequestError
from engine.core.types import PromptInfo
from engine.core.types import Request as EngineRequest
from engine.text.chat.choice import TextRules
from engine.text.fields.body import Refused
from server.answers.body import EngineBody
from server.answers.generation import Generation
from server.answers.respond import MAX_INLINE_TOKENS, Responder, unless_disconnected
from server.http.threads import run_slowly

MAX_INPUTS = 2048  # of one request; OpenAI's limit


class PromptOnlyBody(EngineBody):
    """The fields that both requests share."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"request_id"})
    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "stream": Refused((False,)),
        "truncate_prompt_tokens": Refused(),
        "truncation_side": Refused(("left", "right")),
    }

    add_special_tokens: bool = Field(True, description="Whether the tokenizer adds its special tokens, such as BOS.")


def check_num_inputs(num: int, param: str) -> None:
    """Raise InvalidRequestError for too many inputs."""
    if num > MAX_INPUTS:
        raise InvalidRequestError(f"{param} has {num} items; one request may have at most {MAX_INPUTS}.", param=param)


Result = TypeVar("Result")


async def shape_each(
    http: Request,
    responder: Responder,
    body: PromptOnlyBody,
    requests: Sequence[EngineRequest],
    shape: Callable[[int, PromptInfo], Result],
) -> tuple[list[Result], Generation]:
    """Run requests, and return what `shape` makes of each prompt, in order.

    Each is shaped as soon as it is computed, so that the log probabilities of all prompts are never held together. A
    client that leaves ends it.
    """
    answer, generation = responder.submit(http, requests, TextRules())
    results: dict[int, Result] = {}

    async def shape_all() -> None:
        while news := await generation.next_deltas():
            infos = [(index, delta.prompt) for index, delta in news if delta.prompt is not None]
            num_tokens = sum(len(info.logprobs or ()) for _, info in infos)
            some = partial(_shape_some, infos, shape)
            results.update(some() if num_tokens <= MAX_INLINE_TOKENS else await run_slowly(some))
        if body.include_metrics:
            await generation.settle()

    with answer:
        await unless_disconnected(http.receive, shape_all())
    return [results[index] for index in sorted(results)], generation


def _shape_some(infos: list[tuple[int, PromptInfo]], shape: Callable[[int, PromptInfo], Result]) -> dict[int, Result]:
    return {index: shape(index, info) for index, info in infos}
