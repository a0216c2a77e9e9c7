"""What copying K/V to host memory and computing it cost, as measured once at the start; swap_belief.py follows from there."""

from __future__ import annotations

from typing import NamedTuple


class SwapCosts(NamedTuple):
    """Seconds, measured on the machine that serves."""

    trip_s: float = 0.0  # what a copy to the host and back takes, however small it is
    block_s: float = 0.0  # a block's part of it
    token_s: float = 0.0  # computing one position as part of a prompt


def min_swap_tokens(costs: SwapCosts, block_size: int) -> int | None:
    """The fewest computed positions that are copied out and back sooner than they are computed anew; None for never.

    Positions are taken to fill one block more than they do, at worst. Attention's part of a prompt, which grows with
    its square, is left out, and so is that copies run beside the steps on CUDA: long ones gain more than is said here.
    """
    gain_s = costs.token_s - costs.block_s / block_size
    if gain_s <= 0:
        return None
    return int((costs.trip_s + costs.block_s) / gain_s) + 1


FREE_SWAPS = SwapCosts()
