"""From a conversation to what the engine is asked: the one way for every API that has messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import ClientError
from engine.core.types import Request, SamplingParams
from engine.text.choice import TextRules
from server.context import Context, aside
from server.errors import ApiError
from server.openai.chat_body import ChatBody
from server.openai.formatter import ChunkMeta
from server.openai.limits import num_common
from server.respond import answer_id, constrain, engine_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A conversation, ready to be submitted."""

    text: str
    prompt: Sequence[int]
    params: SamplingParams
    rules: TextRules
    requests: Sequence[Request]

    def meta(self, id_prefix: str, model: str, context: Context) -> ChunkMeta:
        """What is the same in all that is told of the answer."""
        return ChunkMeta(
            id_prefix=id_prefix,
            model=model,
            tokenizer=context.tokenizer,
            prompts=[self.prompt],
            answer_id=answer_id(self.requests),
        )


async def prompt_ids(context: Context, body: ChatBody) -> tuple[str, list[int]]:
    """The prompt as its template writes it, and its tokens. Raises ClientError or ApiError for what cannot be one."""
    text = await context.render(body)
    [ids] = await context.encode([text], "messages", add_special_tokens=body.add_special_tokens)
    return text, body.truncate(ids, context.limits)


async def count_common(context: Context, body: ChatBody, text: str, prompt: Sequence[int]) -> int:
    """How many tokens of a prompt, rendered as `text`, another conversation begins with; 0 of one that cannot be."""
    try:
        rendered = await context.render(body)
        common = await aside(lambda: text[: num_common(rendered, text)])
        [ids] = await context.encode([common], "messages", add_special_tokens=body.add_special_tokens)
    except (ClientError, ApiError):
        return 0
    return num_common(ids, prompt)


async def prepare(context: Context, body: ChatBody) -> PreparedChat:
    """Raises ClientError or ApiError for what cannot be answered."""
    text, prompt = await prompt_ids(context, body)
    limits = context.limits
    params = await aside(lambda: body.params(limits, len(prompt)))
    params = await constrain(context, await aside(lambda: body.message_grammar(limits)), params)

    params = body.with_thoughts(params, limits, text)
    return PreparedChat(
        text=text,
        prompt=prompt,
        params=params,
        rules=body.message_rules(params, limits, text),
        requests=engine_requests(context, body, [prompt], [params]),
    )
