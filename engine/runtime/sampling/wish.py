"""How a row is drawn, in plain numbers: a step's wishes, and what the native library reads of each."""

from __future__ import annotations

import math
from typing import NamedTuple

from engine.runtime.native.library import DRAW

SEED_MASK = (1 << 64) - 1


class Wish(NamedTuple):
    """How to draw one row; temperature 0 is greedy, top_k 0 / top_p 1 / min_p 0: all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    slot: int = 0


def pack_draw(wish: Wish, vocab_size: int) -> bytes:
    """Return how a row is drawn as the library reads it."""
    temperature, top_k, top_p, min_p, seed, position, slot = wish
    top_k = top_k if top_k < vocab_size else 0
    return DRAW.pack(top_p, temperature, lowest_score(min_p), top_k, seed & SEED_MASK, position, slot)


def lowest_score(min_p: float) -> float:
    """Return the lowest score that min_p keeps, relative to the best."""
    return math.log(min_p) if min_p > 0 else -math.inf
