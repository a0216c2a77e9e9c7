"""What a decode daemon asks a prefill daemon, and what it is told. Between daemons of one version; no public API."""

from __future__ import annotations

from pydantic import BaseModel, Field

from server.protocol.base import RequestBody
from server.protocol.sampling import MAX_CACHE_SALT


class PrefillBody(RequestBody):
    """A prompt to compute."""

    prompt: list[int] = Field(min_length=1)
    cache_salt: str = Field("", max_length=MAX_CACHE_SALT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    adapter: str | None = Field(None, max_length=64)  # the digest of its content, as hexadecimal digits


class Prefilled(BaseModel):
    """Where its K/V is."""

    # None where the prompt has not one full block, or it was evicted meanwhile, or its adapter is not loaded here.
    parcel: str | None
    num_blocks: int
    adapter: str | None = None  # the one that computed it; a daemon that knows nothing of adapters does not say
