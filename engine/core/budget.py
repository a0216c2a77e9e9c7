"""How much a step may hold: tokens after the device ran out of memory, and seconds beside sequences that decode.

    limit        tokens of a step; half as many after out-of-memory, growing back; a part of them for background work
    allowance    what prompts and drafts may add to a step beside so many decodes
    times        what steps take, learned from those that were

A prompt that a step can hold is not held back: running sequences feel it once, and a crowd of such prompts is the load
itself, for which throughput would pay. A long one is paced, for every running sequence feels each of its steps:

    beside others    SHARE * n * n of what the step takes without them, where n long prompts are in line
    alone            ALONE * n times what a step costs however little is in it: an arrival waits for the step that runs

One is hardly felt; where many wait, prompts are the load, and they are the ones that should not wait. With a target ITL
all prompts of a step share what it leaves, and nothing else holds them back. With a target TTFT a long prompt takes what it
needs to be in time, while it can be. Until steps with prompts have been seen, nothing is held back.

Owned by the scheduler, engine thread; knows no clock, only the seconds it is given.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

from engine.core.config import SchedulerConfig
from engine.core.sequence import Sequence
from engine.core.step import SequenceSlice
from engine.core.step_time import Load, StepTime, decode_load
from engine.core.targets import Targets

BACKGROUND_SHARE = 4  # a step of background work is this much smaller than others may be: an arrival waits for it
RESERVE = 8  # one token of so many is for long prompts, where a long one is first in line
SHARE = 0.35  # a step with one long prompt takes 1.35 times as long, plus what reading its context adds
ALONE = 8  # an eighth of a lone prompt's time is the price
AIM = 0.9  # of a target: steps vary
FLOOR = 0.1  # of what decoding takes: so much longer a step may take if it misses the target ITL without any prompt
_MAX_URGENCY = 0.9  # of all time, for long prompts that are about to miss the target TTFT
_DECODES_SKIPPED = 8  # of steps without prompts one in so many is learned from: they are many and alike
_GROWTH = 8  # after out-of-memory the limit grows by one part of so many a step


class StepBudget:
    """The one answer to how much a step may hold."""

    __slots__ = ("_limit", "_max_tokens", "_num_skipped", "_targets", "times")

    def __init__(self, config: SchedulerConfig, targets: Targets) -> None:
        self.times = StepTime()
        self._max_tokens = self._limit = config.max_num_batched_tokens
        self._targets = targets
        self._num_skipped = 0  # steps without prompts since one was learned from

    def limit(self, *, has_foreground: bool) -> int:
        """Tokens of the next step."""
        return self._limit if has_foreground else -(-self._limit // BACKGROUND_SHARE)

    @property
    def is_reduced(self) -> bool:
        """True for a while after the device ran out of memory."""
        return self._limit < self._max_tokens

    def out_of_memory(self, num_tokens: int) -> None:
        """A step of so many tokens did not fit the device."""
        self._limit = max(num_tokens // 2, 1)

    def committed(self) -> None:
        """A step is done: after out-of-memory the next one may be larger."""
        self._limit = min(self._limit + self._limit // _GROWTH + 1, self._max_tokens)

    def is_due(self, *, has_prompts: bool) -> bool:
        """Whether to learn from a step that was committed: all that tell something about prompts are."""
        self._num_skipped += 1
        if not has_prompts and self._num_skipped < _DECODES_SKIPPED:
            return False
        self._num_skipped = 0
        return True

    def allowance(self, decodes: list[SequenceSlice], num_tokens: int) -> Allowance:
        """What prompts and drafts may add to a step with these decodes, at most `num_tokens`."""
        return Allowance(self, decodes, num_tokens)

    def prompts_s(self, decodes: Load) -> float:
        """Seconds that prompts may add to a step with such decodes, all together, beyond what their presence costs."""
        target_s, times = self._targets.itl_s, self.times
        if target_s is None or not decodes.num_decodes or not times.is_known:
            return inf
        base_s = times.seconds(decodes) + times.chunked_s
        return max(AIM * target_s - base_s, FLOOR * base_s)

    def long_s(self, others: Load, long: Seq[Sequence], now: float) -> float:
        """The part of long prompts in that, beside `others`: decodes, and prompts that are not long."""
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

    def drafts_s(self, load: Load) -> float:
        """Seconds that drafts may add to a step of this load."""
        target_s, times = self._targets.itl_s, self.times
        return inf if target_s is None or not times.is_known else AIM * target_s - times.seconds(load)

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


class Allowance:
    """What one step has left for prompts and drafts: tokens, and seconds where there is a reason to count them."""

    __slots__ = ("_budget", "_decodes", "_held_s", "_load", "_num_held", "num_tokens", "spare_s")

    def __init__(self, budget: StepBudget, decodes: list[SequenceSlice], num_tokens: int) -> None:
        self._budget, self._decodes = budget, decodes
        self._load: Load | None = None
        self._num_held, self._held_s = 0, 0.0
        self.num_tokens, self.spare_s = num_tokens, inf

    @property
    def load(self) -> Load:
        """What the step computes so far. Counted when it is first asked for: most steps only decode, and nothing asks."""
        if self._load is None:
            self._load = decode_load(self._decodes)
        return self._load

    def begin_prompts(self, *, holds_back: bool) -> None:
        """Prompts come next. With `holds_back` a part is kept for long ones, until `release`."""
        self.spare_s = self._budget.prompts_s(self.load)
        if holds_back:
            self._num_held = -(-self.num_tokens // RESERVE)
            if self._num_held and self.spare_s < inf:
                self._held_s = self.spare_s * self._num_held / self.num_tokens
            self.num_tokens -= self._num_held
            self.spare_s -= self._held_s

    def release(self) -> None:
        """Give back the part that was kept."""
        self.num_tokens += self._num_held
        self.spare_s += self._held_s
        self._num_held, self._held_s = 0, 0.0

    def prompt(self, start: int, wanted: int, least: int = 0) -> int:
        """Return how many of `wanted` positions of a prompt to compute, and take them off.

        They are as many as the seconds allow, but never fewer than `least`, nor is the first chunk of a step empty.
        """
        times, limit = self._budget.times, self.num_tokens
        if self.spare_s < inf:
            least = least or not self.load.num_prompt_tokens
            limit = min(limit, max(int(min(times.tokens_within(self.spare_s, start), limit)), least))
        count = min(wanted, limit)
        if count:
            self.spare_s -= times.chunk_s(start, count)
            self.num_tokens -= count
            self._load = self.load.with_chunk(start, count)
        return count

    def share_long(self, long: Seq[Sequence], now: float) -> float:
        """Return the seconds that long prompts have in this step."""
        return min(self._budget.long_s(self.load, long, now), self.spare_s)

    def drafts_s(self) -> float:
        """Seconds that drafts may add to the step, which is otherwise complete."""
        return min(self.spare_s, self._budget.drafts_s(self.load))
