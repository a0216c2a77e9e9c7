"""How long an answer will be, from those that were: of everybody, of the tenant, of those that the tenant allowed about as
much, of those among them whose prompts begin alike.

Means at four levels, the finer trusted the more the more it has seen; before anything was seen, max_tokens. What clients
allow often tells what they expect: without it, sjf loses to max_tokens alone where nothing else tells. An answer is
never expected to be longer than its max_tokens. One that max_tokens cut off tells only that it would have been no shorter, so it
counts where it was longer than expected and is ignored where not. Old answers are forgotten: a level's mean is of about
its last WINDOW. Levels are tables of fixed size; what falls into one place of a table by chance shares a mean.

Owned by the scheduler, engine thread. Knows token ids as numbers, no clock.
"""

from __future__ import annotations

from array import array
from zlib import crc32

from engine.core.types import Request

PREFIX_TOKENS = 32  # long enough to tell one system prompt or template from another
NUM_TENANTS = 1024  # places of the tables
NUM_ALLOWANCES = 4096
NUM_PREFIXES = 8192
TRUST = 2.0  # answers after which a level counts as much as all coarser ones together
WINDOW = 64


class _Means:
    """Running means, by place."""

    __slots__ = ("_counts", "_means")

    def __init__(self, num_places: int) -> None:
        self._counts = array("d", bytes(8 * num_places))
        self._means = array("d", bytes(8 * num_places))

    def refine(self, digest: int, expected: float) -> float:
        """What is expected, with what this level knows."""
        place = digest % len(self._counts)
        count = self._counts[place]
        return (count * self._means[place] + TRUST * expected) / (count + TRUST)

    def learn(self, digest: int, num_tokens: int, *, is_cut: bool) -> None:
        """One more answer."""
        place = digest % len(self._counts)
        count, mean = self._counts[place], self._means[place]
        if is_cut and count and num_tokens < mean:
            return
        self._counts[place] = count = min(count + 1, WINDOW)
        self._means[place] = mean + (num_tokens - mean) / count


class LengthPredictor:
    """predict when a request comes, learn when one of its answers ends."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels = tuple(map(_Means, (1, NUM_TENANTS, NUM_ALLOWANCES, NUM_PREFIXES)))

    def predict(self, request: Request) -> float:
        """Tokens of one answer."""
        expected = float(request.params.max_tokens)
        for level, digest in zip(self._levels, _digests(request), strict=True):
            expected = level.refine(digest, expected)
        return min(expected, request.params.max_tokens)

    def learn(self, request: Request, num_tokens: int, *, is_cut: bool) -> None:
        """An answer has ended, of itself or because max_tokens `is_cut` it."""
        for level, digest in zip(self._levels, _digests(request), strict=True):
            level.learn(digest, num_tokens, is_cut=is_cut)


def _digests(request: Request) -> tuple[int, int, int, int]:
    """Of the four levels; the same in every process. max_tokens counts to the power of two."""
    tenant = crc32(request.tenant.encode("utf-8", "surrogatepass"))
    allowance = crc32(b"%d" % request.params.max_tokens.bit_length(), tenant)
    return 0, tenant, allowance, crc32(array("q", request.prompt[:PREFIX_TOKENS]).tobytes(), allowance)
