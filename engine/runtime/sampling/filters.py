"""The filters min_p, top_k and top_p, on rows of scores relative to the best.

Each sets the scores it removes to -inf, in place. Equal scores at the limit are all kept, so the result does not depend
on the order of a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_min_p(scores: Tensor, lowest: Tensor) -> None:
    """Keep tokens at least min_p times as likely as the best; lowest is log(min_p)."""
    scores.masked_fill_(scores < lowest[:, None], -torch.inf)


def keep_top_k(scores: Tensor, top_k: Tensor) -> None:
    """Keep the top_k best tokens; scores [R, V], top_k [R] int64 from 1 to V."""
    best = scores.sort(-1, descending=True).values
    scores.masked_fill_(scores < best.gather(-1, top_k[:, None] - 1), -torch.inf)


def keep_top_p(scores: Tensor, top_p: Tensor) -> None:
    """Keep the smallest set of best tokens whose mass reaches top_p [R] float64."""
    best = scores.sort(-1, descending=True).values
    share = best.exp().double() / scores.exp().sum(-1, keepdim=True, dtype=torch.float64)
    is_kept = share.cumsum(-1) - share < top_p[:, None]
    is_kept[:, 0] = True  # the most likely token is always kept
    border = best.masked_fill_(~is_kept, torch.inf).amin(-1, keepdim=True)
    scores.masked_fill_(scores < border, -torch.inf)
