"""The MTP head of a checkpoint (DeepSeek-V3, GLM-4.5 to 4.7, Qwen 3.5): one decoder layer more, for the token after next.

    x = eh_proj(enorm(embedding of the token at p + 1), hnorm(state at p));  state = shared_head.norm(layer(x) at p)

The model's embedding and LM head serve it too; copies of them in the checkpoint are not read. For a further draft the
state takes the place of the model's, which is normed as well. Of several MTP layers the first drafts every token. The
native library computes the layer and the norm behind it where it has both. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.layer import DecoderLayer
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.layers.parts import LayerStates, Maker
from engine.runtime.layers.rope import Rotaries
from engine.runtime.models.decoder import Decoder
from engine.runtime.native.decoder import NativeDecoder, describe_decoder
from engine.runtime.native.library import DTYPES, PLAIN, DecoderArgs, LinearArgs
from engine.runtime.native.parts import PagedStep, norm_args


class MTPHead:
    """A Head (speculation/heads.py); it is created empty, and loaded by `make.loads`."""

    streams: Sequence[int] = ()
    needs_all = True

    def __init__(self, target: Decoder, served_len: int, make: Maker) -> None:
        config = target.config
        settings, hidden = [layer for layer in config.layers if layer.recurrent is None][-1], config.hidden_size
        make = make.within(f"model.layers.{len(config.layers)}")
        self._target, self._device, self._scale = target, make.device, config.residual_multiplier
        self._embedding_norm = RMSNorm(make, "enorm", hidden, config)
        self._state_norm = RMSNorm(make, "hnorm", hidden, config)
        self._join = make.linear({"eh_proj": hidden}, 2 * hidden)
        self._state = len(target.states)  # its own is behind them in the pool
        self._layer = DecoderLayer(replace(config, layers=(settings,)), 0, make, state=self._state)
        self._norm = RMSNorm(make, "shared_head.norm", hidden, config)
        self._rotaries = Rotaries([settings.rope], served_len, dtype=make.dtype, device=make.device)
        self.states: Sequence[StateSpec] = self._layer.states
        self.hidden_size = self.target_hidden_size = hidden
        self.dtype = make.dtype
        self._args = DecoderArgs(
            hidden=hidden,
            dtype=DTYPES[make.dtype],
            eps=config.norm_eps,
            embedding_scale=1.0,
            residual_scale=self._scale,
        )

    @cached_property
    def _native(self) -> NativeDecoder | None:
        """Return the loaded layer as the native library's, if it computes that."""
        return describe_decoder(
            self._args,
            [self._layer.describe(self._rotaries.of_layers[0])],
            self._rotaries.frequencies,
            device=self._device,
            embedding=LinearArgs(format=PLAIN),
            norm=norm_args(self._norm.weight),
            dtype=self.dtype,
            state_of=[self._state],
        )

    def project(self, states: Tensor) -> Tensor:
        """Return the target's states, which are read as they are."""
        return states

    def forward(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> Tensor:
        """Return normed states [T, hidden]; see Head."""
        x = self._joined(ids, states)
        if self._native is not None and attention.paged_step is not None:
            return self._natively(self._native, x, positions, attention.paged_step, None)
        return self._norm.add(x, self._layer(x, None, self._rotaries(positions)[0], attention, None), self._scale)

    def store(self, ids: Tensor, positions: Tensor, states: Tensor, attention: LayerStates) -> None:
        """Store keys and values; see Head."""
        x = self._joined(ids, states)
        if self._native is not None and attention.paged_step is not None:
            self._natively(self._native, x, positions, attention.paged_step, ids[:0])
        else:
            self._layer.store(x, self._rotaries(positions)[0], attention)

    def _joined(self, ids: Tensor, states: Tensor) -> Tensor:
        """Return the layer's input [T, hidden]."""
        return self._join(torch.cat((self._embedding_norm(self._target.embed(ids)), self._state_norm(states)), 1))

    def _natively(
        self, layer: NativeDecoder, x: Tensor, positions: Tensor, step: PagedStep, rows: Tensor | None
    ) -> Tensor:
        """Return what the layer makes of x, which takes the place of an embedding: a row for each token."""
        self._args.embedding = x.data_ptr()
        return layer.forward(torch.arange(len(x)), positions, step, rows, None)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits [R, vocab_size]."""
        return self._target.logits(states)
