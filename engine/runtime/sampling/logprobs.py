"""Log probabilities of chosen tokens and the best alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.types import TokenLogprob


class Logprobs(NamedTuple):
    """For R rows: the chosen token's, and the k best, best first."""

    chosen: Tensor  # [R] int64
    values: Tensor  # [R] float32
    ranks: Tensor  # [R] int64, from 1
    top_ids: Tensor  # [R, k] int64
    top_values: Tensor  # [R, k] float32

    def to_types(self, num_top: Sequence[int]) -> list[TokenLogprob]:
        """Return plain numbers, `num_top[r]` alternatives for row r; tensors on the host."""
        columns = zip(*(tensor.tolist() for tensor in self), num_top, strict=True)
        return [
            TokenLogprob(chosen, value, rank, tuple(zip(ids[:num], values[:num], strict=True)))
            for chosen, value, rank, ids, values, num in columns
        ]


def gather_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> Logprobs:
    """Return the log probabilities of logits [R, V] float32 for chosen [R] int64."""
    logprobs = torch.log_softmax(logits, dim=-1)
    values = logprobs.gather(-1, chosen[:, None])
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    ranks = (logprobs > values).sum(-1) + 1
    return Logprobs(chosen, values[:, 0], ranks, top.indices, top.values)
