"""`context_management` of /v1/messages: accepted where it has no effect here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from engine.core.errors import UnsupportedError
from engine.text.fields.body import Integer, RequestBody
from server.anthropic.blocks import Turn

# type -> (the blocks that it removes, how many it keeps by default, the tokens from which it applies)
_CLEARS = {"clear_thinking_20251015": ("thinking", 1, 0), "clear_tool_uses_20250919": ("tool_use", 3, 100_000)}


class Amount(RequestBody):
    """How much to keep, or from where on an edit applies."""

    type: Literal["thinking_turns", "tool_uses", "input_tokens"] = Field(description="Which kind of object this is.")
    value: Integer = Field(ge=0, description="How many.")


class ContextEdit(RequestBody):
    """One edit."""

    type: str = Field(description="Which kind of object this is.")
    keep: Literal["all"] | Amount | None = Field(None, description="What an edit keeps.")
    trigger: Amount | None = Field(None, description="When an edit begins.")

    def is_idle(self, turns: Sequence[Turn], max_model_len: int) -> bool:
        """Return whether the edit certainly removes nothing of these turns."""
        kind, num_kept, from_tokens = _CLEARS.get(self.type, ("", 0, 0))
        trigger = self.trigger
        if trigger is not None and trigger.type == "input_tokens":
            from_tokens = trigger.value
        if from_tokens >= max_model_len:
            return True  # a prompt of that length is refused anyway
        if not kind or self.keep == "all":
            return bool(kind)
        if self.keep is not None:
            num_kept = self.keep.value
        if trigger is not None and trigger.type == "tool_uses":
            num_kept = max(num_kept, trigger.value)
        found = [sum(block.type == kind for block in turn.content) for turn in turns]
        return sum(map(bool, found) if kind == "thinking" else found) <= num_kept


class ContextManagement(RequestBody):
    """The edits, in order."""

    edits: list[ContextEdit] = Field(default_factory=list, description="The edits, each of one type.")

    def check_idle(self, turns: Sequence[Turn], max_model_len: int) -> None:
        """Raise ApiError for an edit that might remove a part of these turns."""
        for number, edit in enumerate(self.edits):
            if not edit.is_idle(turns, max_model_len):
                raise UnsupportedError(
                    f"context_management.edits.{number}",
                    f"{edit.type} may take away parts of this conversation, which is not done here; leave it out.",
                )
