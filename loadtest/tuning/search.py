"""Searches over values that are expensive to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def largest(is_good: Callable[[int], bool], low: int, high: int, *, grain: int = 1) -> int:
    """Return the largest good multiple of `grain` from `low` to `high`, or 0.

    All values below a good one must be good. Each value is measured once.
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
    """Return the smallest size whose rate is at least `share` of the best."""
    rates = [rate(size) for size in sizes]
    best = max(rates)
    return next(size for size, found in zip(sizes, rates, strict=True) if found >= share * best)


def doublings(low: int, high: int) -> list[int]:
    """Return low, twice that, and so on, ending with `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return [*sizes, high]
