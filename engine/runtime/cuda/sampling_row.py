"""The sampling kernels' functions of a row: its parameters, peak, scores and noise.

Scores and noise equal those of sampling/draw.py; scores and the noise's hash to the bit. Device
code, except `Draws`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Draws(NamedTuple):
    """How to draw each of R rows; tensors on the device. Temperature 0 is greedy."""

    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int32, 0: all
    top_p: Tensor  # [R] float64, 1: all
    lowest: Tensor  # [R] float32, log(min_p), the lowest score kept; -inf: all
    seed: Tensor  # [R] int64, all 64 bits
    position: Tensor  # [R] int64, the position of the drawn token


# Loaded one number at a time, independent of alignment; otherwise a kernel would be compiled for every alignment.
A_NUMBER_A_ROW = [
    f"{name}_ptr" for name in (*Draws._fields, "limits", "count_rows", "repetition", "frequency", "presence")
]


@triton.jit
def row_peak(peaks_ptr, num_tiles, TILES: tl.constexpr):
    """Return the best of a row's tiles; +inf if there was a NaN."""
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(peaks_ptr + tile, tile < num_tiles, -float("inf")), 0)


@triton.jit
def is_void(peak):
    """Return whether nothing can be drawn from a row with this peak."""
    return tl.abs(peak) == float("inf")


@triton.jit
def to_score(logit, peak, temperature):
    """Return scores relative to the peak, with IEEE division instead of the fast one."""
    return tl.div_rn(logit - peak, temperature)


@triton.jit
def to_key(score):
    """Return the score's bits without the sign: an int32 that rises as the score falls."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mix(x):
    """A 64-bit finalizer (splitmix64)."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def hash_tokens(tokens, seed, position):
    """Return 31 bits for each token, as a uint32."""
    word = _mix(_mix(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    x = (tokens.to(tl.uint32) * 0x9E3779B9) ^ (word >> 32).to(tl.uint32)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) ^ word.to(tl.uint32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@triton.jit
def fast_noise(hashes):
    """Return Gumbel noise in float32, to its last few digits: -log(-log(1 - u))."""
    # 1 - u from the hash's complement keeps its digits where u is near 1. Where u is near 0, the logarithm is corrected
    # for the digits that 1 - u has lost.
    uniform = (hashes.to(tl.float32) + 0.5) * (1.0 / 2147483648)
    is_high = hashes >= 0x40000000
    rest = tl.where(is_high, ((0x7FFFFFFF - hashes).to(tl.float32) + 0.5) * (1.0 / 2147483648), 1.0 - uniform)
    lost = tl.where(is_high | (rest == 1.0), 1.0, 1.0 - rest)
    exponential = -tl.log(rest) * tl.where(is_high, 1.0, uniform / lost)
    return -tl.log(tl.where(rest == 1.0, uniform, exponential))


@triton.jit
def exact_noise(hashes):
    """Return the noise in float64, where 1 - u is exact."""
    return -tl.log(-tl.log(1.0 - (hashes.to(tl.float64) + 0.5) * (1.0 / 2147483648)))
