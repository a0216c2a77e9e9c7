"""How OpenAI's and Anthropic's clients ask that the beginning of a prompt stays cached, and for how long. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from engine.text.fields.base import RequestBody

# OpenAI's clients had both spellings, and a name of its own that retains nothing.
Retention = Literal["in_memory", "in-memory", "24h"]
_RETAINED_S: dict[str, float] = {"24h": 86_400.0}
_TTL_S = {"5m": 300.0, "30m": 1_800.0, "1h": 3_600.0}


class PromptCacheOptions(RequestBody):
    """`ttl` is how long the prompt is retained at least; `explicit` marks places of its own, which are not looked for."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] | None = None


class CacheControl(RequestBody):
    """Anthropic's mark: everything up to here is retained."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return _TTL_S[self.ttl]


class Place(NamedTuple):
    """Where in a conversation a mark stands, in order: right behind the last of so many blocks, in ..."""

    turn: int  # ... its so-many-th message; 0 is the system prompt, behind the tools
    num_blocks: int
    num_inner: int  # of the last block's own content, if it has any


def retained_s(retention: Retention | None, options: PromptCacheOptions | None) -> float:
    """For how long a whole prompt is to be retained, by both of OpenAI's fields; 0 where neither asks for it."""
    asked_s = 0.0 if retention is None else _RETAINED_S.get(retention, 0.0)
    if options is None or options.mode == "explicit" or options.ttl is None:
        return asked_s
    return max(asked_s, _TTL_S[options.ttl])


def last_marks(marks: Iterable[tuple[Place, CacheControl]]) -> dict[float, Place]:
    """By seconds the last place that counts: one that is retained for longer anyway does not."""
    last: dict[float, Place] = {}
    for place, mark in marks:
        last[mark.seconds] = max(place, last.get(mark.seconds, place))
    return {
        seconds: place for seconds, place in last.items() if all(place > at for s, at in last.items() if s > seconds)
    }
