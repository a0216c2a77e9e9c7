"""Rotary position embeddings: the cos and sin of a step, and the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runtime.layers.rope_config import Frequencies, RopeConfig
from engine.runtime.native.ops import rotate_heads


class Rotary:
    """cos and sin of a step's positions, ready for `rotate`."""

    def __init__(self, config: RopeConfig, served_len: int, *, dtype: torch.dtype, device: torch.device) -> None:
        inverse, magnitude, axes = config.frequencies(served_len)
        signs = torch.full((config.dim,), magnitude)
        signs[: config.dim // 2] = -magnitude
        self._inverse = torch.cat((inverse, inverse)).to(device)
        self._signs = signs.to(device)
        self._axes = None if axes is None else axes.to(device)
        self._magnitude = magnitude
        self._dtype = dtype

    @property
    def frequencies(self) -> Frequencies:
        """Return the frequencies of each pair of dimensions."""
        return Frequencies(self._inverse[: len(self._inverse) // 2], self._magnitude, self._axes)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of positions [T], or [3, T] of three axes, each [T, dim] in the model's dtype."""
        by_token = positions.float()[:, None]
        if positions.dim() > 1:
            assert self._axes is not None, "only what turns in three axes has positions in them"
            by_token = positions.T.float().index_select(1, self._axes.repeat(2))
        angles = by_token * self._inverse
        return (angles.cos() * self._magnitude).to(self._dtype), (angles.sin() * self._signs).to(self._dtype)


class Rotaries:
    """The rotary embeddings of a model's layers, of which equal ones are computed once."""

    def __init__(
        self, ropes: Sequence[RopeConfig | None], served_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`ropes` are of each layer; None: it has no positions."""
        distinct = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._rotaries = [Rotary(rope, served_len, dtype=dtype, device=device) for rope in distinct]
        # The index of each layer's, or -1, as the native library has it.
        self.of_layers = [-1 if rope is None else distinct.index(rope) for rope in ropes]

    @property
    def frequencies(self) -> list[Frequencies]:
        """Return the frequencies of each, for the native library."""
        return [rotary.frequencies for rotary in self._rotaries]

    def __call__(self, positions: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return the cos and signed sin of each layer."""
        angles = [*(rotary(positions) for rotary in self._rotaries), None]
        return [angles[index] for index in self.of_layers]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the first `dim` dimensions of each head of x [T, heads, head_dim].

    x may be overwritten. `signed_sin` contains the sign of the negated half, which leaves three operations.
    """
    if x.device.type == "cpu":
        rotate_heads(x, cos, signed_sin)
        return x
    dim, cos, signed_sin = cos.shape[-1], cos[:, None], signed_sin[:, None]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), signed_sin)
    part = x[..., :dim]
    part.copy_(torch.addcmul(part * cos, part.roll(dim // 2, -1), signed_sin))
    return x
