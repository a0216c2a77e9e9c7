"""Masks tokens in rows of logits by packed bits, 1/32 of the logits' size. Engine thread."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 32  # of a program: 1024 logits


def mask_rows(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Write -inf where a bit is not set; mask i [V / 32, int32] is for row `rows[i]`."""
    vocab_size, num_words = logits.shape[1], masks.shape[1]
    assert logits.is_contiguous()
    assert masks.is_contiguous()
    grid = (len(rows), triton.cdiv(num_words, _WORDS))
    _mask_kernel[grid](logits, rows, masks, vocab_size, num_words, WORDS=_WORDS, num_warps=4)


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, masks_ptr, vocab_size, num_words, WORDS: tl.constexpr):
    """One program for WORDS words of a row's mask."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + index)
    token = tl.program_id(1) * WORDS * 32 + tl.arange(0, WORDS * 32)
    inside = token < vocab_size
    word = tl.load(masks_ptr + index * num_words + token // 32, inside, -1)
    is_ruled_out = ((word >> (token % 32)) & 1) == 0
    ruled_out = tl.full((WORDS * 32,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * vocab_size + token, ruled_out, inside & is_ruled_out)
