"""From a conversation to engine requests, for every API that has messages. Event loop; long texts on other threads."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import ClientError
from engine.core.types import Request
from engine.text.chat_preprocessor import PreparedChat
from engine.text.limits import num_common
from server.context import Context, aside, for_text
from server.errors import ApiError
from server.openai.chat_body import ChatBody
from server.openai.formatter import ChunkMeta
from server.respond import answer_id, engine_requests


async def prepare(context: Context, body: ChatBody) -> tuple[PreparedChat, list[Request]]:
    """Return a conversation as the engine takes it. Raises ClientError or ApiError for one that cannot be answered."""
    text = await context.render(body)
    chat = await for_text(len(text), lambda: context.preprocessor.prepare(body, text))
    grammar = None if chat.constraint is None else await context.grammars.compile(*chat.constraint)
    chat = chat.constrained(grammar)
    return chat, engine_requests(context, body, [chat.prompt], [chat.params])


def chunk_meta(
    context: Context, chat: PreparedChat, requests: Sequence[Request], *, id_prefix: str, model: str
) -> ChunkMeta:
    """Return the fields that every chunk of the answer shares."""
    return ChunkMeta(
        id_prefix=id_prefix,
        model=model,
        tokenizer=context.tokenizer,
        prompts=[chat.prompt],
        answer_id=answer_id(requests),
    )


async def prompt_ids(context: Context, body: ChatBody) -> list[int]:
    """Return the tokens of a conversation's prompt. Raises ClientError for one that cannot be a prompt."""
    text = await context.render(body)
    return await for_text(len(text), lambda: context.preprocessor.encode(body, text))


async def count_common(context: Context, body: ChatBody, chat: PreparedChat) -> int:
    """Return how many tokens of a prompt another conversation begins with; 0 if it cannot be rendered."""
    try:
        rendered = await context.render(body)
        common = await aside(lambda: chat.text[: num_common(rendered, chat.text)])
        [ids] = await context.encode([common], "messages", add_special_tokens=body.add_special_tokens)
    except (ClientError, ApiError):
        return 0
    return num_common(ids, chat.prompt)
