"""Runs a decoder in the C library: the forward pass of a step is one call.

This module builds descriptions: addresses of tensors that the decoder and the pool own. models/decoder.py does the same
operations one by one in torch; it is the definition, and runs wherever the library cannot. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runtime.native.library import (
    AdaptersArgs,
    DecoderArgs,
    ForwardArgs,
    LayerArgs,
    Library,
    LinearArgs,
    NormWeight,
    RotaryArgs,
    native,
)
from engine.runtime.native.parts import PagedState, PagedStep


class Streams(NamedTuple):
    """Residual streams that a forward pass copies out, before norms: of all its tokens.

    Layer i stands for the sum that enters layer i; the number of layers for the sum that leaves the last. That one goes
    with all rows only.
    """

    layers: Sequence[int]  # ascending
    out: Tensor  # [T, len(layers), hidden] in the model's type, contiguous


class Vectors(NamedTuple):
    """Rows of a step whose embeddings are given, as of images; no multiplier of embeddings applies to them."""

    rows: Tensor  # [V] int64
    values: Tensor  # [1 + D, V, hidden]: the embeddings, then what is added behind each of the first D layers


class NativeDecoder:
    """A model's description, and its forward pass; describe_decoder makes it."""

    def __init__(
        self,
        library: Library,
        description: DecoderArgs,
        layers: Sequence[LayerArgs],
        rotaries: Sequence[tuple[Tensor, float, Tensor | None]],
        dtype: torch.dtype,
        state_of: Sequence[int] | None,
    ) -> None:
        self._library, self._decoder = library, description
        self._layers = (LayerArgs * len(layers))(*layers)
        self._rotaries = (RotaryArgs * len(rotaries))(
            *(
                RotaryArgs(inverse.data_ptr(), 2 * len(inverse), None if axes is None else axes.data_ptr(), magnitude)
                for inverse, magnitude, axes in rotaries
            )
        )
        self._dtype, self._state_of = dtype, state_of
        self._bound: PagedStep | None = None
        description.layers, description.num_layers = addressof(self._layers), len(layers)
        description.rotaries, description.num_rotaries = addressof(self._rotaries), len(rotaries)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        step: PagedStep,
        rows: Tensor | None,
        adapters: AdaptersArgs | None,
        streams: Streams | None = None,
        vectors: Vectors | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Return normed hidden states [R, hidden] of `rows`, or of all; all indices are int64."""
        num_tokens = ids.shape[0]  # a tensor's len() is Python
        num_rows = num_tokens if rows is None else rows.shape[0]
        hidden = torch.empty(num_rows, self._decoder.hidden, dtype=self._dtype)
        args = ForwardArgs(
            self.bound_to(step), ids.data_ptr(), positions.data_ptr(), None if types is None else types.data_ptr(),
            None if rows is None else rows.data_ptr(), hidden.data_ptr(), num_tokens, num_rows,
            axis_step=num_tokens if positions.dim() > 1 else 0,
        )  # fmt: skip
        if adapters is not None:
            args.adapters = adapters
        if streams is not None:
            layers = (c_int64 * len(streams.layers))(*streams.layers)  # lives as long as the call
            args.streams, args.stream_layers = streams.out.data_ptr(), addressof(layers)
            args.num_streams = len(layers)
        if vectors is not None:
            places, values = torch.full_like(ids, -1), vectors.values.float()  # live as long as the call
            places[vectors.rows] = torch.arange(len(vectors.rows))
            args.vector_of, args.vectors = places.data_ptr(), values.data_ptr()
            args.num_deep, args.num_vectors = len(values) - 1, len(vectors.rows)
        self._library.forward(args)
        return hidden

    def bound_to(self, step: PagedStep) -> int:
        """Return the address of the description over a pool, valid until it is bound to another."""
        if self._bound is not step:
            self._bind(step)
        return addressof(self._decoder)

    def _bind(self, step: PagedStep) -> None:
        mixing = [layer for layer in self._layers for part in (layer.mixer, layer.beside) if part.kind]
        states = step if self._state_of is None else [step[state] for state in self._state_of]
        for layer, paged in zip(mixing, states, strict=False):  # a head's layers follow in the pool
            if isinstance(paged, PagedState):
                layer.states, layer.places = addressof(paged.step), paged.places.ctypes.data
                layer.drafts = paged.drafts.data_ptr()
                continue
            layer.pool, layer.store, layer.attend = paged.pool, addressof(paged.store), addressof(paged.attend)
            layer.pool.dtype = self._decoder.dtype  # the type of the pool does not matter
        self._bound = step


def describe_decoder(
    description: DecoderArgs,
    layers: Sequence[LayerArgs | None],
    rotaries: Sequence[tuple[Tensor, float, Tensor | None]],
    *,
    device: torch.device,
    embedding: LinearArgs,
    norm: NormWeight,
    dtype: torch.dtype,
    state_of: Sequence[int] | None = None,
) -> NativeDecoder | None:
    """Return a model of the library, or None if that does not compute each layer here.

    `description` has its numbers set; rotaries are (frequencies [dim / 2], magnitude, the axes of frequencies if several).
    C holds the tensors' addresses, and the model the tensors. `state_of` has the state of each layer, if layers share
    some.
    """
    library, known = native(), [layer for layer in layers if layer is not None]
    if library is None or device.type != "cpu" or len(known) < len(layers):
        return None
    description.embedding, description.embedding_format = embedding.packed, embedding.format
    description.norm = norm
    return NativeDecoder(library, description, known, rotaries, dtype, state_of)
