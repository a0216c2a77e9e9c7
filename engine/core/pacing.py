"""How much of a step prompts may take beside those who decode: seconds, by what steps were found to take.

A prompt that a step can hold is not held back: those who run feel it once, and a crowd of such prompts is the load itself, for
which throughput would pay. A long one is paced, for everybody who runs feels each of its steps and only itself gains by haste:

    beside others    SHARE * n * n of what the step takes without them, where n long prompts are in line
    alone            ALONE * n times what a step costs however little is in it: whoever comes waits for the one that runs

One is hardly felt; where many wait, prompts are the load, and it is they who should not wait for long. Until steps with prompts have been seen, nothing is held back. Owned by the scheduler, engine thread; knows no clock.
"""

from __future__ import annotations

from math import inf

from engine.core.step_time import Load, StepTime

SHARE = 0.4  # a step with one long prompt takes 1.4 times as long: half as much again is felt, and steps vary
ALONE = 8  # an eighth of a lone prompt's time is the price
_DECODES_SKIPPED = 8  # of steps without prompts one in so many is learned from: they are many and alike


class Pacing:
    """Learns from steps, and says how many seconds of prompts the next one may hold."""

    __slots__ = ("_num_skipped", "times")

    def __init__(self) -> None:
        self.times = StepTime()
        self._num_skipped = 0

    def is_due(self, has_prompts: bool) -> bool:
        """Whether a step that was committed is to be learned from."""
        self._num_skipped += 1
        if not has_prompts and self._num_skipped < _DECODES_SKIPPED:
            return False
        self._num_skipped = 0
        return True

    def long_s(self, others: Load, num_in_line: int) -> float:
        """Seconds that long prompts may add to a step with `others`, while so many long ones are in line."""
        times = self.times
        if not times.is_known:
            return inf
        if not others.num_decodes and not others.num_prompt_tokens:
            return ALONE * num_in_line * times.fixed_s
        share_s = SHARE * num_in_line**2 * times.seconds(others)
        if others.num_prompt_tokens:
            return share_s
        return max(share_s - times.chunked_s, times.chunked_s)
