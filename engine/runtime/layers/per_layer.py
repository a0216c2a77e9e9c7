"""Per-layer embeddings (Gemma 3n and 4): each layer has an input of its own for each token, and takes it in behind its
feed-forward.

The input of all layers is half a row of a table, and half a normed product with the token's embedding. Tables are larger
than the rest of small models, and a step reads a few rows of one: on a CPU, rows of floats stay in the file.
"""

from __future__ import annotations

from ctypes import Structure

import torch
from torch import Tensor

from engine.runtime.layers.maker import Load, Maker
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import add_rms_norm
from engine.runtime.native.decoder import describe_part, norm_args
from engine.runtime.native.library import DTYPES, PLAIN, LinearArgs, PartArgs
from engine.runtime.native.structs import mirror
from engine.runtime.schemes.activations import activate
from engine.runtime.schemes.linear import Embedding

_HALF = 0.5**0.5  # of two independent terms, whose sum has the variance of one


@mirror("per_layer_inputs")
class InputsArgs(Structure):
    """The table and the projection, for the native library."""


class PerLayerInputs:
    """The inputs of all layers: row(id) + norm(projection of the embedding), each scaled."""

    _args: InputsArgs  # C keeps its address

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self._width, self._dtype = config.layer_inputs, make.dtype
        whole = self._width * len(config.layers)
        self._table = Embedding()
        self._num_rows = config.num_input_rows or config.vocab_size
        self._is_short = self._num_rows < config.vocab_size
        make.table("model.embed_tokens_per_layer", self._num_rows, whole, self._table)
        self._projection = make.linear({"model.per_layer_model_projection": whole}, config.hidden_size)
        self._norm = make.tensor("model.per_layer_projection_norm.weight", self._width, dtype=torch.float32)
        make.loads.append(Load({}, lambda _: self._norm.mul_(_HALF)))
        self._scale = torch.tensor(self._width**0.5, dtype=make.dtype).item() * _HALF
        # The projection is divided by the root of the hidden size before its norm, which changes only what is added to it.
        self._eps = config.norm_eps * config.hidden_size

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return [T, layers, width] in float32 of ids [T] and their scaled embeddings x [T, hidden]."""
        if self._is_short:
            ids = ids.where(ids < self._num_rows, 0)
        projected = self._projection.in_float32(x).view(-1, self._width)
        normed = add_rms_norm(projected, None, self._norm, self._eps).view(len(ids), -1)
        return normed.add_(self._table(ids).float(), alpha=self._scale).unflatten(1, (-1, self._width))

    def describe(self) -> InputsArgs | None:
        """Describe it to the native library, if that multiplies the projection."""
        table = self._table.described
        if self._projection.args is None:
            return None
        self._args = InputsArgs(projection=self._projection.args, norm=norm_args(self._norm), width=self._width)
        self._args.scale, self._args.eps, self._args.num_rows = self._scale, self._eps, self._num_rows
        if isinstance(table, LinearArgs):
            self._args.table, self._args.format, self._args.dtype = table.packed, table.format, table.dtype
        else:
            self._args.table, self._args.format, self._args.dtype = table.data_ptr(), PLAIN, DTYPES[table.dtype]
        return self._args


@mirror("per_layer")
class GateArgs(Structure):
    """What the native library needs beside matrices."""


class PerLayerGate:
    """The part behind a layer's feed-forward: projection(activation(gate x) * the layer's input)."""

    _args: GateArgs  # C keeps its address

    def __init__(self, config: ModelConfig, layer: int, make: Maker) -> None:
        self._layer, self._width, self._activation = layer, config.layer_inputs, config.activation
        self._gate = make.linear({"per_layer_input_gate": self._width}, config.hidden_size)
        self._projection = make.linear({"per_layer_projection": config.hidden_size}, self._width)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return [T, hidden] of the stream x [T, hidden] and the inputs of all layers [T, layers, width]."""
        gate = activate(self._gate(x), self._activation)
        return self._projection((gate * inputs[:, self._layer]).to(x.dtype))

    def describe(self) -> PartArgs | None:
        """Describe the part to the native library, if that holds both matrices."""
        self._args = GateArgs(first=self._layer * self._width, activation=self._activation.value)
        return describe_part("per_layer", (self._gate.args, self._projection.args), self._args)
