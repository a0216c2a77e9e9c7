"""Speculation in the scheduler: the number of draft tokens of each sequence in a step.

The runner drafts the tokens and computes them in the same step. Drafts use only the rest of each budget: of tokens, of
samples, of the seconds that a target ITL allows, and of blocks. No sequence is preempted for a draft.

A step that is bound by reading weights computes a few more rows for next to nothing; one that is bound by arithmetic pays
for each. So drafts are added as long as each raises the expected tokens per second of the step. Each sequence has a
moving average of how often its drafts are right. Engine thread.
"""

from __future__ import annotations

from collections import abc
from heapq import heapify, heappop, heapreplace
from math import inf

from engine.core.budget import Allowance
from engine.core.config import DraftCosts, Points, SchedulerConfig
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.sequence import DraftHistory, Sequence
from engine.core.stats import Stats
from engine.core.step import Drafted

HOPE = 0.8  # the chance of a draft before any was checked
_MEMORY = 0.8  # weight of a sequence's past at each draft that was checked: about five count
_FADING = 0.997  # weight of a sequence's chance at each step without drafts: it tries again after some hundred steps


class DraftPlanner:
    """Adds drafts to a plan that is otherwise complete, and learns from how many are accepted."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, stats: Stats) -> None:
        self._kv, self._stats = kv, stats
        self._max_drafts, self._costs = config.num_speculative_tokens, config.draft_costs
        self._max_rows, self._has_states = config.max_num_rows, config.state_blocks > 0
        self._num_checked = 0  # drafts of all sequences
        stats.spec_accepted_at = [0] * self._max_drafts

    def plan(self, step: InFlightStep, allowance: Allowance, num_reserved: int) -> None:
        """Add drafts to the decodes of a step, leaving `num_reserved` blocks for sequences that grow."""
        sequences = step.sequences[: step.num_decodes]
        budget = min(allowance.num_tokens, self._max_rows - step.num_samples)
        most = min(self._max_drafts, budget)
        histories = [self._history(seq) for seq in sequences]
        chances = [history.chance for history in histories]
        rooms = [
            min(most, seq.max_total - 1 - seq.num_planned) if history.is_allowed else 0
            for seq, history in zip(sequences, histories, strict=True)
        ]
        lengths = choose_lengths(chances, rooms, step.num_tokens, self._costs, allowance.drafts_s())
        for index, (seq, length) in enumerate(zip(sequences, lengths, strict=True)):
            num_drafts = self._make_room(seq, min(length, budget), step, num_reserved) if length else 0
            if num_drafts:
                step.num_drafts[index] = num_drafts
                budget -= num_drafts
            else:
                histories[index].chance = HOPE + (chances[index] - HOPE) * _FADING

    def _history(self, seq: Sequence) -> DraftHistory:
        """Return a sequence's history, which begins with the average of all sequences."""
        if seq.drafts is None:
            seq.drafts = DraftHistory((HOPE + self._stats.spec_accepted_tokens) / (1 + self._num_checked))
        return seq.drafts

    def _make_room(self, seq: Sequence, num_drafts: int, step: InFlightStep, num_reserved: int) -> int:
        """Allocate blocks for a sequence's drafts; returns how many drafts fit."""
        while seq.kv.writable_until < seq.num_planned + num_drafts:
            # A step begins at the end of each block, where its state may be kept.
            if self._has_states or not self._kv.has_blocks_for(num_reserved + 1):
                return seq.kv.writable_until - seq.num_planned
            self._kv.extend(seq, step)
            step.add_row(seq)
        return num_drafts

    def observe(self, seq: Sequence, drafted: Drafted) -> None:
        """Learn from checked drafts. If nothing was sampled at all, the sequence gets no more."""
        history = self._history(seq)
        if not drafted.token_ids:
            history.is_allowed = False
            return
        num_accepted, stats = len(drafted.token_ids) - 1, self._stats
        stats.spec_drafts += 1
        stats.spec_draft_tokens += drafted.num_drafts
        stats.spec_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.spec_accepted_at[position] += 1
        history.num_drafted += drafted.num_drafts
        history.num_accepted += num_accepted
        # The drafts after the first wrong one were not checked.
        num_checked = min(num_accepted + 1, drafted.num_drafts)
        share = num_accepted / num_checked
        history.chance = share + (history.chance - share) * _MEMORY**num_checked
        self._num_checked += num_checked


def seconds(points: Points, count: int) -> float:
    """Return the seconds of `count`, interpolated between the points, extrapolated after the last."""
    if not points or len(points) == 1 or count <= points[0][0]:
        return points[0][1] if points else 0.0
    (x0, y0), (x1, y1) = points[:2]
    for x2, y2 in points[2:]:
        if count <= x1:
            break
        (x0, y0), (x1, y1) = (x1, y1), (x2, y2)
    return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


def lower_hull(points: abc.Iterable[tuple[int, float]]) -> Points:
    """Return the lower convex hull of the points, made non-decreasing.

    So each further row costs at least as much as the one before, and the best drafts can be found one by one.
    """
    hull: list[tuple[int, float]] = []
    least = inf
    lowest: dict[int, float] = {}  # one for each x: two would make a vertical edge
    for x, y in sorted(points, reverse=True):
        lowest[x] = least = min(least, y)
    for x, y in reversed(lowest.items()):
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return tuple(hull)


def choose_lengths(
    chances: abc.Sequence[float], rooms: abc.Sequence[int], num_rows: int, costs: DraftCosts, spare_s: float = inf
) -> list[int]:
    """Return how many tokens to draft for each sequence of a step of `num_rows` rows, at most its room.

    `chances` say how likely a draft is right if those before it were; the likeliest is taken first. Together they add at
    most `spare_s` to the step. There are none if the step has more expected tokens per second without them.
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


def _spent(lengths: abc.Sequence[int], rows: int, costs: DraftCosts) -> float:
    """Return the seconds of a step with these drafts."""
    depths = [sum(length > depth for length in lengths) for depth in range(max(lengths))]
    return seconds(costs.checking, rows) + sum(seconds(costs.drafting, num) for num in depths)
