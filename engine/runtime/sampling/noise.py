"""Random numbers without a state: Gumbel noise as a pure function of (seed, position, token id).

A draw is therefore the same on any batch row, alone or in a busy batch, after a preemption and on any device. Adding
the noise to log probabilities and taking the best draws from their distribution (the Gumbel-max trick); a small change
of the logits moves few draws, which inverting a cumulative sum would not promise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.transfer import to_device

SEED_MASK = (1 << 64) - 1
_BELOW_ONE = 1.0 - 2.0**-24


def make_key(seed: int, position: int) -> tuple[int, int]:
    """Two well-mixed 32-bit words."""
    word = _mix(_mix(seed & SEED_MASK) ^ position)
    return word >> 32, word & 0xFFFFFFFF


def to_keys(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """The keys of R rows as a tensor, [2, R, 1] int32."""
    words = [[_signed(word) for word in words] for words in zip(*pairs, strict=True)]
    return to_device(words, torch.int32, device).unsqueeze(-1)


def gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise float32, finite everywhere; tokens int32, [V] or [R, V] -> [R, V]."""
    uniform = _hash(keys, tokens).float().add_(0.5).mul_(2.0**-31).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def exact_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """The same in float64: the definition that every implementation agrees on."""
    return _hash(keys, tokens).double().add_(0.5).mul_(2.0**-31).neg_().log1p_().neg_().log_().neg_()


def _hash(keys: Tensor, tokens: Tensor) -> Tensor:
    """31 bits for each token. native/sampling.h has the same."""
    first, second = keys.unbind(0)
    # A multiplicative hash of the token id that the two key words enter at different rounds. Shifts of signed numbers
    # copy the sign, which the masks undo. The best tokens are those with the smallest result, so that the fine end of
    # the float scale is where draws are decided.
    x = tokens * _signed(0x9E3779B9) ^ first
    x = (x ^ (x >> 16 & 0xFFFF)).mul_(_signed(0x85EBCA6B)).bitwise_xor_(second)
    x = (x ^ (x >> 13 & 0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return x.bitwise_xor_(x >> 16 & 0xFFFF).bitwise_and_(0x7FFFFFFF)


def _mix(x: int) -> int:
    """A 64-bit finalizer (splitmix64)."""
    x = (x + 0x9E3779B97F4A7C15) & SEED_MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & SEED_MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & SEED_MASK
    return x ^ x >> 31


def _signed(word: int) -> int:
    """The low 32 bits as torch's int32 spells them."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
