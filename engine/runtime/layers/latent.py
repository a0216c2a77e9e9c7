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

from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerAttention, Maker, adapted, summed
from engine.runtime.layers.rope import rotate
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import LinearArgs, PartArgs
from engine.runtime.native.ops import NativeHeads
from engine.runtime.native.parts import describe_part, norm_args, scores_args
from engine.runtime.native.structs import structure
from engine.runtime.schemes.linear import HeadProducts, Matrix, Scheme

_NORM_EPS = 1e-6  # of the norms of latents, whatever the config's rms_norm_eps


_PLAN: Plan = {  # latents are replicated
    "q_proj": colwise("heads"),
    "q_b_proj": colwise("heads"),
    "kv_b_proj": colwise("heads"),
    "k_b_proj": colwise("heads"),
    "v_b_proj": colwise("heads"),
    "o_proj": rowwise("heads"),
}
LatentArgs = structure("latent")  # what the native library needs beside the first matrix and the last


class LatentAttention:
    """Queries, and a latent for each token; attended, expanded, projected."""

    _keys: HeadProducts  # of queries without positions, to the width of a latent
    _values: HeadProducts  # of mixed latents, to values

    def __init__(self, config: ModelConfig, layer: int, make: Maker, state: int) -> None:
        heads = config.layers[layer].heads
        latent, num_heads, make = heads.latent, heads.num_heads, make.within("self_attn", plan=_PLAN)
        assert latent is not None, "the family has sizes of latents"
        self._state, self._num_heads, self._group = state, num_heads, make.group
        self._rank, self._rope_dim, self._nope_dim = latent.rank, latent.rope_dim, latent.nope_dim
        self._value_dim, self._is_interleaved = latent.value_dim, latent.is_interleaved
        hidden, width = config.hidden_size, num_heads * (latent.nope_dim + latent.rope_dim)
        rank, row = latent.query_rank, latent.rank + latent.rope_dim
        norms = replace(config, norm_eps=_NORM_EPS)
        self._widths = (width if rank is None else rank, row)
        first = {"q_proj": width} if rank is None else {"q_a_proj": rank}
        rows = {**first, "kv_a_proj_with_mqa": row}
        self._down = make.linear(rows, hidden, bias=config.qkv_bias, place=AdaptedMatrix.QKV)
        self._query_norm = None if rank is None else RMSNorm(make, "q_a_layernorm", rank, norms)
        self._queries = None if rank is None else make.linear({"q_b_proj": width}, rank, place=AdaptedMatrix.Q_B)
        self._key_norm = RMSNorm(make, "kv_a_layernorm", latent.rank, norms)
        if latent.has_split_kv:
            make.matrix("k_b_proj", num_heads * latent.rank, latent.nope_dim, partial(self._take_keys, make.scheme))
            make.matrix("v_b_proj", num_heads * latent.value_dim, latent.rank, partial(self._take_values, make.scheme))
        else:
            expanded = num_heads * (latent.nope_dim + latent.value_dim)
            make.matrix("kv_b_proj", expanded, latent.rank, partial(self._take_both, make.scheme))
        self._o = make.linear(
            {"o_proj": hidden}, num_heads * latent.value_dim, bias=config.o_bias, place=AdaptedMatrix.O
        )
        self.states = (
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=1,
                head_dim=row,
                scale=config.attention_scale or heads.head_dim**-0.5,
                window=config.layers[layer].window,
                softcap=config.attention_softcap,
                value_dim=latent.rank,
            ),
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

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, hidden]; `angles` from Rotary."""
        mixed = self.attend(x, angles, attention, adapters)
        values = x.new_empty(len(x), self._num_heads, self._value_dim)
        self._values(mixed, values)
        return summed(self._o, AdaptedMatrix.O, values.flatten(1), adapters, self._group)

    def attend(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Store the latents; return the mixed ones of all heads [T, heads, rank]."""
        assert angles is not None, "a family with latents has positions in every layer"
        first, row = adapted(self._down, AdaptedMatrix.QKV, x, adapters).split(self._widths, 1)
        if self._queries is not None and self._query_norm is not None:
            first = adapted(self._queries, AdaptedMatrix.Q_B, self._query_norm(first.contiguous()), adapters)
        q = first.unflatten(1, (self._num_heads, -1))
        turned = self._rotate(q[..., self._nope_dim :], row[:, self._rank :], angles)

        num_tokens = len(x)
        queries = x.new_empty(num_tokens, self._num_heads, self._rank + self._rope_dim)
        self._keys(q[..., : self._nope_dim], queries[..., : self._rank])
        queries[..., self._rank :] = turned[:, :-1]
        keys = x.new_empty(num_tokens, 1, self._rank + self._rope_dim)
        keys[:, 0, : self._rank] = self._key_norm(row[:, : self._rank].contiguous())
        keys[..., self._rank :] = turned[:, -1:]

        return attention(self._state, queries, keys, keys[..., : self._rank])

    def describe(self) -> PartArgs | None:
        queries = LinearArgs() if self._queries is None else self._queries.args
        if queries is None or not (isinstance(self._keys, NativeHeads) and isinstance(self._values, NativeHeads)):
            return None
        self._args = LatentArgs(  # C keeps its address
            scores=scores_args(self.states[0]),
            queries=queries,
            keys=self._keys.address,
            values=self._values.address,
            rank=self._rank,
            nope_dim=self._nope_dim,
            rope_dim=self._rope_dim,
            is_interleaved=self._is_interleaved,
            q=norm_args(None if self._query_norm is None else self._query_norm.weight),
            k=norm_args(self._key_norm.weight),
            eps=_NORM_EPS,
        )
        return describe_part("latent", (self._down.args, self._o.args), self._args)

    def _rotate(self, q: Tensor, k: Tensor, angles: Angles) -> Tensor:
        """Return q [T, heads, rope_dim] and, as one more head, k [T, rope_dim], rotated.

        Interleaved pairs become halves. Scores do not change, for queries and keys are reordered alike.
        """
        both = torch.cat((q, k[:, None]), 1)
        if self._is_interleaved:
            both = both.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return rotate(both, *angles)
