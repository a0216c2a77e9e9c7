"""What a model's text is made of once it has been read: thoughts, words for the user, and calls of tools.

Immutable, and all that passes between the readers (engine/text/reasoning.py, engine/text/tools/parser.py) and engine/text/choice.py.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple, TypeAlias


class Reasoning(NamedTuple):
    """Thoughts, without the tags around them."""

    text: str


class Content(NamedTuple):
    """Words for the user."""

    text: str


class CallBegin(NamedTuple):
    """A call; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More of the JSON that the call begun last is given."""

    text: str


Piece: TypeAlias = Reasoning | Content | CallBegin | CallArguments


def new_call_id(prefix: str, length: int) -> str:
    """Return a new id for a call; `length` characters where a model's template insists on a length, else 0."""
    unique = uuid.uuid4().hex
    return unique[:length] if length else prefix + unique[:24]
