"""Log probabilities by token id, in vLLM's shape. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.types import TokenLogprob
from engine.text.tokenizer import TextTokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot express


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The log probability of one token; `rank` is None where it was not computed."""

    logprob: float = field(metadata={"description": "The natural logarithm of the probability."})
    rank: int | None = field(metadata={"description": "The token's place by probability, from 1."})
    decoded_token: str = field(metadata={"description": "The token's text."})


# One entry for each token: by token id, the token itself and its best alternatives. None for the first of a prompt.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    """Return a token as text; part of a character is spelled as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def finite(logprob: float) -> float:
    """Return a log probability that JSON can express."""
    return max(logprob, LOWEST)


def prompt_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob | None], num_top: int) -> PromptLogprobs:
    """Return the log probabilities of tokens, with `num_top` alternatives each."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def _by_id(tokenizer: TextTokenizer, entry: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    ranked.append((entry.token_id, entry.logprob, entry.rank))
    return {
        token_id: PromptLogprob(finite(logprob), rank, token_text(tokenizer, token_id))
        for token_id, logprob, rank in ranked
    }
