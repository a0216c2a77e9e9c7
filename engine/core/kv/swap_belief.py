"""Whether K/V is copied to host memory and back, or computed anew: whichever is sooner done, by what is known of both.

Begun with what is measured at the start, then followed: a block's seconds from the copies that are made, a prompt's from the
fitted model of what steps take. Copies that are never made say nothing, so each time one is not worth it, what is believed
of them fades to what was measured. Owned by the scheduler, engine thread; knows no clock.
"""

from __future__ import annotations

from engine.core.budget import StepTime
from engine.core.kv.page_table import blocks_for
from engine.core.kv.swap_costs import SwapCosts
from engine.core.stats import Stats
from engine.core.step import Moves

_MEMORY = 0.98  # a block's weight in what is believed of the next: the last fifty count
_FADE = 0.02


class SwapBelief:
    """What copying and computing cost by now."""

    __slots__ = ("_block_size", "_measured", "_stats", "_times", "block_s", "is_given_up")

    def __init__(self, measured: SwapCosts, block_size: int, times: StepTime, stats: Stats) -> None:
        self._measured, self._block_size, self._times, self._stats = measured, block_size, times, stats
        self.block_s = measured.block_s
        self.is_given_up = False  # copies fail here
        self.tell()

    def learn(self, moves: Moves) -> None:
        """So many blocks went one way."""
        num_blocks = moves.num_blocks
        seen_s = max(2 * moves.seconds - self._measured.trip_s, 0.0) / num_blocks
        weight = _MEMORY**num_blocks
        self.block_s = weight * self.block_s + (1 - weight) * seen_s
        self.tell()

    def copy_s(self, num_tokens: int) -> float:
        """One way."""
        num_blocks = blocks_for(num_tokens, self._block_size)
        return (self._measured.trip_s + self.block_s * num_blocks) / 2

    def compute_s(self, start: int, num_tokens: int) -> float:
        """As part of a prompt, from `start`; in steps that there are anyway."""
        return self._times.chunk_s(start, num_tokens) if self._times.is_known else num_tokens * self._measured.token_s

    def pays_to_save(self, num_tokens: int) -> bool:
        """Whether a sequence that gives way is copied out, to come back. To be asked once for each."""
        pays = not self.is_given_up and 2 * self.copy_s(num_tokens) <= self.compute_s(0, num_tokens)
        if not pays:
            self.block_s += _FADE * (self._measured.block_s - self.block_s)
        return pays

    def pays_to_bring(self, start: int, num_tokens: int) -> bool:
        """Whether what is on the host is copied in."""
        return not self.is_given_up and self.copy_s(num_tokens) <= self.compute_s(start, num_tokens)

    def tell(self) -> None:
        """Have it shown."""
        self._stats.swap_block_s = self.block_s
        self._stats.compute_block_s = self.compute_s(0, self._block_size)
