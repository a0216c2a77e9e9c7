"""The kernel of grammars' masks, against a plain reading of the bits."""

from __future__ import annotations

import pytest
import torch

from engine.runtime.cuda.mask import mask_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 1024, 2500])
def test_masks_rule_out_what_has_no_bit(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).int()
    before = torch.randn(5, vocab_size, generator=generator)
    before[4, 0] = torch.nan
    rows = torch.tensor([4, 0, 2])
    logits = before.to(DEVICE)
    mask_rows(logits, rows.to(DEVICE), words.to(DEVICE))
    tokens = torch.arange(vocab_size)
    is_allowed = (words.long()[:, tokens // 32] >> tokens % 32 & 1).bool()
    expected = before.clone()
    expected[rows] = before[rows].masked_fill(~is_allowed, -torch.inf)
    torch.testing.assert_close(logits.cpu(), expected, rtol=0, atol=0, equal_nan=True)
