"""Multi-head latent attention (DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash), with its expansion absorbed.

A token's keys and values of all heads are products of matrices W_k and W_v with one latent c; a key has rotated numbers
beside, which all heads share. The pool holds only c and these. A query multiplied by W_k meets the latents themselves:

    q (W_k c) = (q W_k) c        sum p W_v c = W_v (sum p c)

So attention is that of many query heads over one key head, whose values are a part of the keys. Prompts and decode
steps go this way. Engine thread.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.runtime.linear import HeadProducts, pack_heads
from engine.runtime.lora.adapter import Place
from engine.runtime.models.base import LayerAttention
from engine.runtime.models.config import LatentConfig, ModelConfig
from engine.runtime.models.layers import Angles, LayerAdapters, RMSNorm
from engine.runtime.models.maker import Maker
from engine.runtime.models.rope import rotate

_NORM_EPS = 1e-6  # of the norms of latents, whatever the config's rms_norm_eps


class LatentAttention:
    """Queries, and a latent for each token; attended, expanded, projected."""

    __slots__ = (
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
        "down",
        "o",
        "queries",
    )

    sinks = None
    _keys: HeadProducts  # of queries without positions, to the width of a latent
    _values: HeadProducts  # of mixed latents, to values

    def __init__(self, index: int, config: ModelConfig, latent: LatentConfig, make: Maker) -> None:
        self._index, self._num_heads = index, config.num_heads
        self._rank, self._rope_dim, self._nope_dim = latent.rank, latent.rope_dim, latent.nope_dim
        self._value_dim, self._is_interleaved = latent.value_dim, latent.is_interleaved
        hidden, width = config.hidden_size, config.num_heads * (latent.nope_dim + latent.rope_dim)
        rank, row = latent.query_rank, latent.rank + latent.rope_dim
        norms = replace(config, norm_eps=_NORM_EPS)
        self._widths = (width if rank is None else rank, row)
        first = {"q_proj": width} if rank is None else {"q_a_proj": rank}
        self.down = make.linear({**first, "kv_a_proj_with_mqa": row}, hidden, bias=config.qkv_bias)
        self._query_norm = None if rank is None else RMSNorm(make, "q_a_layernorm", rank, norms)
        self.queries = None if rank is None else make.linear({"q_b_proj": width}, rank)
        self._key_norm = RMSNorm(make, "kv_a_layernorm", latent.rank, norms)
        if latent.has_split_kv:
            make.weight("k_b_proj", config.num_heads * latent.rank, latent.nope_dim, self._take_keys)
            make.weight("v_b_proj", config.num_heads * latent.value_dim, latent.rank, self._take_values)
        else:
            expanded = config.num_heads * (latent.nope_dim + latent.value_dim)
            make.weight("kv_b_proj", expanded, latent.rank, self._take_both)
        self.o = make.linear({"o_proj": hidden}, config.num_heads * latent.value_dim, bias=config.o_bias, place=Place.O)

    def _take_both(self, weight: Tensor) -> None:
        """Keep kv_b_proj: a head's rows are its keys', then its values'."""
        keys, values = weight.unflatten(0, (self._num_heads, -1)).split((self._nope_dim, self._value_dim), 1)
        self._keys, self._values = pack_heads(keys.mT), pack_heads(values)

    def _take_keys(self, weight: Tensor) -> None:
        """Keep k_b_proj of GGUF files: a head has a row for each number of the latent."""
        self._keys = pack_heads(weight.unflatten(0, (self._num_heads, -1)))

    def _take_values(self, weight: Tensor) -> None:
        self._values = pack_heads(weight.unflatten(0, (self._num_heads, -1)))

    def __call__(
        self, x: Tensor, angles: Angles | None, attention: LayerAttention, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Compute attention for x [T, hidden]; `angles` from Rotary."""
        assert angles is not None, "a family with latents has positions in every layer"
        first, row = self.down(x).split(self._widths, 1)
        if self.queries is not None and self._query_norm is not None:
            first = self.queries(self._query_norm(first.contiguous()))
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
        return self.o(out, () if adapters is None else adapters(Place.O, out))

    def _rotate(self, q: Tensor, k: Tensor, angles: Angles) -> Tensor:
        """Return q [T, heads, rope_dim] and, as one more head, k [T, rope_dim], rotated.

        Interleaved pairs become halves. Scores do not change, for queries and keys are reordered alike.
        """
        both = torch.cat((q, k[:, None]), 1)
        if self._is_interleaved:
            both = both.unflatten(-1, (-1, 2)).mT.flatten(-2)
        return rotate(both, *angles)
