"""The decoder of the Llama lineage: one class, configured by a ModelConfig.

It is created empty, loaded by `loads`, and completed by `finish`. Then the engine thread calls `forward` and `logits`. It knows tokens and positions, not sequences, blocks or slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.files.vector_files import VectorSettings
from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.layer import DecoderLayer
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import LayerStates, Maker, Target
from engine.runtime.layers.rope import Rotaries
from engine.runtime.layers.shards import Shards, colwise
from engine.runtime.lora.loader import AdapterRows, NativeAdapters, addends
from engine.runtime.models.causal_lm import Described, ModelCapabilities
from engine.runtime.models.pooler import Pooler
from engine.runtime.native.decoder import NativeDecoder, Streams, Vectors, describe_decoder
from engine.runtime.native.library import DTYPES, DecoderArgs, native
from engine.runtime.native.ops import scale_logits
from engine.runtime.native.parts import norm_args
from engine.runtime.schemes.linear import Embedding, Linear, Scheme, ShardedEmbedding
from engine.runtime.weights.expert_names import their_name

if TYPE_CHECKING:
    from engine.runtime.layers.altup import AltUpLayer, PerLayerInputs
    from engine.runtime.layers.altup import Streams as AltUpStreams


class Decoder:
    """A CausalLM; some rope scalings need `served_len`, the longest sequence it will see."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        served_len: int,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme,
        shards: Shards | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        plan = {"model.embed_tokens": colwise("vocabulary"), "lm_head": colwise("vocabulary")}
        self._lacking = list[str]()
        make = Maker(
            dtype, device, scheme, loads=[], targets={}, shards=shards, plan=plan, state_dtype=state_dtype,
            lacking=self._lacking,
        )  # fmt: skip
        num_ids = config.vocab_size
        self.group, self._shards = make.group, shards
        if shards is not None:
            config, num_ids = shards.config, shards.vocabulary.num
        self.loads = make.loads
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        self.dtype = dtype
        self.config = config  # of this rank's part
        self.device = device
        self.adapter_targets: Mapping[str, Target] = make.targets
        # ids [T] -> [T, hidden], as stored
        self.embed = Embedding() if shards is None else ShardedEmbedding(make.group, shards.vocabulary.first, num_ids)
        if not config.tied_head:
            make.embedding("model.embed_tokens", num_ids, config.hidden_size, self.embed)
        # Loaded first, as the largest matrix: loaded last, it would be packed on one thread while all others wait.
        head, tied = ("model.embed_tokens", self.embed) if config.tied_head else ("lm_head", None)
        self._head = (
            make.linear({head: num_ids}, config.hidden_size, is_head=True, tied=tied) if config.has_head else None
        )
        # Rounded to the weights' type, like Gemma's published code.
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self._inputs, self._streams, kind = _further_parts(config, make)
        self._layers, specs = list["AltUpLayer | DecoderLayer"](), list[StateSpec]()
        kinds = list(dict.fromkeys((layer.heads, layer.reach) for layer in config.layers))
        self._state_of: list[int] | None = [] if config.both_ways else None
        for index, own in enumerate(config.layers):
            # Where a prompt is computed in one step, layers of a kind overwrite the keys and values of those before.
            state = kinds.index((own.heads, own.reach)) if config.both_ways else len(specs)
            layer = kind(config, index, make.within(f"model.layers.{index}", index), state=state)
            self._layers.append(layer)
            if self._state_of is not None:
                self._state_of.append(state)
            if state == len(specs):
                specs += layer.states
        self.states: Sequence[StateSpec] = specs
        self.vectors = VectorSettings()
        self.pooler: Pooler | None = None
        self._norm = RMSNorm(make, "model.norm", config.hidden_size, config)
        self._rotaries = Rotaries([layer.rope for layer in config.layers], served_len, dtype=dtype, device=device)
        self._native: NativeDecoder | None = None
        # The layers behind it read the keys and values of others, or have no mixer.
        self._last_holder = max(i for i, layer in enumerate(config.layers) if layer.mixer and layer.source is None)

    @property
    def capabilities(self) -> ModelCapabilities:
        """Return whether it has an LM head, and whether the native library computes the products."""
        graphs = all(layer.is_capturable for layer in self._layers)
        is_native = self._native is not None if self._head is None else self._head.args is not None
        return ModelCapabilities(
            adapters=True,
            graphs=graphs,
            native=is_native,
            heads=self._streams is None,
            generates=self._head is not None,
            both_ways=self.config.both_ways,
        )

    @property
    def described(self) -> Described | None:
        """Return what the library knows of the model, if it computes all of it, on one rank."""
        head = None if self._head is None else self._head.args
        if self._native is None or head is None or self._shards is not None:
            return None
        return Described(self._native, head, self.config.logit_multiplier, self.config.logit_softcap or 0.0)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attention: LayerStates,
        rows: Tensor | None = None,
        adapters: Sequence[AdapterRows] = (),
        streams: Streams | None = None,
        vectors: Vectors | None = None,
    ) -> Tensor:
        """Return normed hidden states [R, hidden] of `rows` [R], or all; ids [T], positions [T] or [3, T]."""
        if vectors is not None:
            ids = ids.index_fill(0, vectors.rows, 0)  # of padding: Gemma 4's layers have its inputs there
        if self._native is not None and attention.paged_step is not None:
            described = NativeAdapters(adapters, len(ids)) if adapters else None  # lives as long as the call
            args = None if described is None else described.args
            return self._native.forward(ids, positions, attention.paged_step, rows, args, streams, vectors)
        x = self._embedded(ids, vectors)
        inputs = None if self._inputs is None else self._inputs(ids, x)
        if self._streams is not None:
            x = self._streams.spread(x)
        delta: Tensor | None = None
        for index, (layer, angles) in enumerate(zip(self._layers, self._rotaries(positions), strict=True)):
            if streams is not None and index in streams.layers:
                self._copy_stream(x, delta, streams, index)
            own = partial(addends, adapters, index) if adapters else None
            delta = layer(x, delta, angles, attention, own, inputs)
            if vectors is not None and index + 1 < len(vectors.values):
                x.index_add_(0, vectors.rows, vectors.values[1 + index])
            if index == self._last_holder and rows is not None and not len(rows):
                break  # a chunk of a prompt needs keys and values only
        if streams is not None and len(self._layers) in streams.layers:
            self._copy_stream(x, delta, streams, len(self._layers))
        if rows is not None:
            x, delta = x.index_select(0, rows), None if delta is None else delta.index_select(0, rows)
        if self._streams is not None:
            x = self._streams.gather(x)
        return self._norm.add(x, delta, self.config.residual_multiplier)

    def _embedded(self, ids: Tensor, vectors: Vectors | None) -> Tensor:
        """Return what enters the first layer: scaled embeddings, or the vectors in their place."""
        x = self.embed(ids)
        if self._embedding_multiplier != 1.0:
            x.mul_(self._embedding_multiplier)
        if vectors is not None:
            x.index_copy_(0, vectors.rows, vectors.values[0])
        return x

    def _copy_stream(self, x: Tensor, delta: Tensor | None, streams: Streams, layer: int) -> None:
        """Write x + scale * delta, the sum that enters a layer."""
        out = streams.out[:, streams.layers.index(layer)]
        out.copy_(x if delta is None else torch.add(x, delta, alpha=self.config.residual_multiplier))

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, vocab_size] of hidden states, in `out` if given."""
        if self._head is None:  # of a start's full steps alone: the engine refuses requests that need it
            return hidden.new_zeros((len(hidden), self.vocab_size), dtype=torch.float32) if out is None else out.zero_()
        # In bfloat16, logits near 25 would be 0.125 apart, and the two best would often be equal.
        if self._shards is None:
            logits = self._head.in_float32(hidden, out)
        else:
            logits = self._gathered(self._shards, self._head, hidden, out)
            if self.group.rank:
                return logits
        scale_logits(logits, self.config.logit_multiplier, self.config.logit_softcap or 0.0)
        return logits

    def _gathered(self, shards: Shards, head: Linear, hidden: Tensor, out: Tensor | None) -> Tensor:
        """Return all ranks' logits on rank 0; on the others a tensor of no meaning."""
        own = head.in_float32(hidden)
        own = F.pad(own, (0, shards.num_logits - own.shape[1]))  # the last rank may have fewer columns
        if self.group.rank:
            self.group.gather(own, None)
            return own.new_empty((len(own), 1)).expand(-1, self.vocab_size) if out is None else out
        logits = own.new_empty((len(own), self.vocab_size)) if out is None else out
        self.group.gather(own, logits)
        return logits

    def summary(self) -> str:
        """Return a line for the log about mixtures that the native library does not compute; "" for none."""
        if not self._lacking or native() is None or self.device.type != "cpu":
            return ""
        return (
            f"the experts of {len(self._lacking)} of {len(self._layers)} layers run in torch, which is slower; the native "
            f"library does not compute {self._lacking[0]} in {str(self.dtype).removeprefix('torch.')}"
        )

    def finish(self, kind: str) -> None:
        """Complete a loaded model; its kind has names for the matrices of adapters."""
        self.loads.clear()
        self.adapter_targets = {their_name(kind, name): target for name, target in self.adapter_targets.items()}
        self._native = self._describe()

    def _describe(self) -> NativeDecoder | None:
        """Describe the model to the native library, if that holds every matrix."""
        config = self.config
        if self._shards is not None and self.group.address is None:
            return None  # the library has no such sums over ranks
        description = DecoderArgs(
            hidden=config.hidden_size,
            dtype=DTYPES[self.dtype],
            eps=config.norm_eps,
            embedding_scale=self._embedding_multiplier,
            residual_scale=config.residual_multiplier,
            group=self.group.address,
            last_holder=self._last_holder,
        )
        if self._inputs is not None:
            inputs = self._inputs.describe()
            if inputs is None:
                return None
            description.inputs = addressof(inputs)
        if self._streams is not None and config.altup is not None:
            start = self._streams.describe()
            if start is None:
                return None
            description.start, description.num_altup = start, config.altup.num_streams
        if self._shards is not None:
            description.first_id, description.num_ids = self._shards.vocabulary[:2]
        return describe_decoder(
            description,
            [layer.describe(rotary) for layer, rotary in zip(self._layers, self._rotaries.of_layers, strict=True)],
            self._rotaries.frequencies,
            device=self.device,
            embedding=self.embed.described,
            norm=norm_args(self._norm.weight),
            dtype=self.dtype,
            state_of=self._state_of,
        )


def _further_parts(
    config: ModelConfig, make: Maker
) -> tuple[PerLayerInputs | None, AltUpStreams | None, type[AltUpLayer | DecoderLayer]]:
    """Return the inputs of layers, the residual streams and the kind of layers; few models have more than the last."""
    inputs: PerLayerInputs | None = None
    if config.layer_inputs:
        from engine.runtime.layers.altup import PerLayerInputs

        inputs = PerLayerInputs(config, make)
    if config.altup is None:
        return inputs, None, DecoderLayer
    from engine.runtime.layers import altup

    return inputs, altup.Streams(config, make), altup.AltUpLayer
