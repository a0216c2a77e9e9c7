"""The policy sjf: shortest job first, by predicted lengths of answers.

There are means at four levels: all answers, the tenant's, those of them with about the same max_tokens, and those of them
whose prompts begin alike. A finer level counts the more, the more answers it has seen: all coarser ones together count as one answer.
No answer is expected to be longer than its max_tokens. An answer that max_tokens cut off counts only where it was longer
than expected. A level's mean is of about its last WINDOW answers. Levels are tables of fixed size; keys that fall into
the same place share a mean. Engine thread.
"""

from __future__ import annotations

from array import array
from zlib import crc32

from engine.core.queues.keyed import KeyedQueue, sjf
from engine.core.sequence import Sequence
from engine.core.types import Request

PREFIX_TOKENS = 32  # long enough to tell one system prompt or template from another
NUM_PLACES = 8192  # of a level's table: 128 KiB, and few keys share a place with thousands of tenants or templates
WINDOW = 64  # answers: enough for a steady mean, few enough to follow a change within minutes


class _Means:
    """Running means, by place."""

    __slots__ = ("_counts", "_means")

    def __init__(self) -> None:
        self._counts = array("d", bytes(8 * NUM_PLACES))
        self._means = array("d", bytes(8 * NUM_PLACES))

    def refine(self, digest: int, expected: float) -> float:
        """Return the expected length, given what coarser levels expect."""
        place = digest % NUM_PLACES
        count = self._counts[place]
        return (count * self._means[place] + expected) / (count + 1)

    def learn(self, digest: int, num_tokens: int, *, is_cut: bool) -> None:
        """Count one more answer."""
        place = digest % NUM_PLACES
        count, mean = self._counts[place], self._means[place]
        if is_cut and count and num_tokens < mean:
            return
        self._counts[place] = count = min(count + 1, WINDOW)
        self._means[place] = mean + (num_tokens - mean) / count


class LengthPredictor:
    """Predicts when a request arrives, learns when one of its answers ends."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        self._levels = tuple(_Means() for _ in range(4))

    def predict(self, request: Request) -> float:
        """Return the expected number of tokens of one answer."""
        expected = float(request.params.max_tokens)
        for level, digest in zip(self._levels, _digests(request), strict=True):
            expected = level.refine(digest, expected)
        return min(expected, request.params.max_tokens)

    def learn(self, request: Request, num_tokens: int, *, is_cut: bool) -> None:
        """Learn from an answer that has ended, by itself or because max_tokens `is_cut` it."""
        for level, digest in zip(self._levels, _digests(request), strict=True):
            level.learn(digest, num_tokens, is_cut=is_cut)


def _digests(request: Request) -> tuple[int, int, int, int]:
    """Return the keys of the four levels; max_tokens is rounded to a power of two."""
    tenant = crc32(request.tenant.encode("utf-8", "surrogatepass"))
    allowance = crc32(b"%d" % request.params.max_tokens.bit_length(), tenant)
    return 0, tenant, allowance, crc32(array("q", request.prompt[:PREFIX_TOKENS]).tobytes(), allowance)


class ShortestQueue(KeyedQueue):
    """A queue sorted by the expected work of requests."""

    def __init__(self) -> None:
        super().__init__(sjf)
        self._predictor = LengthPredictor()

    def expect(self, request: Request) -> float | None:
        return self._predictor.predict(request)

    def completed(self, seq: Sequence, num_generated: int, *, is_cut: bool) -> None:
        self._predictor.learn(seq.request, num_generated, is_cut=is_cut)
