"""EAGLE-3: a draft of one or a few layers over the residual streams of its target.

    g = fc(the target's streams at p)                             project
    y = layers(embedding of the token at p + 1, g at p)           forward: the next draft's g
    logits over the draft vocabulary = head(norm(y))              logits, of the token at p + 2

The first layer's attention reads the normed embedding beside the normed g, and its residual is g; further layers are
ordinary. Implements `Head` (speculation/heads.py). Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.core.errors import ModelLoadError
from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.attention import Attention
from engine.runtime.layers.layer import DecoderLayer
from engine.runtime.layers.mlp import MLP
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import Angles, LayerStates, Load, Maker
from engine.runtime.layers.rope import Rotaries
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.eagle3_config import Eagle3Config
from engine.runtime.schemes.linear import Scheme
from engine.runtime.weights.checkpoint import StoredTensor

_EMBEDDING, _OFFSETS, _MEMBERS = "model.embed_tokens.weight", "d2t", "t2d"
# The first layer's name: SafeAILab's, and the speculators library's as safetensors.py spells it.
_FIRST_LAYERS = ("midlayer", "model.layers.0")


class _FirstLayer:
    """The layer that joins embeddings and states."""

    def __init__(self, config: Eagle3Config, make: Maker, state: int) -> None:
        model, hidden = config.model, config.model.hidden_size
        self._norm_before_residual = config.norm_before_residual
        self._token_norm = RMSNorm(make, "input_layernorm", hidden, model)
        self._state_norm = RMSNorm(make, "hidden_norm", hidden, model)
        self._attention = Attention(model, 0, make, state, num_inputs=2 * hidden)
        self.states = self._attention.states
        self._before_mlp = RMSNorm(make, "post_attention_layernorm", hidden, model)
        self._mlp = MLP(model, 0, make)

    def __call__(
        self, tokens: Tensor, states: Tensor, angles: Angles | None, attention: LayerStates
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream [T, hidden] and the term to add to it."""
        normed = self._state_norm(states)
        attended = self._attention(self._inputs(tokens, normed), angles, attention)
        stream = normed if self._norm_before_residual else states.clone()
        return stream, self._mlp(self._before_mlp.add(stream, attended, 1.0))

    def store(self, tokens: Tensor, states: Tensor, angles: Angles | None, attention: LayerStates) -> None:
        """Store keys and values."""
        self._attention.attend(self._inputs(tokens, self._state_norm(states)), angles, attention)

    def _inputs(self, tokens: Tensor, normed: Tensor) -> Tensor:
        """Return the attention's inputs [T, 2 * hidden] of normed states."""
        return torch.cat((self._token_norm(tokens), normed), -1)


class Eagle3:
    """An EAGLE-3 draft, made empty, then loaded by `loads`."""

    def __init__(
        self,
        config: Eagle3Config,
        target: Decoder,
        stored: Collection[str],
        *,
        served_len: int,
        device: torch.device,
        scheme: Scheme,
    ) -> None:
        """`stored` names the checkpoint's tensors; without an embedding it looks tokens up in the target's."""
        model, hidden = config.model, config.model.hidden_size
        dtype = target.dtype
        make = Maker(dtype, device, scheme, loads=[], targets={})
        self.loads = make.loads
        self.streams: Sequence[int] = config.streams
        self.target_hidden_size = config.target_hidden_size
        self.hidden_size, self.dtype, self.needs_all = hidden, dtype, config.needs_all
        self._config = config
        self._embed: Callable[[Tensor], Tensor] = target.embed
        if _EMBEDDING in stored or hidden != config.target_hidden_size:
            table = make.tensor(_EMBEDDING, model.vocab_size, hidden)
            self._embed = lambda ids: F.embedding(ids, table)
        num_states = len(config.streams) * config.target_hidden_size
        self._input_norm = RMSNorm(make, "input_norm", num_states, model) if config.norm_before_fc else None
        self._part_norms = [
            RMSNorm(make, f"fc_norm.{index}", config.target_hidden_size, model)
            for index in range(len(config.streams) * config.fc_norm)
        ]
        self._fc = make.linear({"fc": hidden}, num_states)
        first = next(
            (name for name in _FIRST_LAYERS if any(each.startswith(name) for each in stored)), _FIRST_LAYERS[0]
        )
        self._first = _FirstLayer(config, make.within(first, 0), len(target.states))
        self._layers = [
            DecoderLayer(model, index, make.within(f"model.layers.{index}", index), state=len(target.states) + index)
            for index in range(1, len(model.layers))
        ]
        self._norm = RMSNorm(make, "model.norm", hidden, model)
        self._head = make.linear({"lm_head": config.draft_vocab_size}, hidden, is_head=True)
        self._ids = self._target_ids(make, stored)
        further = (state for layer in self._layers for state in layer.states)
        self.states: Sequence[StateSpec] = [*self._first.states, *further]
        self._rotaries = Rotaries([layer.rope for layer in model.layers], served_len, dtype=dtype, device=device)

    def project(self, states: Tensor) -> Tensor:
        """Return g [T, hidden] of the target's streams [T, number of streams * target's hidden]."""
        if self._input_norm is not None:
            states = self._input_norm(states)
        if self._part_norms:
            parts = states.chunk(len(self._part_norms), -1)
            states = torch.cat([norm(part) for norm, part in zip(self._part_norms, parts, strict=True)], -1)
        return self._fc(states)

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> Tensor:
        """Return the next states [T, hidden]; `ids` [T] are the tokens at positions + 1, `states` g of positions."""
        angles = self._rotaries(positions)
        stream, delta = self._first(self._embed(ids), states, angles[0], attention)
        for layer, own in zip(self._layers, angles[1:], strict=True):
            delta = layer(stream, delta, own, attention, None)
        return self._norm.add(stream, delta, 1.0) if self._config.norm_output else stream.add_(delta)

    def store(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> None:
        """Store keys and values; see Head. Of several layers all but the first read the ones before."""
        if self._layers:
            self.forward(ids, positions, states, attention)
        else:
            self._first.store(self._embed(ids), states, self._rotaries(positions)[0], attention)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits [R, the target's vocab_size] of states; -inf for tokens that cannot be drafted."""
        drafted = self._head.in_float32(states if self._config.norm_output else self._norm(states))
        if self._ids is None:
            return drafted
        logits = drafted.new_full((len(drafted), self._config.model.vocab_size), -torch.inf)
        return logits.index_copy_(1, self._ids, drafted)

    def _target_ids(self, make: Maker, stored: Collection[str]) -> Tensor | None:
        """Return the target's ids of the draft vocabulary, to be loaded; None if both vocabularies are one."""
        num_drafted, vocab_size = self._config.draft_vocab_size, self._config.model.vocab_size
        if _MEMBERS in stored:  # says the same as the offsets
            make.loads.append(Load({_MEMBERS: (vocab_size,)}, lambda _: None))
        if _OFFSETS not in stored and num_drafted == vocab_size:
            return None
        ids = torch.arange(num_drafted, device=make.device)

        def take(tensors: Mapping[str, StoredTensor]) -> None:
            offsets = torch.empty(num_drafted, dtype=torch.int64)
            tensors[_OFFSETS].copy_to(offsets)
            ids.add_(offsets.to(ids.device))
            if len(ids.unique()) < num_drafted or ids.min() < 0 or ids.max() >= vocab_size:
                raise ModelLoadError(
                    f"{tensors[_OFFSETS].file}: 'd2t' does not map {num_drafted} draft tokens to as many of the model's "
                    f"{vocab_size}; download the draft again."
                )

        make.loads.append(Load({_OFFSETS: (num_drafted,)}, take))
        return ids
