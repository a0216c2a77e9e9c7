"""A LoRA adapter as the core sees it: an opaque handle whose digest separates K/V.

The runner's side makes adapters (engine/runtime/lora/) and engine/adapters.py keeps them by name; a request carries one
inside its SamplingParams. Its weights live as long as the handle: an adapter that was unloaded is freed when the last
request that uses it has ended.
"""

from __future__ import annotations

from typing import Protocol


class Adapter(Protocol):
    """An immutable handle that any thread may hold."""

    @property
    def name(self) -> str:
        """Return the name that requests use."""
        ...

    @property
    def digest(self) -> bytes:
        """Return 32 bytes that depend on all of its content: K/V of one adapter is never shared with another."""
        ...
