"""The limits of the served model and of the settings, checked per request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.config import SchedulerConfig
from engine.core.errors import ContextLengthError, InvalidRequestError
from engine.core.scheduling.admission import check_ids
from engine.files.vector_files import VectorSettings
from engine.text.chat.chat_format import ChatFormat
from engine.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """The served model's bounds, tokenizer and chat format, fixed at start-up."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int  # positions that the whole KV pool holds
    max_logprobs: int
    has_priorities: bool
    generates: bool = True  # the model has an LM head
    vectors: VectorSettings = field(default_factory=VectorSettings)  # how it makes vectors, or scores
    tokenizer: TextTokenizer
    chat_format: ChatFormat = field(default_factory=ChatFormat)

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        vocab_size: int,
        tokenizer: TextTokenizer,
        *,
        max_logprobs: int,
        generates: bool = True,
        vectors: VectorSettings | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> ModelLimits:
        """Return the limits of an engine. Raises ConfigError for an unfit parser."""
        return cls(
            vocab_size=vocab_size,
            max_model_len=config.max_model_len,
            pool_tokens=config.num_blocks * config.block_size,
            max_logprobs=max_logprobs,
            generates=generates,
            vectors=vectors or VectorSettings(),
            has_priorities=config.policy in ("priority", "fair"),
            tokenizer=tokenizer,
            chat_format=ChatFormat.of(tokenizer, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser),
        )

    @property
    def call_id_length(self) -> int:
        """The length of a call's id, where the model's template insists on one; else 0."""
        return self.chat_format.tool_format.id_length if self.chat_format.tool_format else 0

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequestError for an id that the model does not have."""
        check_ids(ids, self.vocab_size, param)

    def check_length(self, num_chars: int, param: str) -> None:
        """Raise ContextLengthError for a text that is too long whatever its tokens are.

        Encoding costs a second and 180 MB for every million characters, so a text that cannot fit is not encoded.
        """
        most = self.max_model_len * self.tokenizer.max_token_chars
        if num_chars > most:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, into which at most {most} "
                f"characters fit, but {param} has {num_chars}; shorten it.",
                param=param,
                num_prompt=-(-num_chars // self.tokenizer.max_token_chars),  # at least
                limit=self.max_model_len,
            )

    def check_readable(self, num_tokens: int, param: str) -> None:
        """Raise ContextLengthError for a prompt that cannot be read in one request, even without an answer."""
        most = self.most_readable
        if num_tokens > most:
            raise ContextLengthError(
                f"At most {most} tokens can be read at once here, but {param} has {num_tokens}; shorten it.",
                param=param,
                num_prompt=num_tokens,
                limit=most,
            )

    @property
    def most_readable(self) -> int:
        """Return the most tokens of a prompt without an answer."""
        return min(self.max_model_len, self.pool_tokens)

    def check_logprobs(self, wanted: int | None, param: str) -> None:
        """Raise InvalidRequestError for more alternatives than this server returns."""
        if wanted is not None and wanted > self.max_logprobs:
            raise InvalidRequestError(
                f"{param} is {wanted}; this server gives at most {self.max_logprobs}.", param=param
            )

    def rest_of_context(self, num_prompt: int, param: str) -> int:
        """Return the most tokens that can follow a prompt. Raises ContextLengthError."""
        if num_prompt >= self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, but {param} has {num_prompt}, "
                f"which leaves no room for an answer; shorten it.",
                param=param,
                num_prompt=num_prompt,
                limit=self.max_model_len,
            )
        return max(1, min(self.max_model_len - num_prompt, self.pool_tokens - num_prompt + 1))


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    return bisect_left(range(1, min(len(one), len(other)) + 1), True, key=lambda count: one[:count] != other[:count])
