"""Finds the tokens that top_k and top_p keep, without a sort.

The result is the key of the worst score kept. The definition is that of sampling/draw.py: the fewest best tokens
that are k, or have the mass p together, with equal scores kept together. There are three launches. The first counts and
weighs the tokens above each of 32 fixed levels, tile by tile. The second copies those above the lowest relevant level,
a few thousand at most, into a separate row. The third searches them for the limit, one program a row. If they are too
many it searches the whole row, which is slower and gives the same result. Rows without these filters cost a program
that exits immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.sampling_row import A_NUMBER_A_ROW, Draws, is_void, row_peak, to_key, to_score

# Levels lie -(n + 1)^2 / 40 below the peak: 0.3 apart at 1, 0.8 at 6.4, where the nucleus of a sampled text ends. So
# few more tokens are copied than are kept. The last level is -inf.
_LEVELS = 32
_CAPACITY = 8192  # copied tokens a row
# Scores at a time, times levels or pivots: 64 and 128 values a thread. To be tuned on a GPU, with the capacity.
_TALLY_STEP = 256
_SEARCH_STEP = 1024

_NO_KEY = tl.constexpr(0x7FFFFFFF)  # above that of any score
_KEY_OF_NONE = tl.constexpr(0x7F800000)  # of -inf


def find_limits(logits: Tensor, draws: Draws, peaks: Tensor, tile: int) -> Tensor:
    """Return [R] int32, the largest key of a kept score, for logits [R, V] and peaks.

    min_p is applied too. Undefined for a temperature of 0.
    """
    num_rows, num_tiles = peaks.shape
    vocab_size, device = logits.shape[1], logits.device
    counts = torch.empty((num_rows, num_tiles, _LEVELS), dtype=torch.int32, device=device)
    masses = torch.empty((num_rows, num_tiles, _LEVELS), dtype=torch.float32, device=device)
    best = torch.empty((num_rows, min(_CAPACITY, vocab_size)), dtype=torch.float32, device=device)
    limits = torch.empty(num_rows, dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), vocab_size, *draws[:4], peaks, counts, masses)
    tiles = triton.next_power_of_2(num_tiles)
    step = min(_TALLY_STEP, tile)
    _tally[(num_rows, num_tiles)](*row, LEVELS=_LEVELS, TILE=tile, TILES=tiles, STEP=step)
    _copy_best[(num_rows, num_tiles)](*row, best, best.shape[1], LEVELS=_LEVELS, TILE=tile, TILES=tiles, num_warps=8)
    _search_borders[(num_rows,)](
        *row, best, best.shape[1], limits, num_tiles, LEVELS=_LEVELS, TILES=tiles, STEP=_SEARCH_STEP, num_warps=8
    )
    return limits


@triton.jit
def _load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size):
    """Load the row's temperature, top_k (0 keeps all), top_p, and whether a filter is on."""
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    return temperature, top_k, top_p, (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _level_keys(levels, LEVELS: tl.constexpr):
    score = (levels + 1).to(tl.float32) * (levels + 1).to(tl.float32) * (-1.0 / 40)
    return tl.where(levels < LEVELS - 1, to_key(score), _KEY_OF_NONE)


@triton.jit
def _load_scores(at, inside, peak, temperature, limit):
    """Load scores and their keys; absent ones and those beyond the limit get the highest key."""
    score = to_score(tl.load(at, inside, -float("inf")), peak, temperature)
    key = to_key(score)
    return score, tl.where(inside & (key <= limit), key, _NO_KEY)


@triton.jit
def _weigh(score, key, pivots):
    """Return the count and the mass of scores with a key up to each pivot."""
    is_kept = key[None, :] <= pivots[:, None]
    mass = tl.sum(tl.where(is_kept, tl.exp(score)[None, :], 0.0), 1)
    return tl.sum(is_kept.to(tl.int32), 1), mass


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _tally(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute count and mass of a tile's tokens above each level."""
    row, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, _, _, is_ranked = _load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    peak = row_peak(peaks_ptr + row * num_tiles, num_tiles, TILES)
    if is_void(peak) | (not is_ranked):
        return
    limit = to_key(tl.load(lowest_ptr + row))
    level = tl.arange(0, LEVELS)
    pivots = _level_keys(level, LEVELS)
    count, mass = tl.zeros((LEVELS,), tl.int32), tl.zeros((LEVELS,), tl.float32)
    for begin in range(0, TILE, STEP):
        token = tile * TILE + begin + tl.arange(0, STEP)
        at = logits_ptr + row * row_stride + token
        score, key = _load_scores(at, token < vocab_size, peak, temperature, limit)
        step_count, step_mass = _weigh(score, key, pivots)
        count += step_count
        mass += step_mass
    to = (row * num_tiles + tile) * LEVELS + level
    tl.store(counts_ptr + to, count)
    tl.store(masses_ptr + to, mass)


@triton.jit
def _choose_level(counts_ptr, masses_ptr, num_tiles, top_k, top_p, LEVELS: tl.constexpr, TILES: tl.constexpr):
    """Return the first level above which all kept tokens are.

    Also returns the counts [TILES] of tokens above it, and the row's mass.
    """
    tile, level = tl.arange(0, TILES), tl.arange(0, LEVELS)
    at = tile[:, None] * LEVELS + level[None, :]
    is_tile = (tile < num_tiles)[:, None]
    counts = tl.load(counts_ptr + at, is_tile, 0)
    mass = tl.sum(tl.load(masses_ptr + at, is_tile, 0.0).to(tl.float64), 0)
    total = tl.sum(tl.where(level == LEVELS - 1, mass, 0.0), 0)
    if top_k > 0:
        is_enough = tl.sum(counts, 0) >= top_k
    else:
        is_enough = mass >= top_p * total
    chosen = tl.min(tl.where(is_enough, level, LEVELS - 1), 0)
    return chosen, tl.sum(tl.where(level[None, :] == chosen, counts, 0), 1), total


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _copy_best(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    best_ptr,
    capacity,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Copy a tile's logits above the row's level, if there is room for all tiles."""
    row, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p, is_ranked = _load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    peak = row_peak(peaks_ptr + row * num_tiles, num_tiles, TILES)
    if is_void(peak) | (not is_ranked):
        return
    first = row * num_tiles * LEVELS
    level, counts, _ = _choose_level(counts_ptr + first, masses_ptr + first, num_tiles, top_k, top_p, LEVELS, TILES)
    if tl.sum(counts, 0) > capacity:
        return
    before = tl.sum(tl.where(tl.arange(0, TILES) < tile, counts, 0), 0)
    limit = tl.minimum(to_key(tl.load(lowest_ptr + row)), _level_keys(level, LEVELS))
    token = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * row_stride + token, token < vocab_size, -float("inf"))
    is_copied = (token < vocab_size) & (to_key(to_score(logits, peak, temperature)) <= limit)
    place = before + tl.cumsum(is_copied.to(tl.int32), 0) - 1
    tl.store(best_ptr + row * capacity + place, logits, is_copied)


@triton.jit
def _weigh_all(base, size, peak, temperature, limit, pivots, PIVOTS: tl.constexpr, STEP: tl.constexpr):
    """Return _weigh over all logits from `base` on, with the mass in float64."""
    count, mass = tl.zeros((PIVOTS,), tl.int32), tl.zeros((PIVOTS,), tl.float64)
    for begin in range(0, size, STEP):
        place = begin + tl.arange(0, STEP)
        score, key = _load_scores(base + place, place < size, peak, temperature, limit)
        step_count, step_mass = _weigh(score, key, pivots)
        count += step_count
        mass += step_mass.to(tl.float64)
    return count, mass


@triton.jit
def _search(base, size, peak, temperature, low, high, target, BY_MASS: tl.constexpr, STEP: tl.constexpr):
    """Return the smallest key up to which logits reach `target` in count or mass, else `high`.

    Up to `low` they do not reach it. Each pass cuts (low, high] in 16. The search ends when the interval holds one key,
    or one token, because then any key in it keeps the same tokens.
    """
    few, enough = tl.full((), 0, tl.int32), size
    while (high - low > 1) & (enough - few > 1):
        part = tl.arange(0, 16)
        pivots = low + (((high - low).to(tl.int64) * (part + 1) + 15) // 16).to(tl.int32)
        count, mass = _weigh_all(base, size, peak, temperature, high, pivots, 16, STEP)
        if BY_MASS:
            reaches = mass >= target
        else:
            reaches = count >= target
        low = tl.max(tl.where(reaches, low, pivots), 0)
        high = tl.min(tl.where(reaches, pivots, high), 0)
        few = tl.max(tl.where(reaches, few, count), 0)
        enough = tl.min(tl.where(reaches, count, enough), 0)
    return high


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _search_borders(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,
    peaks_ptr,
    counts_ptr,
    masses_ptr,
    best_ptr,
    capacity,
    limits_ptr,
    num_tiles,
    LEVELS: tl.constexpr,
    TILES: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program for each row: top_k, then top_p of the rest."""
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, is_ranked = _load_filters(temperature_ptr, top_k_ptr, top_p_ptr, row, vocab_size)
    limit = to_key(tl.load(lowest_ptr + row))
    tl.store(limits_ptr + row, limit)
    peak = row_peak(peaks_ptr + row * num_tiles, num_tiles, TILES)
    if is_void(peak) | (not is_ranked):
        return
    first = row * num_tiles * LEVELS
    level, counts, total = _choose_level(counts_ptr + first, masses_ptr + first, num_tiles, top_k, top_p, LEVELS, TILES)
    num_copied = tl.sum(counts, 0)
    size = tl.where(num_copied > capacity, vocab_size, num_copied)
    base = best_ptr + row * capacity
    if num_copied > capacity:
        base = logits_ptr + row * row_stride
    low = tl.where(level > 0, _level_keys(level - 1, LEVELS), -1)
    high = tl.minimum(limit, _level_keys(level, LEVELS))
    if top_k > 0:
        high = _search(base, size, peak, temperature, low, high, top_k, False, STEP)
        low = tl.full((), -1, tl.int32)
        pivots = high + tl.zeros((1,), tl.int32)
        total = tl.sum(_weigh_all(base, size, peak, temperature, high, pivots, 1, STEP)[1], 0)
    if top_p < 1:
        high = _search(base, size, peak, temperature, low, high, top_p * total, True, STEP)
    tl.store(limits_ptr + row, high)
