"""Draws one token from each row of logits: greedy, or by the Gumbel-max trick.

On a CPU the native library takes one or two passes over each row (native/sampling.h): 16 rows of 49,152 take a
millisecond. On CUDA it is a few launches (cuda/sampling.py). Without either, torch operations draw the same tokens.
Engine thread.

The noise is a pure function of (seed, position, token id). So a draw is the same in any batch row, alone or in a busy batch,
after a preemption and on any device. Adding the noise to log probabilities and taking the maximum draws from their distribution (the Gumbel-max trick). A small change of the
logits changes few draws, which does not hold for inverting a cumulative sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.runtime.cuda.available import uses_triton
from engine.runtime.native.library import Library, SampleArgs, native
from engine.runtime.sampling.wish import SEED_MASK, Wish, lowest_score, pack_draw
from engine.runtime.transfer import Drawn, to_device

if TYPE_CHECKING:
    from engine.runtime.cuda.sampling import Penalties  # imports Triton, which a CPU-only machine may lack

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


_NUM_SETTLED = 8  # candidates that float32 cannot separate


def draw(
    logits: Tensor, wishes: Sequence[Wish], penalties: Penalties | None = None, last_ids: Tensor | None = None
) -> Drawn:
    """Return an id for each row of logits [R, V] float32, which are overwritten; write it to the slot's `last_ids` too.

    A row needs one logit above -inf. `penalties` are for the CUDA kernels, which apply them in the same pass; elsewhere
    the caller has applied them. Seeded rows draw the same id on every device and beside any other rows. Only top_p may
    differ by one token between two implementations, where the last digits of a sum of probabilities decide.
    """
    library = native() if logits.device.type == "cpu" and logits.is_contiguous() else None
    if library is not None:
        return _draw_natively(library, logits, wishes, last_ids)
    drawn = _draw_in_triton(logits, wishes, penalties) if uses_triton(logits) else _draw_in_torch(logits, wishes)
    if last_ids is not None:
        last_ids.index_copy_(0, _on(logits, [wish.slot for wish in wishes], torch.int64), drawn.ids)
    return drawn


def _draw_natively(library: Library, logits: Tensor, wishes: Sequence[Wish], last_ids: Tensor | None = None) -> Drawn:
    num_rows, vocab_size = logits.shape
    ids, is_finite = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.bool)
    draws = b"".join([pack_draw(wish, vocab_size) for wish in wishes])
    last = None if last_ids is None else last_ids.data_ptr()
    addresses = logits.data_ptr(), draws, ids.data_ptr(), is_finite.data_ptr()
    library.sample(SampleArgs(*addresses, num_rows, vocab_size, last))
    return Drawn(ids, is_finite)


def _draw_in_triton(logits: Tensor, wishes: Sequence[Wish], penalties: Penalties | None) -> Drawn:
    from engine.runtime.cuda.sampling import sample
    from engine.runtime.cuda.sampling_row import Draws

    temperatures, top_ks, top_ps, min_ps, seeds, positions, _ = zip(*wishes, strict=True)
    vocab_size = logits.shape[1]
    draws = Draws(
        temperature=_on(logits, temperatures),
        top_k=_on(logits, [top_k if top_k < vocab_size else 0 for top_k in top_ks], torch.int32),
        top_p=_on(logits, top_ps, torch.float64),
        lowest=_on(logits, [lowest_score(min_p) for min_p in min_ps]),
        seed=_on(logits, [as_signed(seed, 64) for seed in seeds], torch.int64),
        position=_on(logits, positions, torch.int64),
    )
    is_ranking = any(0 < wish.top_k < vocab_size or wish.top_p < 1 for wish in wishes)
    return sample(logits, draws, penalties, is_drawing=any(temperatures), is_ranking=is_ranking)


def _draw_in_torch(logits: Tensor, wishes: Sequence[Wish]) -> Drawn:
    best = logits.max(-1)  # a maximum shows NaN, +inf, and a row of -inf
    ids, is_finite = best.indices, best.values.isfinite()
    drawing = [row for row, wish in enumerate(wishes) if wish.temperature > 0]
    if drawing:
        chosen = [wishes[row] for row in drawing]
        at = _on(logits, drawing, torch.int64)
        ids.index_copy_(0, at, _draw_rows(logits if len(drawing) == len(wishes) else logits[at], chosen))
    return Drawn(ids, is_finite)


def _draw_rows(logits: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """Apply temperature, filters and noise; scores are relative to the row's best."""
    temperature = _on(logits, [wish.temperature for wish in wishes])
    scores = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    lowest = _on(logits, [lowest_score(wish.min_p) for wish in wishes])
    scores.masked_fill_(scores < lowest[:, None], -torch.inf)
    vocab_size = scores.shape[1]
    if any(0 < wish.top_k < vocab_size for wish in wishes):
        top_k = [min(wish.top_k or vocab_size, vocab_size) for wish in wishes]
        _keep_top_k(scores, _on(logits, top_k, torch.int64))
    if any(wish.top_p < 1 for wish in wishes):
        _keep_top_p(scores, _on(logits, [wish.top_p if wish.top_p < 1 else math.inf for wish in wishes], torch.float64))
    return _best_with_noise(scores, to_keys([make_key(wish.seed, wish.position) for wish in wishes], scores.device))


# Filters of rows of scores relative to the best: each sets those that it removes to -inf, in place. Equal scores at the
# limit are all kept, so the result does not depend on the order of a sort.


def _keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Keep the top_k best tokens; scores [R, V], top_k [R] int64 from 1 to V."""
    best = scores.sort(-1, descending=True).values
    scores.masked_fill_(scores < best.gather(-1, top_k[:, None] - 1), -torch.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of best tokens whose mass reaches top_p [R] float64."""
    best = scores.sort(-1, descending=True).values
    share = best.exp().double() / scores.exp().sum(-1, keepdim=True, dtype=torch.float64)
    is_kept = share.cumsum(-1) - share < top_p[:, None]
    is_kept[:, 0] = True  # the most likely token is always kept
    border = best.masked_fill_(~is_kept, torch.inf).amin(-1, keepdim=True)
    scores.masked_fill_(scores < border, -torch.inf)


def _best_with_noise(scores: Tensor, keys: Tensor) -> Tensor:
    """Return the argmax of scores plus noise, in float64; a tie takes the lower id."""
    vocab_size = scores.shape[1]
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=scores.device)
    candidates = gumbel_noise(keys, tokens).add_(scores).topk(min(_NUM_SETTLED, vocab_size)).indices
    values = exact_noise(keys, candidates.int()).add_(scores.gather(-1, candidates))
    return candidates.masked_fill(values < values.amax(-1, keepdim=True), vocab_size).amin(-1)


def _on(like: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers as a tensor on the device of `like`."""
    return to_device(values, dtype, like.device)
