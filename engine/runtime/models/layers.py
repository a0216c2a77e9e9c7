"""The parts of a decoder layer over a flat token batch: norm, attention, MLP.

Plain objects that hold tensors; the engine thread calls them. A Maker (maker.py) makes the tensors, and loads them. A
torch call costs about 5 us on a CPU and there are thirty layers, so the code makes few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.attention.base import Rotation
from engine.runtime.layers.linear import Addend
from engine.runtime.layers.ops import add_rms_norm
from engine.runtime.lora.adapter import AdaptedMatrix
from engine.runtime.models.base import LayerAttention
from engine.runtime.models.config import ModelConfig, QKNorm
from engine.runtime.models.fill import Load
from engine.runtime.models.maker import Maker
from engine.runtime.models.rope import rotate
from engine.runtime.models.shards import Shards

Angles = tuple[Tensor, Tensor]
# The terms that a step's adapters add to the product of x with a matrix of one layer.
LayerAdapters = Callable[[AdaptedMatrix, Tensor], Sequence[Addend]]


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 and rounded once.

    With `offset` the scale is 1 + weight and stays in float32, as Gemma needs it.
    """

    __slots__ = ("_eps", "weight")

    def __init__(self, make: Maker, name: str, size: int, config: ModelConfig) -> None:
        self.weight = make.tensor(f"{name}.weight", size, dtype=torch.float32 if config.norm_offset else None)
        self._eps = config.norm_eps
        if config.norm_offset:
            make.loads.append(Load({}, lambda _: self.weight.add_(1.0)))

    def __call__(self, x: Tensor) -> Tensor:
        return add_rms_norm(x, None, self.weight, self._eps)

    def add(self, x: Tensor, delta: Tensor | None, scale: float) -> Tensor:
        """x += scale * delta, in place, unless delta is None; then the norm of x."""
        return add_rms_norm(x, delta, self.weight, self._eps, scale)


class NoNorm:
    """A norm that does nothing."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, delta: Tensor | None, scale: float) -> Tensor:
        """x += scale * delta, in place, unless delta is None; returns x itself."""
        return x if delta is None else x.add_(delta, alpha=scale)


class HeadNorm:
    """RMSNorm of every query and key head, in one pass over [T, heads, head_dim]."""

    __slots__ = ("_heads", "_offset", "_scale", "eps", "k", "q")

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self.q, self.k = (RMSNorm(make, name, config.head_dim, config) for name in ("q_norm", "k_norm"))
        self.eps = config.norm_eps
        self._offset = config.norm_offset
        self._heads = (config.num_heads, config.num_kv_heads)
        make.loads.append(Load({}, self._join))

    def _join(self, _: object) -> None:
        num_heads, num_kv_heads = self._heads
        self._scale = torch.cat((self.q.weight.expand(num_heads, -1), self.k.weight.expand(num_kv_heads, -1)))

    def __call__(self, qk: Tensor) -> Tensor:
        x = qk.float() if self._offset else qk
        return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self._scale).to(qk.dtype)


class FullNorm:
    """RMSNorm of all query heads as one vector, and of all key heads as another."""

    __slots__ = ("_eps", "_num_heads", "_shards", "k", "q")

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self._num_heads, self._shards, self._eps = config.num_heads, make.shards, config.norm_eps
        self.q = RMSNorm(make, "q_norm", config.num_heads * config.head_dim, config)
        self.k = RMSNorm(make, "k_norm", config.num_kv_heads * config.head_dim, config)

    def __call__(self, qk: Tensor) -> Tensor:
        flat = qk.flatten(1)
        split = self._num_heads * qk.shape[-1]
        if self._shards is not None:
            return self._over_ranks(self._shards, flat.float(), split).view(qk.shape).to(qk.dtype)
        return torch.cat((self.q(flat[:, :split]), self.k(flat[:, split:])), 1).view(qk.shape)

    def _over_ranks(self, shards: Shards, flat: Tensor, split: int) -> Tensor:
        """Return the norms of float32 [T, width], whose squares are summed over all ranks."""
        parts = flat[:, :split], flat[:, split:]
        sums = torch.stack([part.square().sum(1) for part in parts])
        shards.group.all_reduce(sums)
        scales = [(one / width + self._eps).rsqrt() for one, width in zip(sums, shards.full_norm_widths, strict=True)]
        weights = self.q.weight.float(), self.k.weight.float()
        return torch.cat([p * s[:, None] * w for p, s, w in zip(parts, scales, weights, strict=True)], 1)


def addends(adapters: LayerAdapters | None, place: AdaptedMatrix, x: Tensor) -> Sequence[Addend]:
    """Return the terms that adapters add to the product of x with the matrix at a place."""
    return () if adapters is None else adapters(place, x)


_QK_NORMS: Mapping[QKNorm, Callable[[ModelConfig, Maker], HeadNorm | FullNorm]] = {
    QKNorm.HEAD: HeadNorm,
    QKNorm.FULL: FullNorm,
}


class Attention:
    """Queries, keys and values from one matrix, rotated, attended, projected."""

    __slots__ = ("_clip", "_group", "_heads", "_index", "_norm", "_num_heads", "_shape", "o", "qkv", "sinks")

    def __init__(self, index: int, config: ModelConfig, make: Maker, *, num_inputs: int | None = None) -> None:
        """`num_inputs` is the width of x, if it is not the hidden size."""
        self._index = index
        self._num_heads = config.num_heads
        self._heads = config.num_heads + config.num_kv_heads  # the heads that are normalised and rotated
        self._shape = (-1, self._heads + config.num_kv_heads, config.head_dim)
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        if config.merged_checkpoint:
            rows = {"qkv_proj": sum(rows.values())}
        self.qkv = make.linear(rows, num_inputs or config.hidden_size, bias=config.qkv_bias, place=AdaptedMatrix.QKV)
        self.o = make.linear({"o_proj": config.hidden_size}, width, bias=config.o_bias, place=AdaptedMatrix.O)
        self._norm = None if config.qk_norm is QKNorm.NONE else _QK_NORMS[config.qk_norm](config, make)
        self._clip, self._group = config.qkv_clip, make.group
        self.sinks = make.tensor("sinks", config.num_heads, dtype=torch.float32) if config.has_sinks else None

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, inputs]; `angles` from Rotary, None without positions.

        The tensors that `attention` gets are views into wider rows: a token's heads are contiguous, tokens are not.
        """
        qkv = self.qkv(x, addends(adapters, AdaptedMatrix.QKV, x)).view(self._shape)
        qk = qkv[:, : self._heads]
        if isinstance(self._norm, FullNorm):
            qk.copy_(self._norm(qk))
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        if attention.from_projected is not None:
            out = attention.from_projected(self._index, qkv, self._rotation(angles))
            return self._project(out.flatten(1), adapters)
        if isinstance(self._norm, HeadNorm):
            qk = self._norm(qk)
        if angles is not None:
            qk = rotate(qk, *angles)
        out = attention(self._index, qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, self._heads :])
        return self._project(out.flatten(1), adapters)

    def _project(self, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
        y = self.o(x, addends(adapters, AdaptedMatrix.O, x))
        self._group.all_reduce(y)
        return y

    def _rotation(self, angles: Angles | None) -> Rotation:
        if isinstance(self._norm, HeadNorm):
            return Rotation((self._norm.q.weight, self._norm.k.weight), self._norm.eps, angles)
        return Rotation(None, 0.0, angles)

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of queries and keys."""
        return (None, None) if self._norm is None else (self._norm.q.weight, self._norm.k.weight)


class MLP:
    """down(act(gate x) * up x), gate and up from one matrix."""

    __slots__ = ("_group", "down", "gate_up")

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        rows = {"gate_up_proj": 2 * width} if config.merged_checkpoint else {"gate_proj": width, "up_proj": width}
        self.gate_up = make.linear(rows, hidden, bias=bias, activation=config.activation, place=AdaptedMatrix.GATE_UP)
        self.down = make.linear({"down_proj": hidden}, width, bias=bias, place=AdaptedMatrix.DOWN)
        self._group = make.group

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        inner = self.gate_up(x, addends(adapters, AdaptedMatrix.GATE_UP, x))
        y = self.down(inner, addends(adapters, AdaptedMatrix.DOWN, inner))
        self._group.all_reduce(y)
        return y
