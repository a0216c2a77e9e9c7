"""Draws a token from every row of logits on the device, in a few launches without waiting.

    penalties, each tile's best -> (sampling_filter.py: top_k, top_p) -> each tile's candidates -> the winner

A row is cut into tiles, one for each program: at a batch of one a vocabulary of 150,000 keeps 37 processors busy
instead of one, and at 256 all of them. The draw equals that of sampling/draw.py, from the same (seed, position) and by
the same definition: candidates by noise in float32, the winner by noise in float64, the lower id in a tie. Engine
thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.runtime.cuda.sampling_filter import find_limits
from engine.runtime.cuda.sampling_row import (
    A_NUMBER_A_ROW,
    Draws,
    exact_noise,
    fast_noise,
    hash_tokens,
    is_void,
    row_peak,
    to_key,
    to_score,
)
from engine.runtime.transfer import Drawn

# Logits of a program: 16 a thread, and few enough tiles that one load reads the results of all. To be tuned on a GPU,
# with 2048 and 8192, and the warps with them.
_TILE, _WARPS = 4096, 8

IN_PROMPT = 1 << 30  # added to the count of a token that occurs in the prompt
_ANSWER_BITS = tl.constexpr(IN_PROMPT - 1)


class Penalties(NamedTuple):
    """The penalties of R rows; tensors on the device."""

    counts: Tensor  # [sequences, V] int32, occurrences of a token in the answer, and IN_PROMPT
    rows: Tensor  # [R] int32, a row's line of `counts`; -1: not penalised
    repetition: Tensor  # [R] float32, 1: none
    frequency: Tensor  # [R] float32
    presence: Tensor  # [R] float32


def sample(
    logits: Tensor,
    draws: Draws,
    penalties: Penalties | None = None,
    *,
    is_drawing: bool = True,
    is_ranking: bool = True,
) -> Drawn:
    """Return an id for each row of logits [R, V] float32; penalties change them in place.

    Rows need not be adjacent; each needs one logit above -inf. Flags save launches: `is_drawing` is False if all rows
    are greedy, `is_ranking` if none has a top_k or a top_p.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert all(column.is_contiguous() for column in draws)
    if penalties is not None:
        assert penalties.counts.shape[1] == vocab_size
        assert penalties.counts.is_contiguous()
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return Drawn(ids, is_finite)
    grid = (num_rows, triton.cdiv(vocab_size, _TILE))
    peaks = torch.empty(grid, dtype=torch.float32, device=logits.device)
    peak_ids = torch.empty(grid, dtype=torch.int32, device=logits.device)
    _find_peaks[grid](
        logits,
        logits.stride(0),
        vocab_size,
        *(penalties or (None,) * 5),
        peaks,
        peak_ids,
        HAS_PENALTIES=penalties is not None,
        TILE=_TILE,
        num_warps=_WARPS,
    )
    candidates = torch.empty((*grid, 2) if is_drawing else (0,), dtype=torch.int32, device=logits.device)
    tiles = triton.next_power_of_2(grid[1])
    if is_drawing:
        limits = find_limits(logits, draws, peaks, _TILE) if is_ranking else None
        _find_candidates[grid](
            logits,
            logits.stride(0),
            vocab_size,
            *draws,
            limits,
            peaks,
            candidates,
            HAS_LIMITS=is_ranking,
            TILE=_TILE,
            TILES=tiles,
            num_warps=_WARPS,
        )
    _choose[(num_rows,)](
        logits,
        logits.stride(0),
        vocab_size,
        *draws,
        peaks,
        peak_ids,
        candidates,
        ids,
        is_finite.view(torch.uint8),
        grid[1],
        HAS_CANDIDATES=is_drawing,
        TILES=tiles,
    )
    return Drawn(ids, is_finite)


@triton.jit
def _penalise(logits, counts, repetition, frequency, presence):
    """Apply repetition over prompt and answer, then frequency and presence over the answer."""
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(counts > 0, repeated, logits)
    said = counts & _ANSWER_BITS
    return logits - frequency * said - tl.where(said > 0, presence, 0.0)


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _find_peaks(
    logits_ptr,
    row_stride,
    vocab_size,
    counts_ptr,
    count_rows_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    peaks_ptr,
    peak_ids_ptr,
    HAS_PENALTIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find each tile's best, +inf for a NaN, and its lowest id; penalties change logits."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    inside = token < vocab_size
    at = logits_ptr + row * row_stride + token
    logits = tl.load(at, inside, -float("inf"))
    if HAS_PENALTIES:
        count_row = tl.load(count_rows_ptr + row).to(tl.int64)
        if count_row >= 0:
            counts = tl.load(counts_ptr + count_row * vocab_size + token, inside, 0)
            repetition, frequency = tl.load(repetition_ptr + row), tl.load(frequency_ptr + row)
            logits = _penalise(logits, counts, repetition, frequency, tl.load(presence_ptr + row))
            tl.store(at, logits, inside)
    # A NaN voids the row like an infinity; it is detected here, where no comparison can miss it.
    known = tl.where(logits == logits, logits, float("inf"))
    peak, place = tl.max(known, 0, return_indices=True, return_indices_tie_break_left=True)
    result = row * tl.num_programs(1) + tile
    tl.store(peaks_ptr + result, peak)
    tl.store(peak_ids_ptr + result, tile * TILE + place)


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _find_candidates(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,
    seed_ptr,
    position_ptr,
    limits_ptr,
    peaks_ptr,
    candidates_ptr,
    HAS_LIMITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Find each tile's two best with noise, -1 without one.

    The winner is among them unless two others of its tile are equal to it in float32: once in 10^11 draws.
    """
    row, tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    peak = row_peak(peaks_ptr + row * num_tiles, num_tiles, TILES)
    if (temperature == 0) | is_void(peak):
        return
    place = tl.arange(0, TILE)
    token = tile * TILE + place
    logits = tl.load(logits_ptr + row * row_stride + token, token < vocab_size, -float("inf"))
    score = to_score(logits, peak, temperature)
    if HAS_LIMITS:
        limit = tl.load(limits_ptr + row)
    else:
        limit = to_key(tl.load(lowest_ptr + row))
    noise = fast_noise(hash_tokens(token, tl.load(seed_ptr + row), tl.load(position_ptr + row)))
    value = tl.where(to_key(score) <= limit, score + noise, -float("inf"))
    best, first = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    value = tl.where(place == first, -float("inf"), value)
    next_best, second = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    to = candidates_ptr + (row * num_tiles + tile) * 2
    tl.store(to, tl.where(best > -float("inf"), tile * TILE + first, -1))
    tl.store(to + 1, tl.where(next_best > -float("inf"), tile * TILE + second, -1))


@triton.jit(do_not_specialize_on_alignment=A_NUMBER_A_ROW)
def _choose(
    logits_ptr,
    row_stride,
    vocab_size,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    lowest_ptr,
    seed_ptr,
    position_ptr,
    peaks_ptr,
    peak_ids_ptr,
    candidates_ptr,
    ids_ptr,
    is_finite_ptr,
    num_tiles,
    HAS_CANDIDATES: tl.constexpr,
    TILES: tl.constexpr,
):
    """One program for each row: its peak if greedy, else the best candidate by exact noise."""
    row = tl.program_id(0).to(tl.int64)
    peak = row_peak(peaks_ptr + row * num_tiles, num_tiles, TILES)
    is_finite = ~is_void(peak)
    tl.store(is_finite_ptr + row, is_finite.to(tl.uint8))
    tile = tl.arange(0, TILES)
    at = row * num_tiles + tile
    has_peak = tl.load(peaks_ptr + at, tile < num_tiles, float("nan")) == peak
    chosen = tl.min(tl.where(has_peak, tl.load(peak_ids_ptr + at, tile < num_tiles, 0), vocab_size), 0)
    if HAS_CANDIDATES:
        temperature = tl.load(temperature_ptr + row)
        if is_finite & (temperature > 0):
            place = tl.arange(0, 2 * TILES)
            token = tl.load(candidates_ptr + row * num_tiles * 2 + place, place < 2 * num_tiles, -1)
            logits = tl.load(logits_ptr + row * row_stride + token, token >= 0, -float("inf"))
            score = to_score(logits, peak, temperature).to(tl.float64)
            noise = exact_noise(hash_tokens(token, tl.load(seed_ptr + row), tl.load(position_ptr + row)))
            value = tl.where(token >= 0, score + noise, -float("inf"))
            chosen = tl.min(tl.where(value == tl.max(value, 0), token, vocab_size), 0)
    # A void row gets any id of the vocabulary.
    tl.store(ids_ptr + row, tl.where(is_finite, chosen, 0).to(tl.int64))
