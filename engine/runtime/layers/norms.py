"""Norms of a layer: around its parts, and of the heads of queries and keys.

A torch call costs about 5 us on a CPU and there are thirty layers, so the code makes few calls.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.cuda.available import uses_triton
from engine.runtime.layers.model_config import HeadsConfig, ModelConfig
from engine.runtime.layers.parts import Load, Maker
from engine.runtime.layers.shards import Shards, colwise
from engine.runtime.native import ops as native


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, alpha: float = 1.0) -> Tensor:
    """Add alpha * delta to residual [T, width] in place; return its RMSNorm times weight."""
    if uses_triton(residual):
        from engine.runtime.cuda import norm

        return norm.add_rms_norm(residual, delta, weight, eps, alpha)
    return native.add_rms_norm(residual, delta, weight, eps, alpha)


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 and rounded once.

    With an offset the scale is 1 + weight and stays in float32, as Gemma needs it.
    """

    def __init__(self, make: Maker, name: str, size: int, config: ModelConfig) -> None:
        self.weight = make.tensor(f"{name}.weight", size, dtype=torch.float32 if _is_wide(config) else None)
        self._eps = config.norm_eps
        if config.norm_offset:
            make.loads.append(Load({}, lambda _: self.weight.add_(1.0)))

    def __call__(self, x: Tensor) -> Tensor:
        return add_rms_norm(x, None, self.weight, self._eps)

    def add(self, x: Tensor, delta: Tensor | None, scale: float) -> Tensor:
        """x += scale * delta, in place, unless delta is None; then the norm of x."""
        return add_rms_norm(x, delta, self.weight, self._eps, scale)


def _is_wide(config: ModelConfig) -> bool:
    return config.norm_offset or config.wide_norms


class NoNorm:
    """A norm that does nothing."""

    weight = None

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, delta: Tensor | None, scale: float) -> Tensor:
        """x += scale * delta, in place, unless delta is None; returns x itself."""
        return x if delta is None else x.add_(delta, alpha=scale)


class HeadNorm:
    """RMSNorm of every query and key head, in one pass over [T, heads, head_dim]; without key heads of queries alone."""

    def __init__(self, config: ModelConfig, heads: HeadsConfig, make: Maker) -> None:
        self.q = self.k = RMSNorm(make, "q_norm", heads.head_dim, config)
        if heads.num_kv_heads:
            self.k = RMSNorm(make, "k_norm", heads.head_dim, config)
        self.eps = config.norm_eps
        self._is_wide = _is_wide(config)
        self._heads = (heads.num_heads, heads.num_kv_heads)
        make.loads.append(Load({}, self._join))

    def _join(self, _: object) -> None:
        num_heads, num_kv_heads = self._heads
        self._scale = torch.cat((self.q.weight.expand(num_heads, -1), self.k.weight.expand(num_kv_heads, -1)))

    def __call__(self, qk: Tensor) -> Tensor:
        x = qk.float() if self._is_wide else qk
        return F.rms_norm(x, x.shape[-1:], None, self.eps).mul_(self._scale).to(qk.dtype)


class FullNorm:
    """RMSNorm of all query heads as one vector, and of all key heads as another."""

    def __init__(self, config: ModelConfig, heads: HeadsConfig, make: Maker) -> None:
        make = make._replace(plan={"q_norm": colwise("heads"), "k_norm": colwise("kv_heads")})
        self._num_heads, self._shards, self._eps = heads.num_heads, make.shards, config.norm_eps
        self.q = RMSNorm(make, "q_norm", heads.num_heads * heads.head_dim, config)
        self.k = RMSNorm(make, "k_norm", heads.num_kv_heads * heads.head_dim, config)

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
