"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash), with its expansion absorbed.

A token's keys and values of all heads are products of matrices W_k and W_v with one latent c; a key has rotated numbers
beside, which all heads share. The pool holds only c and these. A query multiplied by W_k meets the latents themselves:

    q (W_k c) = (q W_k) c        sum p W_v c = W_v (sum p c)

So attention is that of many query heads over one key head, whose values are a part of the keys. Prompts and decode
steps go this way. Engine thread.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.runtime.layers.linear import HeadProducts
from engine.runtime.lora.adapter import AdaptedMatrix
from engine.runtime.models.base import LayerAttention
from engine.runtime.models.config import LatentConfig, ModelConfig
from engine.runtime.models.layers import Angles, LayerAdapters, RMSNorm, addends
from engine.runtime.models.maker import Maker
from engine.runtime.models.rope import rotate
from engine.runtime.native.library import LatentArgs
from engine.runtime.native.ops import NativeHeads
from engine.runtime.schemes.base import Matrix, Scheme

_NORM_EPS = 1e-6  # of the norms of latents, whatever the config's rms_norm_eps


class LatentAttention:
    """Queries, and a latent for each token; attended, expanded, projected."""

    __slots__ = (
        "_group",
        "_index",
        "_is_interleaved",
        "_key_norm",
        "_keys",
        "_nope_dim",
        "_num_heads",
        "_query_norm",
        "_rank",
        "_rope_dim",
        "_value_dim",
        "_values",
        "_widths",
        "args",
        "down",
        "o",
        "queries",
    )

    sinks = None
    args: LatentArgs | None  # the native library's description, if that holds every matrix
    _keys: HeadProducts  # of queries without positions, to the width of a latent
    _values: HeadProducts  # of mixed latents, to values

    def __init__(self, index: int, config: ModelConfig, latent: LatentConfig, make: Maker) -> None:
        self._index, self._num_heads, self._group = index, config.num_heads, make.group
        self._rank, self._rope_dim, self._nope_dim = latent.rank, latent.rope_dim, latent.nope_dim
        self._value_dim, self._is_interleaved = latent.value_dim, latent.is_interleaved
        hidden, width = config.hidden_size, config.num_heads * (latent.nope_dim + latent.rope_dim)
        rank, row = latent.query_rank, latent.rank + latent.rope_dim
        norms = replace(config, norm_eps=_NORM_EPS)
        self._widths = (width if rank is None else rank, row)
        first = {"q_proj": width} if rank is None else {"q_a_proj": rank}
        rows = {**first, "kv_a_proj_with_mqa": row}
        self.down = make.linear(rows, hidden, bias=config.qkv_bias, place=AdaptedMatrix.QKV)
        self._query_norm = None if rank is None else RMSNorm(make, "q_a_layernorm", rank, norms)
        self.queries = None if rank is None else make.linear({"q_b_proj": width}, rank, place=AdaptedMatrix.Q_B)
        self._key_norm = RMSNorm(make, "kv_a_layernorm", latent.rank, norms)
        heads = config.num_heads
        if latent.has_split_kv:
            make.matrix("k_b_proj", heads * latent.rank, latent.nope_dim, partial(self._take_keys, make.scheme))
            make.matrix("v_b_proj", heads * latent.value_dim, latent.rank, partial(self._take_values, make.scheme))
        else:
            expanded = heads * (latent.nope_dim + latent.value_dim)
            make.matrix("kv_b_proj", expanded, latent.rank, partial(self._take_both, make.scheme))
        self.o = make.linear(
            {"o_proj": hidden}, config.num_heads * latent.value_dim, bias=config.o_bias, place=AdaptedMatrix.O
        )

    def _take_both(self, scheme: Scheme, matrix: Matrix) -> None:
        """Keep kv_b_proj: a head's rows are its keys', then its values'.

        Queries are multiplied by the transposed keys, whose codes no scheme has, so both parts are floats again.
        """
        heads = scheme.dense(matrix).unflatten(0, (self._num_heads, -1))
        keys, values = heads.split((self._nope_dim, self._value_dim), 1)
        keys, values = keys.mT.flatten(0, 1), values.flatten(0, 1)
        self._take_keys(scheme, replace(matrix, bundles=(), shape=keys.shape, dense=keys))
        self._take_values(scheme, replace(matrix, bundles=(), shape=values.shape, dense=values))

    def _take_keys(self, scheme: Scheme, matrix: Matrix) -> None:
        """Keep k_b_proj of GGUF files: a head has a row for each number of the latent."""
        self._keys = scheme.heads(matrix, self._num_heads)

    def _take_values(self, scheme: Scheme, matrix: Matrix) -> None:
        self._values = scheme.heads(matrix, self._num_heads)

    def finish(self) -> None:
        """Describe the loaded layer to the native library, if that holds every matrix."""
        queries = None if self.queries is None else self.queries.args
        has_queries = queries is not None or self.queries is None
        self.args = None
        if has_queries and isinstance(self._keys, NativeHeads) and isinstance(self._values, NativeHeads):
            args = LatentArgs(keys=self._keys.address, values=self._values.address, eps=_NORM_EPS)
            args.rank, args.nope_dim, args.rope_dim = self._rank, self._nope_dim, self._rope_dim
            args.is_interleaved = self._is_interleaved
            if queries is not None:
                args.queries = queries
            self.args = args

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of both latents, of queries and of keys."""
        return (None if self._query_norm is None else self._query_norm.weight), self._key_norm.weight

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, hidden]; `angles` from Rotary."""
        assert angles is not None, "a family with latents has positions in every layer"
        first, row = self.down(x, addends(adapters, AdaptedMatrix.QKV, x)).split(self._widths, 1)
        if self.queries is not None and self._query_norm is not None:
            normed = self._query_norm(first.contiguous())
            first = self.queries(normed, addends(adapters, AdaptedMatrix.Q_B, normed))
        q = first.unflatten(1, (self._num_heads, -1))
        turned = self._rotate(q[..., self._nope_dim :], row[:, self._rank :], angles)

        num_tokens = len(x)
        queries = x.new_empty(num_tokens, self._num_heads, self._rank + self._rope_dim)
        self._keys(q[..., : self._nope_dim], queries[..., : self._rank])
        queries[..., self._rank :] = turned[:, :-1]
        keys = x.new_empty(num_tokens, 1, self._rank + self._rope_dim)
        keys[:, 0, : self._rank] = self._key_norm(row[:, : self._rank].contiguous())
        keys[..., self._rank :] = turned[:, -1:]

        mixed = attention(self._index, queries, keys, keys[..., : self._rank])
        values = x.new_empty(num_tokens, self._num_heads, self._value_dim)
        self._values(mixed, values)
        out = values.flatten(1)
        y = self.o(out, addends(adapters, AdaptedMatrix.O, out))
        self._group.all_reduce(y)
        return y

    def _rotate(self, q: Tensor, k: Tensor, angles: Angles) -> Tensor:
        """Return q [T, heads, rope_dim] and, as one more head, k [T, rope_dim], rotated.

        Interleaved pairs become halves. Scores do not change, for queries and keys are reordered alike.
        """
        both = torch.cat((q, k[:, None]), 1)
        if self._is_interleaved:
            both = both.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return rotate(both, *angles)
