"""A LayerAttention for tests that is as plain as attention can be: one sequence, K and V kept whole, one mask.

It shares no code with the engine's backends, so it can stand beside them as an oracle.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.runtime.kv_layout import RecurrentSpec, StateSpec
from engine.runtime.layers.parts import Slice


class DenseAttention:
    """Causal attention over everything it has been shown, call by call."""

    paged_step = None
    from_projected = None

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._specs: Any = specs
        self._states: dict[int, _State] = {}
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def recurrent(self, layer: int) -> _State:
        return self._states.setdefault(layer, _State(self._specs[layer]))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self._specs[layer]
        assert q.shape[1:] == (spec.num_heads, spec.head_dim)
        assert k.shape == (q.shape[0], spec.num_kv_heads, spec.head_dim)
        assert v.shape == (*k.shape[:2], spec.out_dim)
        if spec.source is None:
            self._keys[layer] = torch.cat((self._keys[layer], k)) if layer in self._keys else k.clone()
            self._values[layer] = torch.cat((self._values[layer], v)) if layer in self._values else v.clone()
        holder = layer if spec.source is None else spec.source
        keys, values = self._keys[holder], self._values[holder]
        group = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.repeat_interleave(group, 1).float()) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        key_at = torch.arange(len(keys))
        query_at = key_at[-len(q) :, None]
        visible = key_at <= query_at
        if spec.window is not None:
            visible &= key_at > query_at - spec.window
        scores = scores.masked_fill(~visible, float("-inf"))
        if spec.sinks is not None:
            sinks = spec.sinks.float()[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1).float())
        return out.to(q.dtype)


class _State:
    """The state of one sequence, whose chunks have any number of rows."""

    slices = (Slice(0, sys.maxsize, 0, 0),)

    def __init__(self, spec: RecurrentSpec) -> None:
        self._kept = [torch.zeros((kind.num, *kind.shape), dtype=kind.dtype) for kind in spec.pieces]

    def read(self, index: int) -> list[Tensor]:
        return self._kept

    def write(self, index: int, pieces: Sequence[Tensor], *, midway: bool = False) -> None:
        self._kept = [piece.clone() for piece in pieces]
