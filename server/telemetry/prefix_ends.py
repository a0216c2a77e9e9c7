"""Why the prefix cache gave a prompt no more than it did: the cause, which prefix_words.py puts in words.

Of a prompt that has been computed, where its request generates from no other. What it has in common with earlier prompts
of its owner is known from its turn (engine/text/chat/history.py), what was found of it from the engine. Any thread.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from engine.core.types import Params, PromptInfo
from engine.text.chat.history import ChatTurn, Fork, RecentPrompt


class Cause(str, Enum):
    """Why the reused prefix ends where it does."""

    EXTENDED = "extended"  # it is all of an earlier prompt, and its answer if that was sent
    NEW = "new"  # no earlier prompt goes on like this
    BROKEN = "broken"  # an earlier prompt has something else at a place, and goes on alike
    ANSWER = "answer"  # the answer to an earlier prompt was sent back changed, or without its thoughts
    EVICTED = "evicted"
    NO_STATE = "no_state"  # there was no snapshot or window to resume from
    UNFINISHED = "unfinished"  # an earlier prompt was not yet computed, or never
    OTHER_SALT = "other_salt"
    OTHER_ADAPTER = "other_adapter"
    UNREAD = "unread"  # every position had to be computed
    SHORT = "short"  # the prompt has no whole block before its last token
    FORGOTTEN = "forgotten"  # more was reused than the prompts have that are remembered


class PrefixEnd(NamedTuple):
    """Where the reused prefix of a prompt ends, and why."""

    cause: Cause
    position: int  # tokens before the place that the cause is about
    num_cached: int
    num_matched: int
    prompt: RecentPrompt
    fork: Fork | None  # of the earlier prompt that the cause is about


def prefix_end(turn: ChatTurn, info: PromptInfo, params: Params) -> PrefixEnd:
    """Return where the reused prefix of a turn's prompt ends, and why."""
    (own, other), cached, size = turn.forks, info.num_cached_tokens, turn.history.prompts.block_size
    reusable = 0 if own is None else own.num_reusable

    def end(cause: Cause, position: int, fork: Fork | None = None) -> PrefixEnd:
        return PrefixEnd(cause, position, cached, info.num_matched_tokens, turn.prompt, fork)

    if params.prompt_logprobs is not None:
        return end(Cause.UNREAD, 0)
    if turn.prompt.num_prompt <= size:
        return end(Cause.SHORT, 0)
    if own is not None and reusable > cached:
        if info.num_matched_tokens > cached:
            return end(Cause.NO_STATE, cached, own)
        return end(Cause.EVICTED if own.was_answered else Cause.UNFINISHED, cached, own)
    if other is not None and other.num_reusable > cached:
        is_adapter = other.earlier.owner.adapter != turn.prompt.owner.adapter
        return end(Cause.OTHER_ADAPTER if is_adapter else Cause.OTHER_SALT, other.num_common, other)
    if cached > reusable:
        return end(Cause.FORGOTTEN, cached)
    if own is None:
        return end(Cause.NEW, 0)
    if own.num_common >= own.num_earlier:
        cause = Cause.EXTENDED
    elif own.num_common >= own.earlier.turn_end:
        cause = Cause.ANSWER
    else:
        cause = Cause.BROKEN if own.is_edit else Cause.NEW
    return end(cause, own.num_common, own)
