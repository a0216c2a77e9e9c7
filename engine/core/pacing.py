"""How much of a step prompts may take beside those who decode: seconds, by what steps were found to take.

A prompt that a step can hold is not held back: those who run feel it once, and a crowd of such prompts is the load itself, for
which throughput would pay. A long one is paced, for everybody who runs feels each of its steps and only itself gains by haste:

    beside others    SHARE * n * n of what the step takes without them, where n long prompts are in line
    alone            ALONE * n times what a step costs however little is in it: whoever comes waits for the one that runs

One is hardly felt; where many wait, prompts are the load, and it is they who should not wait for long. With a target ITL it is that, and nothing else, which all prompts of a step share. With a target TTFT a long prompt takes what
it needs to be in time, while it still can be. Until steps with prompts have been seen, nothing is held back. Owned by the scheduler, engine thread; knows no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

from engine.core.flight import Flight
from engine.core.sequence import Sequence
from engine.core.step_time import Load, StepTime, decode_load
from engine.core.targets import Targets

SHARE = 0.35  # a step with one long prompt takes 1.35 times as long, plus what reading its context adds
ALONE = 8  # an eighth of a lone prompt's time is the price
AIM = 0.9  # of a target: steps vary
FLOOR = 0.1  # of what decoding takes: so much longer a step may take if it misses the target ITL without any prompt
_MAX_URGENCY = 0.9  # of all time, for long prompts that are about to miss the target TTFT
_DECODES_SKIPPED = 8  # of steps without prompts one in so many is learned from: they are many and alike


class Pacing:
    """Learns from steps, and says how many seconds of prompts the next one may hold."""

    __slots__ = ("_num_skipped", "_targets", "times")

    def __init__(self, targets: Targets) -> None:
        self.times = StepTime()
        self._targets = targets
        self._num_skipped = 0

    def is_due(self, is_telling: bool) -> bool:
        """Whether a step that was committed is to be learned from: all that tell something about prompts are."""
        self._num_skipped += 1
        if not is_telling and self._num_skipped < _DECODES_SKIPPED:
            return False
        self._num_skipped = 0
        return True

    def prompts_s(self, decodes: Load) -> float:
        """Seconds that prompts may add to a step with such decodes, all together, beyond what their presence costs."""
        target_s, times = self._targets.itl_s, self.times
        if target_s is None or not decodes.num_decodes or not times.is_known:
            return inf
        base_s = times.seconds(decodes) + times.chunked_s
        return max(AIM * target_s - base_s, FLOOR * base_s)

    def drafts_s(self, flight: Flight) -> float:
        """Seconds that drafts may add to a step that is otherwise complete."""
        target_s, times = self._targets.itl_s, self.times
        if target_s is None or not times.is_known:
            return flight.spare_s
        load = flight.load if flight.load.num_prompt_tokens else decode_load(flight.slices)
        return min(flight.spare_s, AIM * target_s - times.seconds(load))

    def long_s(self, others: Load, long: Seq[Sequence], now: float) -> float:
        """The long ones' part of that, beside `others`: decodes, and prompts that are not long."""
        times, num_in_line = self.times, len(long)
        if not times.is_known or (others.num_decodes and self._targets.itl_s is not None):
            return inf
        if not others.num_decodes and not others.num_prompt_tokens:
            return ALONE * num_in_line * times.fixed_s
        urgency = self._urgency(long, now)
        share_s = max(SHARE * num_in_line**2, urgency / (1 - urgency)) * times.seconds(others)
        if others.num_prompt_tokens:
            return share_s
        return max(share_s - times.chunked_s, times.chunked_s)

    def _urgency(self, long: Seq[Sequence], now: float) -> float:
        """The part of all time that these need for their first tokens to be in time, as far as they still can be."""
        if self._targets.ttft_s is None:
            return 0.0
        target_s, urgency = self._targets.ttft_s, 0.0
        for seq in long:
            waited_s = now - seq.request.arrival_s
            needed_s = self.times.chunk_s(seq.num_planned, len(seq.tokens) - seq.num_planned)
            if needed_s > 0 and seq.first_token_s < 0 and waited_s + needed_s < target_s:
                urgency += needed_s / max(AIM * target_s - waited_s, needed_s)
        return min(urgency, _MAX_URGENCY)
