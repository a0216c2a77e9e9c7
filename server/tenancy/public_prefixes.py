"""The operator's pinned prefixes, which every tenant may find in the cache.

Tenants' blocks have separate names, so that no tenant can infer from times or from `cached_tokens` which prompts another
has sent. The prompts of --pinned-prefixes are no secret: they are cached once, for all tenants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.core.types import Request

_Key = tuple[str, bytes, tuple[int, ...]]  # salt, adapter, tokens


class PublicPrefixes:
    """Finds the longest public prefix of a prompt."""

    def __init__(self, requests: Iterable[Request], block_size: int) -> None:
        """The whole blocks of these requests' prompts are public."""
        whole = [(request, len(request.prompt) // block_size * block_size) for request in requests]
        self._known = {_key(request, length) for request, length in whole if length}
        self._lengths = sorted({len(tokens) for _, _, tokens in self._known}, reverse=True)  # the longest first

    def mark(self, request: Request) -> Request:
        """Return the request with the number of its first tokens that are public."""
        for length in self._lengths:
            if _key(request, length) in self._known:
                return replace(request, num_public=length)
        return request


def _key(request: Request, length: int) -> _Key:
    adapter = request.params.adapter
    return request.cache_salt, b"" if adapter is None else adapter.digest, request.prompt[:length]
