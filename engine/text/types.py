"""The pieces of an answer, and a model's sampling values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})  # variables of chat templates that a request sets


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The sampling values of a model's generation_config, by default OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None  # of an answer in a chat whose request names no bound
    max_new_tokens: int | None = None  # bounds every answer


class Reasoning(NamedTuple):
    """Thoughts, without their tags."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class CallBegin(NamedTuple):
    """A call; its arguments follow."""

    name: str
    id: str = ""  # that the model gave it, if its format has ids


class CallArguments(NamedTuple):
    """More of the arguments, in JSON, of the last call."""

    text: str


Piece: TypeAlias = Reasoning | Content | CallBegin | CallArguments
