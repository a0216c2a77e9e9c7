"""What speculation costs on this machine, and how many tokens it pays to draft for each sequence. Integers and floats.

A step that is bound by reading weights computes a few more rows for next to nothing; one that is bound by arithmetic pays
for each. So drafts are weighed against the time they take: one more is added as long as the tokens that the step is
expected to bring in a second rise. Pure functions; whoever calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

Points = tuple[tuple[int, float], ...]  # (how many, seconds), ascending


class DraftCosts(NamedTuple):
    """Seconds, as measured at start; no points are no cost."""

    plain: Points = ()  # a step without drafts, by its rows
    checking: Points = ()  # a step with drafts, by its rows
    drafting: Points = ()  # one more draft each, by the number of sequences


FREE = DraftCosts()


def seconds(points: Points, count: int) -> float:
    """Straight lines between the points, and the last of them carried on; before the first it is as there."""
    if not points or len(points) == 1 or count <= points[0][0]:
        return points[0][1] if points else 0.0
    (x0, y0), (x1, y1) = points[:2]
    for x2, y2 in points[2:]:
        if count <= x1:
            break
        (x0, y0), (x1, y1) = (x1, y1), (x2, y2)
    return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


def lower_hull(points: Iterable[tuple[int, float]]) -> Points:
    """The points without those that lie above a line between two others, and none above a later one.

    So what an interruption made slow counts less; and each further row costs at least as much as the one before, which
    lets the best drafts be found one by one.
    """
    hull: list[tuple[int, float]] = []
    least = inf
    ascending = []
    for x, y in sorted(points, reverse=True):
        least = min(least, y)
        ascending.append((x, least))
    for x, y in reversed(ascending):
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return tuple(hull)


def choose_lengths(
    chances: Sequence[float], rooms: Sequence[int], num_rows: int, costs: DraftCosts, spare_s: float = inf
) -> list[int]:
    """How many tokens to draft for each sequence of a step of `num_rows` rows, at most its room.

    All of them together add `spare_s` to the step at most.
    `chances` are how likely a draft is right once those before it were. The likeliest is taken first; all of them are
    taken back if the step without them is expected to bring more tokens a second.
    """
    lengths = [0] * len(chances)
    candidates = [(-chance, index) for index, chance in enumerate(chances) if rooms[index] > 0]
    if not candidates:
        return lengths
    heapify(candidates)
    each = seconds(costs.drafting, len(candidates)) / len(candidates)
    tokens, rows = float(len(chances)), num_rows
    spent = seconds(costs.checking, rows)
    plain = seconds(costs.plain, num_rows)
    while candidates:
        gain, index = -candidates[0][0], candidates[0][1]
        after = seconds(costs.checking, rows + 1)
        cost = after - seconds(costs.checking, rows) + each
        if gain * spent < tokens * cost or spent + cost > plain + spare_s:
            break
        tokens, spent, rows = tokens + gain, spent + cost, rows + 1
        lengths[index] += 1
        if lengths[index] < rooms[index]:
            heapreplace(candidates, (-gain * chances[index], index))
        else:
            heappop(candidates)
    return lengths if tokens * plain >= len(chances) * _spent(lengths, rows, costs) else [0] * len(chances)


def _spent(lengths: Sequence[int], rows: int, costs: DraftCosts) -> float:
    """The seconds of a step with these drafts."""
    depths = [sum(length > depth for length in lengths) for depth in range(max(lengths))]
    return seconds(costs.checking, rows) + sum(seconds(costs.drafting, num) for num in depths)
