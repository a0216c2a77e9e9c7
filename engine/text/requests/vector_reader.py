"""Makes the prompts of texts that become vectors or scores, and refuses what a model does not do. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.shown import shorten
from engine.core.types import Pooling
from engine.text.chat.limits import ModelLimits

# Of Qwen3-Reranker's card.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
_SAME = {"search_query": "query", "search_document": "document"}  # Cohere's names


class Truncation(NamedTuple):
    """To how many tokens a text is cut, its special ones included; None: not at all."""

    most: int | None = None
    keeps_end: bool = False

    def cut(self, ids: Sequence[int], num_before: int = 0, num_behind: int = 0) -> list[int]:
        """Return the ids without those that are too many, but with those around the text."""
        if self.most is None or len(ids) <= self.most:
            return list(ids)
        if self.most <= num_before + num_behind:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {self.most}, and {num_before + num_behind} tokens stand around a text, which would "
                "be gone; raise it, or shorten a query.",
                param="truncate_prompt_tokens",
            )
        num = self.most - num_before - num_behind
        inner = ids[num_before : len(ids) - num_behind]
        inner = inner[-num:] if self.keeps_end else inner[:num]
        return [*ids[:num_before], *inner, *ids[len(ids) - num_behind :]]


class VectorReader:
    """The reader of one model."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits, self._tokenizer, self.settings = limits, limits.tokenizer, limits.vectors

    def pooling(self, asked: str) -> Pooling:
        """Return how vectors are made, as asked or as the model's files say. Raises ConfigError."""
        if asked == "auto":
            return self.settings.pooling
        if self.settings.labels or self.settings.dense:
            raise ConfigError(
                f"The pooling is {asked!r}, and what this model has behind it fits its own alone; leave it out."
            )
        return Pooling(asked)

    def normalizes(self, asked: bool | None, dimensions: int | None) -> bool:
        """Return whether a vector is scaled to length one: as asked, else as the model's files say, or because it is cut."""
        is_cut = dimensions is not None and not self.settings.labels
        return (self.settings.normalizes or is_cut) if asked is None else asked

    def truncation(self, most: int | None, side: str | None) -> Truncation:
        """Return what two fields of a request ask for; -1 is as many as the model takes. Raises InvalidRequestError."""
        longest = self.limits.most_readable
        if most is not None and not (most == -1 or 1 <= most <= longest):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {most}; give 1 to {longest}, or -1 for as many as this model takes.",
                param="truncate_prompt_tokens",
            )
        return Truncation(longest if most == -1 else most, side == "left")

    @property
    def compares_vectors(self) -> bool:
        """Return whether two texts are compared by their vectors."""
        return not (self.settings.labels or self.limits.generates)

    def require_vectors(self) -> None:
        """Raise InvalidRequestError for a model that makes scores."""
        if self.settings.labels:
            message = f"This model makes no vectors: it {self.settings.served}, or choose an embedder."
            raise InvalidRequestError(message, param="model")

    def require_labels(self) -> None:
        """Raise InvalidRequestError for a model that is no classifier."""
        if not self.settings.labels:
            does = "generates text; send it to /v1/chat/completions" if self.limits.generates else self.settings.served
            message = f"This model scores no labels: it {does}, or choose a model for sequence classification."
            raise InvalidRequestError(message, param="model")

    def require_relevance(self) -> None:
        """Raise InvalidRequestError for a model that says nothing of how well two texts match."""
        if self.settings.labels:
            self.require_one_label()
        elif self.limits.generates:
            raise InvalidRequestError(
                "This model generates text, and is no reranker; choose one for sequence classification or an embedder, or send "
                "texts to /v1/score, which tells how likely one is as the continuation of the other.",
                param="model",
            )

    def require_one_label(self) -> None:
        """Raise InvalidRequestError for a classifier of several labels."""
        if len(self.settings.labels) > 1:
            message = f"This model {self.settings.served}; only one of a single label scores pairs."
            raise InvalidRequestError(message, param="model")

    def prompt(self, input_type: str | None) -> str:
        """Return what comes before a text of a type. Raises InvalidRequestError."""
        found = self.settings.prompt(_SAME.get(input_type or "", input_type))
        if found is None:
            known = ", ".join(dict.fromkeys(["query", "document", *dict(self.settings.prompts)]))
            message = f"input_type is {shorten(input_type or '')!r}; this model has {known}."
            raise InvalidRequestError(message, param="input_type")
        return found

    def read(
        self,
        given: str | Sequence[int],
        param: str,
        truncation: Truncation,
        *,
        prompt: str = "",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the ids of a text behind its prompt, or given ids, of which some are kept. Raises ClientError."""
        if isinstance(given, str):
            encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
            num_behind = self._tokenizer.num_around[1] * add_special_tokens
            if self.settings.lowers:
                prompt, given = prompt.lower(), given.lower()
            ids = self._cut(lambda shown: encode(prompt + shown), given, param, truncation, num_behind)
        else:
            self.limits.check_ids(given, param)
            ids = truncation.cut(given)
        if not ids:
            raise InvalidRequestError(f"The {param} has no tokens; send at least one.", param=param)
        self.limits.check_readable(len(ids), param)
        return ids

    def pair(
        self,
        first: str,
        second: str,
        names: tuple[str, str],
        truncation: Truncation,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the ids of two texts that a classifier reads together; the second is cut, and some of it is kept.

        Raises ContextLengthError, which names the field of the text that is too long, or InvalidRequestError.
        """
        self.limits.check_length(len(first), names[0])
        encode, num_behind = self._pair_encoder(first, add_special_tokens=add_special_tokens)
        ids = self._cut(encode, second, names[1], truncation, num_behind)
        if len(ids) > self.limits.most_readable:
            self.limits.check_readable(len(encode("")), names[0])
            self.limits.check_readable(len(ids), names[1])
        return ids

    def _pair_encoder(self, first: str, *, add_special_tokens: bool) -> tuple[Callable[[str], list[int]], int]:
        """Return what makes the ids of the first text and a second one, and how many stand behind the second."""
        if self.settings.is_qwen3_reranker:
            encode = partial(self._tokenizer.encode, add_special_tokens=False)
            before, behind = encode(_BEFORE), encode(_BEHIND)
            body = f"<Instruct>: {_INSTRUCT}\n<Query>: {first}\n<Document>: "
            return lambda shown: [*before, *encode(body + shown), *behind], len(behind)
        encode = partial(self._tokenizer.encode, add_special_tokens=add_special_tokens)
        return lambda shown: encode((first, shown)), self._tokenizer.num_around[1] * add_special_tokens

    def _cut(
        self, encode: Callable[[str], list[int]], text: str, param: str, truncation: Truncation, num_behind: int
    ) -> list[int]:
        """Return the ids that `encode` makes of a text and what stands around it; of these, the text is cut."""
        if truncation.most is None:
            self.limits.check_length(len(text), param)
            return encode(text)
        # What cannot be among the tokens that are kept is not encoded.
        most = self.limits.max_model_len * self._tokenizer.max_token_chars
        ids = encode(text[-most:] if truncation.keeps_end else text[:most])
        num_before = len(encode("")) - num_behind if len(ids) > truncation.most else 0
        return truncation.cut(ids, num_before, num_behind)
