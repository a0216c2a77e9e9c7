"""Runs a decoder in the C library: the forward pass of a step is one call.

This module builds descriptions: addresses of tensors that the decoder and the pool own. models/decoder.py does the same
operations one by one in torch; it is the definition, and runs wherever the library cannot. Engine thread.

Routing and all products of a mixture of experts are one call, too; layers/mixture.py is the definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_int64
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.native.library import (
    DTYPES,
    AdaptersArgs,
    AttendArgs,
    DecoderArgs,
    ForwardArgs,
    LayerArgs,
    Library,
    LinearArgs,
    MixtureArgs,
    MixtureCall,
    NormWeight,
    PartArgs,
    Pool,
    RotaryArgs,
    RouterArgs,
    ScoresArgs,
    StoreArgs,
    native,
)

_LAYER, _LAYER_OF_STREAM = 1, 2  # as in quire_cpu.h


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """The part of the pool, and of the step, that the library needs for a layer's attention."""

    pool: Pool
    store: StoreArgs  # the same objects in every step, and for all layers of a group
    attend: AttendArgs


@dataclass(frozen=True, slots=True)
class PagedState:
    """The same for a layer with recurrent state."""

    step: Structure  # StepStatesArgs, the same object in every step and for all layers
    places: NDArray[np.int32]
    drafts: Tensor


PagedStep = Sequence[PagedLayer | PagedState]


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


def norm_args(weight: Tensor | None) -> NormWeight:
    """Describe an RMSNorm, or that there is none."""
    return NormWeight() if weight is None else NormWeight(weight.data_ptr(), DTYPES[weight.dtype])


def layer_norm_args(weight: Tensor, bias: Tensor | None, *, is_of_stream: bool) -> NormWeight:
    """Describe a LayerNorm, whose result may be the stream from then on."""
    kind = _LAYER_OF_STREAM if is_of_stream else _LAYER
    return NormWeight(weight.data_ptr(), DTYPES[weight.dtype], kind, None if bias is None else bias.data_ptr())


def scores_args(spec: AttentionSpec) -> ScoresArgs:
    """Describe how heads attend; C keeps the address of the sinks."""
    assert spec.sinks is None or spec.sinks.dtype is torch.float32
    sinks = None if spec.sinks is None else spec.sinks.data_ptr()
    return ScoresArgs(sinks, spec.num_heads, spec.seen or 0, spec.scale, spec.softcap or 0.0, spec.is_causal)


def describe_part(
    kind: str, matrices: Sequence[LinearArgs | None] = (), args: Structure | None = None
) -> PartArgs | None:
    """Describe a part: its first matrix and its last, and what its kind needs beside, of which C keeps the address.

    None without the library, or without one of the matrices.
    """
    library = native()
    if library is None or any(matrix is None for matrix in matrices):
        return None
    return PartArgs(library.kind(kind), None if args is None else addressof(args), *matrices)


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


class Mixture:
    """The description of a router and its experts."""

    def __init__(
        self,
        library: Library,
        router: RouterArgs,
        gate_up: Sequence[LinearArgs],
        down: Sequence[LinearArgs],
        *,
        correction: Tensor | None = None,
        expert_scale: Tensor | None = None,
        shared_gate: LinearArgs | None = None,
        clamp: tuple[float, float] | None = None,
    ) -> None:
        """`router` has its numbers and its matrix set; an expert more than it has is shared, and may have a gate.

        gate_up applies the activation, unless that is a clamp: gpt-oss's alpha and limit.
        """
        has_shared = len(gate_up) > router.num_experts
        assert len(gate_up) == len(down) == router.num_experts + has_shared
        assert router.num_chosen <= router.num_experts // router.num_groups * router.num_chosen_groups
        description = MixtureArgs(router, has_shared=has_shared)
        if shared_gate is not None:
            description.shared_gate = shared_gate
        if clamp is not None:
            description.clamp_alpha, description.clamp_limit = clamp
        if correction is not None:
            description.router.correction = correction.data_ptr()
        if expert_scale is not None:
            description.router.expert_scale = expert_scale.data_ptr()
        self._arrays = [(LinearArgs * len(linears))(*linears) for linears in (gate_up, down)]
        description.gate_up, description.down = map(addressof, self._arrays)
        description.gate_up_formats, description.down_formats = map(_formats, (gate_up, down))
        self._library, self._description = library, description
        self._correction, self._expert_scale = correction, expert_scale
        self._dtype = next(dtype for dtype, code in DTYPES.items() if code == down[0].dtype)

    def describe(self) -> PartArgs | None:
        """Return the description of a part, valid while this object lives."""
        return describe_part("mixture", args=self._description)

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """Return the sum of the experts' results, float32 [T, hidden], of contiguous x and `routed` [T, hidden]."""
        return self.explain(x, routed)[0]

    def explain(self, x: Tensor, routed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum, and the experts [T, ranks] of each row with their weights, the shared one last."""
        router = self._description.router
        assert x.is_contiguous()
        assert (x.dtype, x.shape[1]) == (self._dtype, router.gate.k)
        y = torch.empty(x.shape, dtype=torch.float32)
        ranks = router.num_chosen + self._description.has_shared
        chosen, weights = torch.empty(len(x), ranks, dtype=torch.int32), torch.empty(len(x), ranks)
        addresses = (addressof(self._description), *(tensor.data_ptr() for tensor in (x, y, chosen, weights)))
        self._library.mixture(MixtureCall(*addresses, len(x), None if routed is None else routed.data_ptr()))
        return y, chosen, weights


def _formats(linears: Sequence[LinearArgs]) -> int:
    """Return the formats of matrices as bits."""
    return sum(1 << number for number in {linear.format for linear in linears})
