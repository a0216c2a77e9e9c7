"""Searches over measured values, which are passed in as functions and called as seldom as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest(is_good: Callable[[int], bool], low: int, high: int, *, grain: int = 1) -> int:
    """The largest multiple of `grain` from `low` to `high` that is good, where all below a good one are; 0 if none is.

    Measured values are noisy, so the answer is exact only as far as they are; each value is asked for once.
    """
    first, last = -(-low // grain), high // grain
    if first > last or not is_good(first * grain):
        return 0
    while first < last:
        middle = (first + last + 1) // 2
        if is_good(middle * grain):
            first = middle
        else:
            last = middle - 1
    return first * grain


def knee(rate: Callable[[int], float], sizes: Sequence[int], share: float) -> int:
    """The smallest of some ascending sizes whose rate comes to at least `share` of the best of all."""
    rates = [rate(size) for size in sizes]
    best = max(rates)
    return next(size for size, found in zip(sizes, rates, strict=True) if found >= share * best)


def doublings(low: int, high: int) -> list[int]:
    """low, twice that, and so on, ending with `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]
