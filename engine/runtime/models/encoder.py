"""The encoder of BERT's lineage: one class, configured by an EncoderConfig. Each token attends to all others of its text.

On a CPU a pass is one call of the native library, if that holds every matrix and knows the scores and activations; the
operations of torch here define it.

Texts lie one behind the other, without padding; where one begins is known from its first position, because a step
computes it whole. All layers of a kind share one state: each overwrites the keys and values of the one before, which
nothing reads again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.files.vector_files import VectorSettings
from engine.runtime.activation import Activation
from engine.runtime.kv_layout import AttentionSpec, StateSpec
from engine.runtime.layers.attention import AttentionArgs
from engine.runtime.layers.parts import Angles, LayerStates, Maker, Target
from engine.runtime.layers.rope import Rotaries, rotate
from engine.runtime.lora.loader import AdapterRows
from engine.runtime.models.causal_lm import ModelCapabilities
from engine.runtime.models.encoder_families import EncoderConfig
from engine.runtime.models.pooler import ACTIVATIONS, Pooler
from engine.runtime.native.decoder import NativeDecoder, Streams, Vectors, describe_decoder
from engine.runtime.native.library import DTYPES, DecoderArgs, LayerArgs, NormWeight
from engine.runtime.native.parts import describe_part, layer_norm_args, scores_args
from engine.runtime.schemes.linear import Embedding, Scheme

_GATED = {"silu": Activation.SILU, "gelu": Activation.GELU, "gelu_tanh": Activation.GELU_TANH}
_ALONE = {"gelu": Activation.GELU_ALONE}
_FARTHEST = 128  # distance from which on all share a bucket


class _Norm:
    """LayerNorm over the last dimension."""

    def __init__(self, make: Maker, name: str, config: EncoderConfig) -> None:
        self._weight = make.tensor(f"{name}.weight", config.hidden_size)
        self._bias = make.tensor(f"{name}.bias", config.hidden_size) if config.norm_bias else None
        self._eps = config.norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def describe(self, *, is_of_stream: bool) -> NormWeight:
        """Describe the norm to the native library; with `is_of_stream` the next sum begins with its result."""
        return layer_norm_args(self._weight, self._bias, is_of_stream=is_of_stream)


class _Layer:
    """Attention and an MLP, each added to what it reads, with a norm before or behind."""

    def __init__(
        self, config: EncoderConfig, make: Maker, state: int, spec: AttentionSpec, *, has_first_norm: bool
    ) -> None:
        hidden, width = config.hidden_size, config.width
        self._shape = -1, 3 * config.num_heads, hidden // config.num_heads
        self._num_heads, self._is_pre_norm, self._state, self._spec = config.num_heads, config.is_pre_norm, state, spec
        self.qkv = make.linear(dict.fromkeys("qkv", hidden), hidden, bias=config.qkv_bias)
        self._o = make.linear({"o": hidden}, hidden, bias=config.o_bias)
        self._mixer_norm = _Norm(make, "mixer_norm", config) if has_first_norm else None
        activation = _GATED[config.activation] if config.is_gated else _ALONE.get(config.activation)
        ups = ("gate", "up") if config.is_gated else ("up",)
        self._up = make.linear(dict.fromkeys(ups, width), hidden, bias=config.up_bias, activation=activation)
        self._activate = None if activation is not None else ACTIVATIONS[config.activation]
        self._down = make.linear({"down": hidden}, width, bias=config.down_bias)
        self._mlp_norm = _Norm(make, "mlp_norm", config)

    def __call__(self, x: Tensor, angles: Angles | None, attention: LayerStates, bias: _Distances | None) -> Tensor:
        if self._is_pre_norm:
            x = x + self._attend(x if self._mixer_norm is None else self._mixer_norm(x), angles, attention, bias)
            return x.add_(self._mlp(self._mlp_norm(x)))
        assert self._mixer_norm is not None
        x = self._mixer_norm(self._attend(x, angles, attention, bias).add_(x))
        return self._mlp_norm(self._mlp(x).add_(x))

    def describe(self, rotary: int, before: _Norm | None) -> LayerArgs | None:
        """Describe the loaded layer to the native library, behind the norm of `before`; None if that cannot compute it."""
        num_heads, _, head_dim = self._num_heads, *self._shape[1:]
        self._args = AttentionArgs(scores=scores_args(self._spec), num_kv_heads=num_heads, head_dim=head_dim)
        mixer = describe_part("attention", (self.qkv.args, self._o.args), self._args)
        feed_forward = describe_part("mlp", (self._up.args, self._down.args))
        if mixer is None or feed_forward is None or self._activate is not None:
            return None
        layer = LayerArgs(mixer=mixer, feed_forward=feed_forward, rotary=rotary, stream_scale=1.0)
        if self._is_pre_norm:
            layer.before_feed_forward = self._mlp_norm.describe(is_of_stream=False)
            if self._mixer_norm is not None:
                layer.before_mixer = self._mixer_norm.describe(is_of_stream=False)
        else:
            assert self._mixer_norm is not None
            layer.before_feed_forward = self._mixer_norm.describe(is_of_stream=True)
        if before is not None:
            layer.before_mixer = before.describe(is_of_stream=True)
        return layer

    @property
    def last_norm(self) -> _Norm | None:
        """Return the norm behind the last sum."""
        return None if self._is_pre_norm else self._mlp_norm

    def _attend(self, x: Tensor, angles: Angles | None, attention: LayerStates, bias: _Distances | None) -> Tensor:
        qkv = self.qkv(x).view(self._shape)
        if angles is not None:
            rotated = rotate(qkv[:, : 2 * self._num_heads], *angles)
            q, k = rotated.split(self._num_heads, 1)
            v = qkv[:, 2 * self._num_heads :]
        else:
            q, k, v = qkv.split(self._num_heads, 1)
        out = attention(self._state, q, k, v) if bias is None else bias.attend(q, k, v)
        return self._o(out.flatten(1))

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self._up(x)
        return self._down(inner if self._activate is None else self._activate(inner))


class _Distances:
    """Attention of a step whose scores have a number for each head and distance (MPNet), in torch."""

    def __init__(self, table: Tensor, starts: Sequence[int], longest: int) -> None:
        self._starts = starts
        half, most_exact = len(table) // 2, len(table) // 4
        distance = (
            torch.arange(longest, device=table.device)[None] - torch.arange(longest, device=table.device)[:, None]
        )
        far = distance.abs().float().clamp(min=1) / most_exact
        far = most_exact + (far.log() / math.log(_FARTHEST / most_exact) * (half - most_exact)).long()
        near = torch.where(distance.abs() < most_exact, distance.abs(), far.clamp(max=half - 1))
        self._bias = F.embedding(near + (distance > 0) * half, table).permute(2, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return [T, heads, head_dim] of q, k and v alike."""
        lengths = [stop - start for start, stop in zip(self._starts, self._starts[1:], strict=False)]
        parts = zip(*(each.transpose(0, 1).split(lengths, 1) for each in (q, k, v)), strict=True)
        done = []
        for one, num in zip(parts, lengths, strict=True):
            query, key, value = (each[None] for each in one)
            done.append(F.scaled_dot_product_attention(query, key, value, attn_mask=self._bias[None, :, :num, :num])[0])
        return torch.cat(done, 1).transpose(0, 1)


class Encoder:
    """A CausalLM that generates nothing; some rope scalings need `served_len`, the longest sequence it will see."""

    described = None

    def __init__(
        self,
        config: EncoderConfig,
        *,
        served_len: int,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme,
        separator: int | None = None,
    ) -> None:
        """With `separator`, the id behind the first text of two, the second has another type."""
        make = Maker(dtype, device, scheme, loads=[], targets={})
        self.make, self.loads = make, make.loads
        self.vectors = VectorSettings()
        self.adapter_targets: Mapping[str, Target] = {}
        self.pooler: Pooler | None = None
        self.vocab_size, self.max_model_len, self.dtype, self.device = (
            config.vocab_size,
            config.max_positions,
            dtype,
            device,
        )
        self._config, self._separator = config, separator
        hidden = config.hidden_size
        self._words, self._positions, self._types, self._distances = Embedding(), Embedding(), Embedding(), Embedding()
        tables = ((self._words, "words", config.vocab_size, hidden), (self._types, "types", config.num_types, hidden),
                  (self._positions, "positions", config.num_position_rows, hidden),
                  (self._distances, "distances", config.num_distances, config.num_heads))  # fmt: skip
        for embedding, name, num_rows, size in tables:
            if num_rows:
                make.embedding(name, num_rows, size, embedding)
        self._norm = _Norm(make, "norm", config)
        head_dim = hidden // config.num_heads
        kinds = list(dict.fromkeys(config.reaches))
        specs = [
            AttentionSpec(config.num_heads, config.num_heads, head_dim, head_dim**-0.5, reach=reach) for reach in kinds
        ]
        self.states: Sequence[StateSpec] = specs
        self._layers = [
            _Layer(
                config,
                make.within(f"layers.{i}"),
                kinds.index(reach),
                specs[kinds.index(reach)],
                has_first_norm=bool(i) or not config.is_pre_norm,
            )
            for i, reach in enumerate(config.reaches)
        ]
        self._final_norm = _Norm(make, "final_norm", config) if config.is_pre_norm else None
        self._rotaries = Rotaries(config.ropes, served_len, dtype=dtype, device=device)
        self._state_of = [kinds.index(reach) for reach in config.reaches]
        self._native: NativeDecoder | None = None

    def finish(self) -> None:
        """Complete a loaded model."""
        self.loads.clear()
        self._native = self._describe()

    def _describe(self) -> NativeDecoder | None:
        """Describe the model to the native library, if that can compute it."""
        config = self._config
        positions, types = self._positions.weight, self._types.weight
        *before, last = self._norm, *(layer.last_norm for layer in self._layers)
        last = last or self._final_norm
        if last is None or config.num_distances or not isinstance(positions, Tensor) or not isinstance(types, Tensor):
            return None
        description = DecoderArgs(
            hidden=config.hidden_size, dtype=DTYPES[self.dtype], eps=config.norm_eps, embedding_scale=1.0, residual_scale=1.0,
            last_holder=len(self._layers) - 1, type_rows=types.data_ptr(),
        )  # fmt: skip
        if config.num_position_rows:
            description.position_rows = positions[config.first_position].data_ptr()
        parts = zip(self._layers, self._rotaries.of_layers, before, strict=True)
        return describe_decoder(
            description,
            [layer.describe(rotary, norm) for layer, rotary, norm in parts],
            self._rotaries.frequencies,
            device=self.device,
            embedding=self._words.described,
            norm=last.describe(is_of_stream=True),
            dtype=self.dtype,
            state_of=self._state_of,
        )

    @property
    def capabilities(self) -> ModelCapabilities:
        """Return that it makes vectors, and whether the native library computes the products."""
        return ModelCapabilities(native=self._layers[0].qkv.args is not None, generates=False, both_ways=True)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: LayerStates,
        rows: Tensor | None = None,
        adapters: Sequence[AdapterRows] = (),  # noqa: ARG002 - it has none of these
        streams: Streams | None = None,  # noqa: ARG002
        vectors: Vectors | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Return hidden states [R, hidden] of `rows` [R], or all; ids, positions [T]."""
        types = self._types_of(ids, positions) if self._config.num_types else None
        if self._native is not None and attention.paged_step is not None:
            return self._native.forward(ids, positions, attention.paged_step, rows, None, types=types)
        x = self._embedded(ids, positions, types)
        bias = None
        if self._config.num_distances:
            starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
            table = self._distances.weight
            assert isinstance(table, Tensor)
            bias = _Distances(table, starts, int(positions.max()) + 1)
        for layer, angles in zip(self._layers, self._rotaries(positions), strict=True):
            x = layer(x, angles, attention, bias)
        if rows is not None:
            x = x.index_select(0, rows)
        return x if self._final_norm is None else self._final_norm(x)

    def _types_of(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the type of each token: 1 in the second text of two, else 0."""
        if self._separator is None:
            return torch.zeros_like(ids)
        ends = (ids == self._separator).long()
        before = ends.cumsum(0) - ends
        starts = torch.arange(len(ids), device=ids.device) - positions
        return (before > before.index_select(0, starts)).long()

    def _embedded(self, ids: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """Return what enters the first layer: the normed sum of what is known of a token."""
        x = self._words(ids)
        if types is not None:
            x = x + self._types(types)
        if self._config.num_position_rows:
            x = x + self._positions(positions + self._config.first_position)
        return self._norm(x)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return zeros: it has none, and the engine refuses requests that need them."""
        return hidden.new_zeros((len(hidden), self.vocab_size), dtype=torch.float32) if out is None else out.zero_()
