"""What an adapter looks like to the engine: an opaque handle that says whose K/V may be shared.

The runner's side makes adapters (engine/runtime/lora/) and engine/adapters.py keeps them by name; a request carries one
inside its SamplingParams. What is in it lives as long as somebody holds the handle: an adapter that was unloaded is gone
when the last request that uses it has ended.
"""

from __future__ import annotations

from typing import Protocol


class Adapter(Protocol):
    """An immutable handle that any thread may hold."""

    @property
    def name(self) -> str:
        """What requests call it."""
        ...

    @property
    def digest(self) -> bytes:
        """Of all that is in it, 32 bytes: what was computed with one adapter is nothing to any other."""
        ...
