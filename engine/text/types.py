"""The Tokenizer protocol, and the pieces of an answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from engine.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The sampling values of a model's generation_config, by default OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Tokenizer(Protocol):
    """A model's tokenizer. Any thread may call it."""

    @property
    def vocab_size(self) -> int:
        """The number of ids that can be decoded, added tokens included."""
        ...

    @property
    def max_token_chars(self) -> int:
        """The most characters that one token represents."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a sequence, of the tokenizer and of the generation_config."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that skip_special_tokens leaves out of a text."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, if the model has one."""
        ...

    @property
    def description(self) -> Mapping[str, str | None]:
        """The special tokens by role, and the chat template."""
        ...

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling values of a request that names none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, never truncated, without holding the GIL."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some ids, with U+FFFD for broken UTF-8, in microseconds."""
        ...

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of an id, perhaps part of a character, or empty for no token."""
        ...


class Reasoning(NamedTuple):
    """Thoughts, without their tags."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallBegin(NamedTuple):
    """A call; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the arguments, in JSON, of the last call."""

    text: str


Piece: TypeAlias = Reasoning | Content | CallBegin | CallArguments
