"""The parts of a decoder layer over a flat token batch: norm, attention, MLP, embedding.

Plain objects that hold tensors; the engine thread calls them. Each part names its tensors by the checkpoint's keys
(`tensors`), as views into the merged weights, so loading is one copy. A torch call costs about 5 us on a CPU and there
are thirty layers, so the code makes few calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.attention.base import Rotation
from engine.runtime.linear import FP8_MULTIPLE, Addend, Linear, Quantization
from engine.runtime.lora.adapter import Place
from engine.runtime.models.base import LayerAttention
from engine.runtime.models.config import ModelConfig, QKNorm
from engine.runtime.models.rope import rotate
from engine.runtime.ops import add_rms_norm
from engine.runtime.weights.checkpoint import Keep

Named = Iterator[tuple[str, Tensor]]
Angles = tuple[Tensor, Tensor]
# The terms that a step's adapters add to the product of x with a matrix of one layer.
LayerAdapters = Callable[[Place, Tensor], Sequence[Addend]]


class Maker(NamedTuple):
    """The device and type of new weights."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = Quantization.NONE  # of linears; fp8 where their dimensions allow it

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def linear(self, inputs: int, outputs: int, *, bias: bool, activation: Activation | None = None) -> Linear:
        has_sides = inputs % FP8_MULTIPLE == outputs % FP8_MULTIPLE == 0
        is_fp8 = self.quantization is Quantization.FP8 and has_sides
        weight = self.empty(outputs, inputs, dtype=torch.float8_e4m3fn if is_fp8 else None)
        added = self.empty(outputs) if bias else None
        return Linear(weight, added, quantization=self.quantization, activation=activation)


class Matrix(NamedTuple):
    """A linear, and the checkpoint names of its parts, one for each entry of `rows`."""

    linear: Linear
    names: Sequence[str]
    rows: Sequence[int] = ()

    def tensors(self) -> Named:
        """Return the parts, as views to fill."""
        for name, first_row, num_rows in self.parts():
            yield f"{name}.weight", self.linear.weight.narrow(0, first_row, num_rows)
            if self.linear.bias is not None:
                yield f"{name}.bias", self.linear.bias.narrow(0, first_row, num_rows)

    def keepers(self) -> Iterator[tuple[str, Keep]]:
        """Return the sinks of parts that keep their file's format."""
        for name, first_row, _ in self.parts():
            yield f"{name}.weight", partial(self.linear.keep, first_row)

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, first row and number of rows of each part."""
        rows = self.rows if len(self.names) > 1 else self.linear.shape[:1]
        yield from zip(self.names, accumulate(rows, initial=0), rows, strict=False)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 and rounded once.

    With `offset` the scale is 1 + weight and stays in float32, as Gemma needs it.
    """

    __slots__ = ("_eps", "_offset", "weight")

    def __init__(self, size: int, eps: float, make: Maker, *, offset: bool) -> None:
        self.weight = make.empty(size, dtype=torch.float32 if offset else None)
        self._eps = eps
        self._offset = offset

    def finish(self) -> None:
        """Fold in the offset after loading."""
        if self._offset:
            self.weight.add_(1.0)

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
        self.q = RMSNorm(config.head_dim, config.norm_eps, make, offset=config.norm_offset)
        self.k = RMSNorm(config.head_dim, config.norm_eps, make, offset=config.norm_offset)
        self.eps = config.norm_eps
        self._offset = config.norm_offset
        self._heads = (config.num_heads, config.num_kv_heads)
        self._scale = self.q.weight

    def finish(self) -> None:
        self.q.finish()
        self.k.finish()
        num_heads, num_kv_heads = self._heads
        self._scale = torch.cat((self.q.weight.expand(num_heads, -1), self.k.weight.expand(num_kv_heads, -1)))

    def __call__(self, qk: Tensor) -> Tensor:
        x = qk.float() if self._offset else qk
        return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self._scale).to(qk.dtype)


class FullNorm:
    """RMSNorm of all query heads as one vector, and of all key heads as another."""

    __slots__ = ("_num_heads", "k", "q")

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self._num_heads = config.num_heads
        self.q = RMSNorm(config.num_heads * config.head_dim, config.norm_eps, make, offset=config.norm_offset)
        self.k = RMSNorm(config.num_kv_heads * config.head_dim, config.norm_eps, make, offset=config.norm_offset)

    def finish(self) -> None:
        self.q.finish()
        self.k.finish()

    def __call__(self, qk: Tensor) -> Tensor:
        flat = qk.flatten(1)
        split = self._num_heads * qk.shape[-1]
        return torch.cat((self.q(flat[:, :split]), self.k(flat[:, split:])), 1).view(qk.shape)


def _addends(adapters: LayerAdapters | None, place: Place, x: Tensor) -> Sequence[Addend]:
    return () if adapters is None else adapters(place, x)


_QK_NORMS: Mapping[QKNorm, Callable[[ModelConfig, Maker], HeadNorm | FullNorm]] = {
    QKNorm.HEAD: HeadNorm,
    QKNorm.FULL: FullNorm,
}


class Attention:
    """Queries, keys and values from one matrix, rotated, attended, projected."""

    __slots__ = ("_heads", "_index", "_merged", "_norm", "_num_heads", "_shape", "o", "qkv")

    def __init__(self, index: int, config: ModelConfig, make: Maker) -> None:
        self._index = index
        self._num_heads = config.num_heads
        self._heads = config.num_heads + config.num_kv_heads  # the heads that are normalised and rotated
        self._shape = (-1, self._heads + config.num_kv_heads, config.head_dim)
        self._merged = config.merged_checkpoint
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.qkv = make.linear(config.hidden_size, width + 2 * kv_width, bias=config.qkv_bias)
        self.o = make.linear(width, config.hidden_size, bias=config.o_bias)
        self._norm = None if config.qk_norm is QKNorm.NONE else _QK_NORMS[config.qk_norm](config, make)

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, hidden]; `angles` from Rotary, None without positions.

        The tensors that `attention` gets are views into wider rows: a token's heads are contiguous, tokens are not.
        """
        qkv = self.qkv(x, _addends(adapters, Place.QKV, x)).view(self._shape)
        if attention.from_projected is not None:
            out = attention.from_projected(self._index, self._norm_whole(qkv), self._rotation(angles))
            return self._project(out.flatten(1), adapters)
        qk = qkv[:, : self._heads]
        if self._norm is not None:
            qk = self._norm(qk)
        if angles is not None:
            qk = rotate(qk, *angles)
        out = attention(self._index, qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, self._heads :])
        return self._project(out.flatten(1), adapters)

    def _project(self, x: Tensor, adapters: LayerAdapters | None) -> Tensor:
        return self.o(x, _addends(adapters, Place.O, x))

    def _norm_whole(self, qkv: Tensor) -> Tensor:
        """Apply, in place, the norms that a Rotation does not cover."""
        if isinstance(self._norm, FullNorm):
            qk = qkv[:, : self._heads]
            qk.copy_(self._norm(qk))
        return qkv

    def _rotation(self, angles: Angles | None) -> Rotation:
        if isinstance(self._norm, HeadNorm):
            return Rotation((self._norm.q.weight, self._norm.k.weight), self._norm.eps, angles)
        return Rotation(None, 0.0, angles)

    def tensors(self) -> Named:
        for matrix in self.matrices():
            yield from matrix.tensors()
        if self._norm is not None:
            yield "q_norm.weight", self._norm.q.weight
            yield "k_norm.weight", self._norm.k.weight

    def matrices(self) -> Iterator[Matrix]:
        head_dim = self._shape[2]
        rows = [self._num_heads * head_dim] + [(self._heads - self._num_heads) * head_dim] * 2
        yield Matrix(self.qkv, ("qkv_proj",) if self._merged else ("q_proj", "k_proj", "v_proj"), rows)
        yield Matrix(self.o, ("o_proj",))

    def finish(self) -> None:
        self.qkv.pack()
        self.o.pack()
        if self._norm is not None:
            self._norm.finish()

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of queries and keys."""
        return (None, None) if self._norm is None else (self._norm.q.weight, self._norm.k.weight)


class MLP:
    """down(act(gate x) * up x), gate and up from one matrix."""

    __slots__ = ("_merged", "_width", "down", "gate_up")

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self._merged = config.merged_checkpoint
        self._width = config.intermediate_size
        self.gate_up = make.linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, activation=config.activation
        )
        self.down = make.linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        inner = self.gate_up(x, _addends(adapters, Place.GATE_UP, x))
        return self.down(inner, _addends(adapters, Place.DOWN, inner))

    def tensors(self) -> Named:
        for matrix in self.matrices():
            yield from matrix.tensors()

    def matrices(self) -> Iterator[Matrix]:
        names = ("gate_up_proj",) if self._merged else ("gate_proj", "up_proj")
        yield Matrix(self.gate_up, names, [self._width] * 2)
        yield Matrix(self.down, ("down_proj",))

    def finish(self) -> None:
        self.gate_up.pack()
        self.down.pack()
