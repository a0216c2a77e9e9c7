"""Speculation as the scheduler sees it: how many positions beyond its next each sequence may have drafted in a step.

The runner drafts the tokens and computes them in the same step, so that a plan has counts and no values here either.
Drafts take what all others leave: of the token budget, of the draws that memory is measured for, of the seconds that a target
ITL allows, and of the blocks, for which nobody is preempted. How often a sequence's drafts are right is
remembered; a new one begins with what is usual, and one that drafts nothing grows hopeful, so that it tries again. Owned by the scheduler, engine thread.
"""

from __future__ import annotations

from engine.core.budget import Allowance
from engine.core.config import SchedulerConfig
from engine.core.draft_costs import choose_lengths
from engine.core.in_flight import InFlightStep
from engine.core.kv.manager import KVCacheManager
from engine.core.sequence import Sequence
from engine.core.stats import Stats
from engine.core.step import Drafted

HOPE = 0.8  # the chance of a draft where nothing is known against it
_MEMORY = 0.8  # weight of a sequence's past at each draft that was checked ...
_FADING = 0.997  # ... and at each step without any
_LONG_MEMORY = 0.95  # weight of what was usual, at each draft of anybody


class DraftPlanner:
    """Adds drafts to a plan that is otherwise complete, and learns from what becomes of them."""

    __slots__ = ("_costs", "_kv", "_max_drafts", "_max_rows", "_stats", "_usual")

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, stats: Stats) -> None:
        self._kv, self._stats = kv, stats
        self._max_drafts, self._costs = config.num_speculative_tokens, config.draft_costs
        self._max_rows = config.max_num_rows
        self._usual = HOPE
        stats.spec_accepted_at = [0] * self._max_drafts

    def plan(self, step: InFlightStep, num_tokens: int, allowance: Allowance, num_reserved: int) -> None:
        """Room for drafts in the decodes of a step of `num_tokens`, within what the allowance has left.

        `num_reserved` blocks stay available for sequences that are about to grow.
        """
        sequences = step.sequences[: step.num_decodes]
        budget = min(allowance.num_tokens, self._max_rows - step.num_samples)
        most = min(self._max_drafts, budget)
        rooms = [min(most, seq.max_drafts, seq.max_total - 1 - seq.num_planned) for seq in sequences]
        chances = [seq.draft_chance if seq.draft_chance >= 0 else self._usual for seq in sequences]
        lengths = choose_lengths(chances, rooms, num_tokens, self._costs, allowance.drafts_s())
        for index, (seq, chance, length) in enumerate(zip(sequences, chances, lengths, strict=True)):
            num_drafts = self._make_room(seq, min(length, budget), step, num_reserved) if length else 0
            if num_drafts:
                step.num_drafts[index] = num_drafts
                budget -= num_drafts
            else:
                seq.draft_chance = HOPE + (chance - HOPE) * _FADING

    def _make_room(self, seq: Sequence, num_drafts: int, step: InFlightStep, num_reserved: int) -> int:
        """See to blocks for a sequence's drafts; returns for how many there are."""
        while seq.kv.writable_until < seq.num_planned + num_drafts:
            if self._kv.pool.num_available <= num_reserved:
                return seq.kv.writable_until - seq.num_planned
            self._kv.extend(seq, step.copies)
        return num_drafts

    def learn(self, seq: Sequence, drafted: Drafted) -> None:
        """Count what came of a sequence's drafts. Where nothing came at all, it goes on without."""
        if not drafted.token_ids:
            seq.max_drafts = 0
            return
        num_accepted, stats = len(drafted.token_ids) - 1, self._stats
        stats.spec_drafts += 1
        stats.spec_draft_tokens += drafted.num_drafts
        stats.spec_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.spec_accepted_at[position] += 1
        seq.num_drafted += drafted.num_drafts
        seq.num_accepted += num_accepted
        # Nothing is learnt of those behind the first that was wrong.
        num_checked = min(num_accepted + 1, drafted.num_drafts)
        share, chance = num_accepted / num_checked, seq.draft_chance if seq.draft_chance >= 0 else self._usual
        seq.draft_chance = share + (chance - share) * _MEMORY**num_checked
        self._usual = share + (self._usual - share) * _LONG_MEMORY**num_checked
