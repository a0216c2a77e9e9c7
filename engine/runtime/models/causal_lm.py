"""The interface of models: what the runner needs, and what a model can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.files.vector_files import VectorSettings
from engine.runtime.kv_layout import StateSpec
from engine.runtime.layers.parts import LayerStates, Target
from engine.runtime.lora.loader import AdapterRows
from engine.runtime.models.pooler import Pooler
from engine.runtime.native.decoder import NativeDecoder, Streams, Vectors
from engine.runtime.native.library import LinearArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapabilities:
    """What a loaded model can do. Declared once by each kind of model, asked at build time."""

    adapters: bool = False  # `forward` takes adapters, `adapter_targets` names the matrices
    graphs: bool = False  # its forward pass may be captured in a CUDA graph
    native: bool = False  # its products run in the native library, on the library's threads
    generates: bool = True  # it has an LM head; without one its final states are served as vectors
    both_ways: bool = False  # each token attends to those behind it, too: a prompt is computed in one step
    heads: bool = False  # `forward` copies out streams and `embed` looks tokens up, for heads that draft


class Described(NamedTuple):
    """A model in the native library: its layers, its head, and how logits are scaled, see `scale_logits`."""

    decoder: NativeDecoder
    head: LinearArgs
    multiplier: float
    cap: float


class CausalLM(Protocol):
    """A model, Quire's own or transformers'."""

    states: Sequence[StateSpec]  # the states of its layers, in order
    vocab_size: int  # of the logits
    max_model_len: int  # positions the weights were made for
    dtype: torch.dtype
    adapter_targets: Mapping[str, Target]  # the matrices that adapters can change, by their names in checkpoints
    vectors: VectorSettings  # how vectors are made of its states
    pooler: Pooler | None  # what comes behind the pooling of states

    @property
    def capabilities(self) -> ModelCapabilities:
        """Return what the model can do, once it is loaded."""

    @property
    def described(self) -> Described | None:
        """Return what the library knows of the model, if it computes all of it, on one rank."""

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
        """Return the final, normed hidden states [R, hidden] of `rows` [R] int64, or of all; ids, positions [T].

        Of images, which only models with a vision tower get, there are `vectors`, and perhaps positions [3, T].
        Each adapter adds to its rows of the T; the bits of all other rows are the same as without. `streams` are
        written by models with the capability `heads`.
        """

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, vocab_size] of hidden states, in `out` if given."""
