"""Turns the prompts of requests into token ids. Event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import PlainValidator

from engine.core.errors import InvalidRequestError
from server.answers.model import ServedModel, aside

Prompt = str | list[int]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}  # ten times as fast as a generator


def _prompts(value: Any) -> list[Prompt]:
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if prompts is value and not (
        isinstance(value, list) and all(isinstance(item, str) or _is_ids(item) for item in value)
    ):
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not prompts or "" in prompts:
        raise ValueError("it is empty; send at least one token")
    return prompts


Prompts = Annotated[
    list[Prompt], PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
]


async def prompt_ids(
    model: ServedModel, prompts: Sequence[Prompt], param: str, *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each prompt. Errors name `param`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await model.encode(texts, param, add_special_tokens=add_special_tokens))

    def check(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = next(encoded)
        else:
            model.limits.check_ids(prompt, param)
            ids = prompt
        if not ids:
            raise InvalidRequestError(f"The {param} has no tokens; send at least one.", param=param)
        return ids

    return await aside(lambda: list(map(check, prompts)))
