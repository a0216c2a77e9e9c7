"""Plans how pairs of texts get scores: which prompts are read, and what is made of their results. Any thread.

Of a model that generates, a score is the log likelihood of the second text as a continuation of the first. Both are encoded
as one text. Scored are its tokens from the first that differs from the tokens of the first text alone: a token that the end
of the one and the beginning of the other share is scored, too. A classifier of one label reads both texts together. Of an
embedder, a score is the cosine of their vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from engine.core.errors import InvalidRequestError, UnsupportedError, read_each
from engine.core.types import Params, Pooling, PoolingParams, PromptInfo, SamplingParams, TokenLogprob
from engine.text.chat.limits import ModelLimits
from engine.text.prompt_results import activated, unit_vector
from engine.text.requests.vector_reader import Truncation, VectorReader
from engine.text.tokenizer import finite

Item = TypeVar("Item")
Reduction = Literal["mean", "sum"]  # of the tokens' log probabilities


class Compared(NamedTuple):
    """Texts: one of `firsts` with all `seconds`, or each with each; `names` are the fields that they are in."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    names: tuple[str, str] = ("text_1", "text_2")
    types: tuple[str | None, str | None] = (None, None)  # whose prompts an embedder has

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the texts in pairs."""
        return [*zip(self.of_each(self.firsts), self.seconds, strict=True)]

    def of_each(self, firsts: Iterable[Item]) -> list[Item]:
        """Return what is made of `firsts`, for each pair."""
        return [*firsts] * (len(self.seconds) if len(self.firsts) == 1 else 1)


class Scoring(NamedTuple):
    """Which prompts to read, and how scores are made of them."""

    prompts: Sequence[Sequence[int]]
    params: Params
    shape: Callable[[int, PromptInfo], Any]  # what to keep of a prompt
    parts: Sequence[tuple[int, ...]]  # the prompts of each score
    score: Callable[..., float] = float  # of what was kept of them

    def scores(self, kept: Sequence[Any]) -> list[float]:
        """Return the scores, in order."""
        return [self.score(*[kept[part] for part in parts]) for parts in self.parts]


def plan_scores(
    reader: VectorReader,
    texts: Compared,
    truncation: Truncation,
    pooling: Pooling,
    *,
    reduction: Reduction = "mean",
    use_activation: bool = True,
    add_special_tokens: bool = True,
) -> Scoring:
    """Return how the model compares texts. Raises ClientError."""
    num, special = len(texts.seconds), add_special_tokens
    if reader.limits.generates:
        prompts, firsts = _continued(reader.limits, texts, truncation, special)
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        return Scoring(
            prompts, params, lambda i, info: likelihood(info.logprobs or (), firsts[i], reduction), [*zip(range(num))]
        )
    if reduction != "mean":
        raise InvalidRequestError(
            f"reduction is {reduction!r}, and this model has no LM head: a score is no sum of log probabilities; leave it out.",
            param="reduction",
        )
    if reader.compares_vectors:
        (first, second), (one, other) = map(reader.prompt, texts.types), texts.names
        prompts = read_each(
            lambda text: reader.read(text, one, truncation, prompt=first, add_special_tokens=special), texts.firsts
        ) + read_each(
            lambda text: reader.read(text, other, truncation, prompt=second, add_special_tokens=special), texts.seconds
        )
        parts = [*zip(texts.of_each(range(len(texts.firsts))), range(len(texts.firsts), len(prompts)), strict=True)]
        return Scoring(
            prompts,
            PoolingParams(pooling=pooling),
            lambda _, info: unit_vector(info.pooled or ()),
            parts,
            cosine,
        )
    reader.require_one_label()
    prompts = read_each(
        lambda pair: reader.pair(*pair, texts.names, truncation, add_special_tokens=special), texts.pairs
    )
    activation = reader.settings.pair_activation if use_activation else ""
    return Scoring(
        prompts,
        PoolingParams(pooling=pooling),
        lambda _, info: activated(info.pooled or (0.0,), activation)[0],
        [*zip(range(num))],
    )


def _continued(
    limits: ModelLimits, texts: Compared, truncation: Truncation, special: bool
) -> tuple[list[list[int]], list[int]]:
    """Return pairs of texts as one prompt each, and the first tokens that are of the second text."""
    if truncation.most is not None:
        raise UnsupportedError(
            "truncate_prompt_tokens", "the likelihood of a text that is cut is another's; shorten it"
        )
    if "" in texts.seconds:
        raise InvalidRequestError("text_2 has an empty text, which has no likelihood; leave it out.", param="text_2")

    def read(text: str, name: str) -> list[int]:
        limits.check_length(len(text), name)
        ids = limits.tokenizer.encode(text, add_special_tokens=special)
        limits.check_readable(len(ids), name)
        return ids

    contexts = read_each(lambda text: read(text, texts.names[0]), texts.firsts)
    prompts = read_each(lambda pair: read("".join(pair), texts.names[1]), texts.pairs)
    return prompts, [*map(first_scored, texts.of_each(contexts), prompts)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two unit vectors."""
    return math.fsum(x * y for x, y in zip(first, second, strict=True))


def first_scored(context: Sequence[int], whole: Sequence[int]) -> int:
    """Return the first token of `whole` that differs from `context`'s tokens. Raises InvalidRequestError without one."""
    pairs = zip(context, whole, strict=False)
    first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(context), len(whole)))
    if not first:
        raise InvalidRequestError("text_1 has no token before text_2's first; send a longer text_1.", param="text_1")
    if first == len(whole):
        raise InvalidRequestError("text_2 adds no token to its text_1, and so has no likelihood.", param="text_2")
    return first


def likelihood(entries: Sequence[TokenLogprob | None], first: int, reduction: Reduction) -> float:
    """Return the log likelihood of a prompt's tokens from `first` on."""
    values = [finite(entry.logprob) for entry in entries[first:] if entry is not None]
    return math.fsum(values) / (len(values) if reduction == "mean" else 1)
