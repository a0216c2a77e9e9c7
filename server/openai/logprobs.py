"""Log probabilities in the two shapes that clients know: parallel lists (completions) and one object a token (chat)."""

from __future__ import annotations

from engine.text.choice import Delta
from engine.text.logprobs import finite, token_text
from engine.text.types import Tokenizer
from server.http.bodies import ResponseBody


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


def completion_logprobs(
    tokenizer: Tokenizer, delta: Delta, num_top: int, *, as_ids: bool = False
) -> CompletionLogprobs:
    """A delta's log probabilities; the sampled token joins the best alternatives if it is not one of them.

    With `as_ids` tokens are spelled as _by_id says.
    """

    def spell(token_id: int) -> str:
        return _by_id(token_id) if as_ids else token_text(tokenizer, token_id)

    tops: list[dict[str, float] | None] = []
    for entry in delta.logprobs:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
            top.setdefault(spell(token_id), finite(logprob))  # of two tokens with one text the likelier one counts
        tops.append(top)
    return CompletionLogprobs(
        text_offset=delta.offsets,
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in delta.logprobs],
        tokens=[spell(token_id) for token_id in delta.logprob_ids],
        top_logprobs=tops,
    )


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, *, as_ids: bool = False) -> ChatLogprobs:
    """A delta's log probabilities, one object a token; with `as_ids` tokens are spelled as _by_id says."""

    def shape(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        token = _by_id(token_id) if as_ids else raw.decode(errors="replace")
        return TopLogprob(token=token, logprob=finite(logprob), bytes=list(raw))

    content = []
    for entry in delta.logprobs:
        assert entry is not None, "chat answers do not echo the prompt"
        own = shape(entry.token_id, entry.logprob)
        top = [shape(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def _by_id(token_id: int) -> str:
    """vLLM's spelling for clients that have to tell two tokens with the same text apart."""
    return f"token_id:{token_id}"
