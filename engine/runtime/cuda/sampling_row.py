"""What the sampling kernels know of a row: how it is drawn, its peak, its scores and its noise.

Scores and noise are those of sampling/draw.py and sampling/noise.py, the scores and the noise's hash to the bit. Device
code but for `Draws`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Draws(NamedTuple):
    """How each of R rows is to be drawn; tensors on the device. Temperature 0 is greedy."""

    temperature: Tensor  # [R] float32
    top_k: Tensor  # [R] int32, 0: all
    top_p: Tensor  # [R] float64, 1: all
    lowest: Tensor  # [R] float32, log(min_p), of the scores that min_p keeps; -inf: all
    seed: Tensor  # [R] int64, of which all 64 bits count
    position: Tensor  # [R] int64, where the drawn token will stand


# Read one number at a time, which makes nothing of how they are aligned; or a kernel would be compiled for every way.
A_NUMBER_A_ROW = [
    f"{name}_ptr" for name in (*Draws._fields, "limits", "count_rows", "repetition", "frequency", "presence")
]


@triton.jit
def row_peak(peaks_ptr, num_tiles, TILES: tl.constexpr):
    """The best of a row's tiles; +inf where there was a NaN."""
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(peaks_ptr + tile, tile < num_tiles, -float("inf")), 0)


@triton.jit
def is_void(peak):
    """Whether nothing can be drawn from a row with this peak."""
    return tl.abs(peak) == float("inf")


@triton.jit
def to_score(logit, peak, temperature):
    """Counts from the peak, so none is above 0. The division is IEEE's, not the fast one that "/" would be."""
    return tl.div_rn(logit - peak, temperature)


@triton.jit
def to_key(score):
    """The score's bits without the sign: an int32 that rises as the score falls."""
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
    """31 bits for each token, as a uint32."""
    word = _mix(_mix(seed.to(tl.uint64)) ^ position.to(tl.uint64))
    x = (tokens.to(tl.uint32) * 0x9E3779B9) ^ (word >> 32).to(tl.uint32)
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) ^ word.to(tl.uint32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return (x ^ (x >> 16)) & 0x7FFFFFFF


@triton.jit
def fast_noise(hashes):
    """Gumbel noise in float32, off by no more than a few of its last digits: -log(-log(1 - u))."""
    # 1 - u from the hash's complement keeps its digits where u is near 1. Where it is near 0, the logarithm is put
    # right for the digits that 1 - u has lost.
    uniform = (hashes.to(tl.float32) + 0.5) * (1.0 / 2147483648)
    is_high = hashes >= 0x40000000
    rest = tl.where(is_high, ((0x7FFFFFFF - hashes).to(tl.float32) + 0.5) * (1.0 / 2147483648), 1.0 - uniform)
    lost = tl.where(is_high | (rest == 1.0), 1.0, 1.0 - rest)
    exponential = -tl.log(rest) * tl.where(is_high, 1.0, uniform / lost)
    return -tl.log(tl.where(rest == 1.0, uniform, exponential))


@triton.jit
def exact_noise(hashes):
    """The same in float64, where 1 - u loses nothing."""
    return -tl.log(-tl.log(1.0 - (hashes.to(tl.float64) + 0.5) * (1.0 / 2147483648)))
