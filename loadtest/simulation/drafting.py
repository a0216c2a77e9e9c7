"""Speculation in a simulation: each drafted token is right with one probability, as long as those before it were.

Real drafts come in runs: a text that copies its prompt accepts nearly all, another nearly none. One rate for all is the
mean of that, and what it says of many sequences is closer than what it says of one.
"""

from __future__ import annotations

import random

from engine.core.step import Drafted, StepPlan


class Drafting:
    """One replica's drafts, from one seed."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance
        self._rng = random.Random(0)

    def check(self, plan: StepPlan) -> dict[int, Drafted]:
        """Return the outcome of the drafts of a step, by slice; each token is its position, as a replica draws them."""
        draw, acceptance, found = self._rng.random, self._acceptance, {}
        for index, num_drafts in plan.num_drafts.items():
            num_right = next((place for place in range(num_drafts) if draw() >= acceptance), num_drafts)
            start = plan.slices[index].start
            found[index] = Drafted(range(start, start + num_right + 1), num_drafts)
        return found
