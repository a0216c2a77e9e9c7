"""Stateless Gumbel noise: a pure function of (seed, position, token id).

So a draw is the same in any batch row, alone or in a busy batch, after a preemption and on any device. Adding the noise
to log probabilities and taking the maximum draws from their distribution (the Gumbel-max trick). A small change of the
logits changes few draws, which does not hold for inverting a cumulative sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.transfer import to_device

SEED_MASK = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-24


def make_key(seed: int, position: int) -> tuple[int, int]:
    """Return two well-mixed 32-bit words."""
    word = _mix(_mix(seed & SEED_MASK) ^ position)
    return word >> 32, word & 0xFFFFFFFF


def to_keys(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the keys of R rows as a tensor, [2, R, 1] int32."""
    words = [[as_signed(word, 32) for word in words] for words in zip(*pairs, strict=True)]
    return to_device(words, torch.int32, device).unsqueeze(-1)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return finite Gumbel noise [R, V] float32, for tokens int32 [V] or [R, V]."""
    uniform = _hash(keys, tokens).float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def exact_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise in float64: the definition that every implementation follows."""
    return _hash(keys, tokens).double().add_(0.5).mul_(2.0**-31).neg_().log1p_().neg_().log_().neg_()


def _hash(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return 31 bits for each token, as native/sampling.h does."""
    first, second = keys.unbind(0)
    # A multiplicative hash of the token id; the two key words enter at different rounds. Shifts of signed numbers copy
    # the sign, which the masks undo. The best tokens have the smallest result, so draws are decided at the fine end of
    # the float scale.
    x = tokens * as_signed(0x9E3779B9, 32) ^ first
    x = (x ^ (x >> 16 & 0xFFFF)).mul_(as_signed(0x85EBCA6B, 32)).bitwise_xor_(second)
    x = (x ^ (x >> 13 & 0x7FFFF)).mul_(as_signed(0xC2B2AE35, 32))
    return x.bitwise_xor_(x >> 16 & 0xFFFF).bitwise_and_(0x7FFFFFFF)


def _mix(x: int) -> int:
    """A 64-bit finalizer (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & SEED_MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & SEED_MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & SEED_MASK
    return x ^ x >> 31


def as_signed(number: int, num_bits: int) -> int:
    """Return the low bits of a number as a signed integer."""
    number &= (1 << num_bits) - 1
    return number - (1 << num_bits) if number >> (num_bits - 1) else number
