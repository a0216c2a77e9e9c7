"""Log probabilities in the two shapes that clients know: parallel lists (completions) and one object a token (chat)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.types import TokenLogprob
from server.choice import Delta
from server.protocol.base import ResponseBody
from server.text import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class CompletionLogprobs(ResponseBody):
    """The completions API's shape."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(ResponseBody):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    """The chat API's shape."""

    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(ResponseBody):
    logprob: float
    rank: int | None
    decoded_token: str


# One entry a prompt token: by token id, the token itself and its best alternatives. None for the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is part of a character as `bytes:\\xNN`, as OpenAI spells it."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, num_top: int) -> CompletionLogprobs:
    """A delta's log probabilities; the sampled token joins the best alternatives if it is not one of them."""
    tops: list[dict[str, float] | None] = []
    for entry in delta.logprobs:
        if entry is None:
            tops.append(None)
            continue
        top = {token_text(tokenizer, token_id): finite(logprob) for token_id, logprob in entry.top[:num_top]}
        top.setdefault(token_text(tokenizer, entry.token_id), finite(entry.logprob))
        tops.append(top)
    return CompletionLogprobs(
        text_offset=delta.offsets,
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in delta.logprobs],
        tokens=[token_text(tokenizer, token_id) for token_id in delta.logprob_ids],
        top_logprobs=tops,
    )


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> ChatLogprobs:
    """A delta's log probabilities, one object a token."""
    content = []
    for entry in delta.logprobs:
        assert entry is not None, "chat answers do not echo the prompt"
        top = [_top_logprob(tokenizer, token_id, logprob) for token_id, logprob in entry.top]
        raw = tokenizer.token_bytes(entry.token_id)
        content.append(
            ChatLogprob(
                token=raw.decode(errors="replace"), logprob=finite(entry.logprob), bytes=list(raw), top_logprobs=top
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], num_top: int) -> PromptLogprobs:
    """A prompt's log probabilities in vLLM's shape."""
    shaped: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            shaped.append(None)
            continue
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
        ranked.append((entry.token_id, entry.logprob, entry.rank))
        shaped.append(
            {
                token_id: PromptLogprob(
                    logprob=finite(logprob), rank=rank, decoded_token=token_text(tokenizer, token_id)
                )
                for token_id, logprob, rank in ranked
            }
        )
    return shaped


def _top_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(token=raw.decode(errors="replace"), logprob=finite(logprob), bytes=list(raw))
