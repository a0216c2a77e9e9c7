"""Computes the results of prompts without an answer: a unit vector, a cosine, or the likelihood of a prompt's end. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Literal

from engine.core.errors import InvalidRequestError, UnsupportedError
from engine.core.types import TokenLogprob
from engine.text.tokenizer import finite

Reduction = Literal["mean", "sum"]  # of the tokens' log probabilities


def unit_vector(values: Sequence[float], dimensions: int | None = None, *, normalizes: bool = True) -> array[float]:
    """Return the first `dimensions` of a vector, or all, scaled to length one if wanted, in float32; zero stays zero.

    Raises InvalidRequestError for dimensions that the vector does not have.
    """
    if dimensions is not None and not 1 <= dimensions <= len(values):
        remedy = "lower it" if dimensions > 0 else "give 1 at least"
        message = f"dimensions is {dimensions}, but this model's vectors have {len(values)}; {remedy}."
        raise InvalidRequestError(message, param="dimensions")
    values = values[:dimensions]
    length = (math.hypot(*values) if normalizes else 0.0) or 1.0
    return array("f", [value / length for value in values])


def activated(values: Sequence[float], activation: str) -> list[float]:
    """Return scores as probabilities: of each label alone by sigmoid, of one among all by softmax, or as they are."""
    if activation == "sigmoid":
        return [0.5 * (1 + math.tanh(value / 2)) for value in values]
    if activation == "softmax":
        weights = [math.exp(value - max(values)) for value in values]
        return [weight / math.fsum(weights) for weight in weights]
    return list(values)


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two unit vectors."""
    return math.fsum(x * y for x, y in zip(first, second, strict=True))


def check_reduction(reduction: Reduction) -> None:
    """Raise InvalidRequestError for a sum, where a score is no likelihood."""
    if reduction != "mean":
        raise InvalidRequestError(
            f"reduction is {reduction!r}, and this model has no LM head: a score is no sum of log probabilities; leave it out.",
            param="reduction",
        )


def check_likelihoods(texts: Sequence[str], truncate_prompt_tokens: int | None) -> None:
    """Raise ClientError for text_2 without a likelihood, and for texts that would be cut."""
    if truncate_prompt_tokens is not None:
        raise UnsupportedError(
            "truncate_prompt_tokens", "the likelihood of a text that is cut is another's; shorten it"
        )
    if "" in texts:
        raise InvalidRequestError("text_2 has an empty text, which has no likelihood; leave it out.", param="text_2")


def first_scored(context: Sequence[int], whole: Sequence[int]) -> int:
    """Return the first token of `whole` that differs from `context`'s tokens. Raises InvalidRequestError without one."""
    pairs = zip(context, whole, strict=False)
    first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(context), len(whole)))
    if not first:
        raise InvalidRequestError(
            "text_1 has no token before text_2's first; submit with a longer text_1.", param="text_1"
        )
    if first == len(whole):
        raise InvalidRequestError("text_2 adds no token to its text_1, and so has no likelihood.", param="text_2")
    return first


def likelihood(entries: Sequence[TokenLogprob | None], first: int, reduction: Reduction) -> float:
    """Return the log likelihood of a prompt's tokens from `first` on."""
    values = [finite(entry.logprob) for entry in entries[first:] if entry is not None]
    return math.fsum(values) / (len(values) if reduction == "mean" else 1)
