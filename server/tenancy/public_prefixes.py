"""The operator's pinned prefixes, which requests of every tenant may find in the prefix cache. Event loop.

Tenants' blocks have names of their own, so that none can tell from a time or from `cached_tokens` what another has sent.
What stands in --pinned-prefixes is no tenant's secret: it is kept once, for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.core.types import Request

_Key = tuple[str, bytes, tuple[int, ...]]  # salt, adapter, tokens


class PublicPrefixes:
    """Filled at the start, then asked for the longest that a prompt begins with."""

    def __init__(self) -> None:
        self._known: set[_Key] = set()
        self._lengths: list[int] = []  # the longest first

    def add(self, requests: Iterable[Request], block_size: int) -> None:
        """What these compute is for all, as far as it is whole blocks."""
        for request in requests:
            if length := len(request.prompt) // block_size * block_size:
                self._known.add(_key(request, length))
        self._lengths = sorted({len(tokens) for _, _, tokens in self._known}, reverse=True)

    def mark(self, request: Request) -> Request:
        """Return the request with the number of its first tokens that are for all."""
        for length in self._lengths:
            if _key(request, length) in self._known:
                return replace(request, num_public=length)
        return request


def _key(request: Request, length: int) -> _Key:
    adapter = request.params.adapter
    return request.cache_salt, b"" if adapter is None else adapter.digest, request.prompt[:length]
