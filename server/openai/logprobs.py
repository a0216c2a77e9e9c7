"""Log probabilities as the completions API and the chat API show them."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from engine.core.types import TokenLogprob
from engine.text.chat.choice import Delta, DeltaLogprobs
from engine.text.tokenizer import TextTokenizer, finite, token_text
from server.protocol.documents import ResponseBody


class CompletionLogprobs(ResponseBody):
    """Parallel lists, as in the completions API."""

    text_offset: list[int] = Field(description="Where each token begins in the text.")
    token_logprobs: list[float | None] = Field(description="The log probability of each token.")
    tokens: list[str] = Field(description="The tokens' texts.")
    top_logprobs: list[dict[str, float] | None] = Field(description="The most probable tokens there.")


class TopLogprob(ResponseBody):
    token: str = Field(description="The token's text.")
    logprob: float = Field(description="The natural logarithm of the probability.")
    bytes: list[int] = Field(description="The token's bytes.")


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = Field(description="The most probable tokens there.")


class ChatLogprobs(ResponseBody):
    """One object a token, as in the chat API."""

    content: list[ChatLogprob] = Field(description="The text, or the parts.")
    refusal: None = Field(None, description="Always null.")


def completion_logprobs(
    tokenizer: TextTokenizer, delta: Delta, num_top: int, *, as_ids: bool = False
) -> CompletionLogprobs:
    """Return a delta's log probabilities; the drawn token joins the alternatives."""

    def spell(token_id: int) -> str:
        return _by_id(token_id) if as_ids else token_text(tokenizer, token_id)

    scored = delta.scored or DeltaLogprobs()
    tops: list[dict[str, float] | None] = []
    for entry in scored.entries:
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
            top.setdefault(spell(token_id), finite(logprob))  # the likelier of two tokens with one text is kept
        tops.append(top)
    return CompletionLogprobs(
        text_offset=scored.offsets,
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in scored.entries],
        tokens=[spell(token_id) for token_id in scored.token_ids],
        top_logprobs=tops,
    )


def chat_logprobs(
    tokenizer: TextTokenizer, logprobs: Sequence[TokenLogprob | None], *, as_ids: bool = False
) -> ChatLogprobs:
    """Return log probabilities of an answer; `as_ids` spells tokens as _by_id does."""

    def shape(token_id: int, logprob: float) -> TopLogprob:
        raw = tokenizer.token_bytes(token_id)
        token = _by_id(token_id) if as_ids else raw.decode(errors="replace")
        return TopLogprob(token=token, logprob=finite(logprob), bytes=list(raw))

    content = []
    for entry in logprobs:
        assert entry is not None, "chat answers do not echo the prompt"
        own = shape(entry.token_id, entry.logprob)
        top = [shape(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=top))
    return ChatLogprobs(content=content, refusal=None)


def _by_id(token_id: int) -> str:
    """Return vLLM's spelling of a token, which differs for tokens of one text."""
    return f"token_id:{token_id}"
