"""Prompts as clients send them become token ids. Event loop, long texts on a worker thread."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import InvalidRequestError
from server.protocol.completions import Prompt
from server.routes.context import Context, aside


async def prompt_ids(
    context: Context, prompts: Sequence[Prompt], param: str, *, add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each prompt, text or ids. Raises InvalidRequestError or ContextLengthError, which name `param`."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    encoded = iter(await context.encode(texts, param, add_special_tokens=add_special_tokens))

    def check_all() -> list[list[int]]:
        found: list[list[int]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                ids = next(encoded)
            else:
                ids = prompt
                context.limits.check_ids(ids, param)
            if not ids:
                raise InvalidRequestError(f"The {param} has no tokens; send at least one.", param=param)
            found.append(ids)
        return found

    return await aside(check_all)
