"""What Gemma 3n and 4 have beside other decoders: alternating updates, and inputs of each layer.

Alternating updates (Gemma 3n) are several residual streams, of which a layer computes one and corrects the others. A layer predicts all streams from all streams, computes its parts on the first one, and moves each by a share of what it found
beyond the prediction. Beside its attention stands a product of low rank (LAuReL). The torch operations here define the
arithmetic; the native library has each part in a file of its own.

With per-layer embeddings each layer has an input for each token, and takes it in behind its feed-forward. The input of all
layers is half a row of a table, and half a normed product with the token's embedding. Tables are larger
than the rest of small models, and a step reads a few rows of one: on a CPU, rows of floats stay in the file.
"""

from __future__ import annotations

from ctypes import Structure, addressof
from statistics import NormalDist

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import Tensor

from engine.runtime.layers.attention import Attention
from engine.runtime.layers.mlp import MLP
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import RMSNorm, add_rms_norm
from engine.runtime.layers.parts import AdaptedMatrix, Angles, LayerAdapters, LayerStates, Load, Maker, adapted
from engine.runtime.native.library import LayerArgs, LinearArgs, PartArgs
from engine.runtime.native.parts import describe_part, norm_args
from engine.runtime.native.structs import mirror, structure
from engine.runtime.schemes.linear import Embedding, activate

_HALF = 0.5**0.5  # of two independent terms, whose sum has the variance of one


@mirror("per_layer_inputs")
class InputsArgs(Structure):
    """The table and the projection, for the native library."""


class PerLayerInputs:
    """The inputs of all layers: row(id) + norm(projection of the embedding), each scaled."""

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
        self._args = InputsArgs(  # C keeps its address
            table=table.packed,
            format=table.format,
            dtype=table.dtype,
            num_rows=self._num_rows,
            width=self._width,
            projection=self._projection.args,
            norm=norm_args(self._norm),
            scale=self._scale,
            eps=self._eps,
        )
        return self._args


GateArgs = structure("per_layer")  # what the native library needs beside matrices


class PerLayerGate:
    """The part behind a layer's feed-forward: projection(activation(gate x) * the layer's input)."""

    def __init__(self, config: ModelConfig, layer: int, make: Maker) -> None:
        self._layer, self._width, self._activation = layer, config.layer_inputs, config.activation
        self._gate = make.linear({"per_layer_input_gate": self._width}, config.hidden_size)
        self._projection = make.linear({"per_layer_projection": config.hidden_size}, self._width)

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Return [T, hidden] of the stream x [T, hidden] and the inputs of all layers [T, layers, width]."""
        gate = activate(self._gate(x), self._activation)
        return self._projection((gate * inputs[:, self._layer]).to(x.dtype))

    def describe(self) -> PartArgs | None:
        self._args = GateArgs(first=self._layer * self._width, activation=self._activation.value)  # C keeps its address
        return describe_part("per_layer", (self._gate.args, self._projection.args), self._args)


_LEAST = 1e-5  # of a mean square that divides
EndsArgs = structure("altup_ends")  # for the native library: the matrices of the streams' ends


class Streams:
    """Makes the streams of embeddings, and one vector of the streams that leave the last layer."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        assert config.altup is not None, "the family has its settings"
        hidden, others = config.hidden_size, range(config.altup.num_streams - 1)
        self._spread = make.linear({f"model.altup_projections.{i}": hidden for i in others}, hidden)
        self._gather = [make.linear({f"model.altup_unembed_projections.{i}": hidden}, hidden) for i in others]

    def spread(self, x: Tensor) -> Tensor:
        """Return [T, streams, hidden] of x [T, hidden]: products with it, each of its length."""
        others = self._spread.in_float32(x).unflatten(1, (-1, x.shape[1]))
        return torch.cat((x[:, None], _of_length(others, x[:, None]).to(x.dtype)), 1)

    def gather(self, x: Tensor) -> Tensor:
        """Return [T, hidden], the mean of the streams, each of the first one's length."""
        first, *others = (each.contiguous() for each in x.unbind(1))
        rest = [_of_length(matrix.in_float32(each), first) for matrix, each in zip(self._gather, others, strict=True)]
        return torch.stack([first.float(), *rest]).mean(0).to(x.dtype)

    def describe(self) -> PartArgs | None:
        """Describe the part before the first layer to the native library, if that holds every matrix."""
        gather = [matrix.args for matrix in self._gather if matrix.args is not None]
        if self._spread.args is None or len(gather) < len(self._gather):
            return None
        self._array = (LinearArgs * len(gather))(*gather)
        self._args = EndsArgs(spread=self._spread.args, gather=addressof(self._array))  # C keeps both addresses
        return describe_part("altup_start", args=self._args)


def _of_length(x: Tensor, like: Tensor) -> Tensor:
    """Return x in float32, each row with the length of the one in `like`."""
    wanted, own = (each.float().square().mean(-1, keepdim=True) for each in (like, x))
    return x.float() * wanted.sqrt() / own.clamp(min=_LEAST).sqrt()


MixingArgs = structure("mixing")  # what a layer does to the streams
AltUpArgs = structure("altup")  # for the native library: the gate behind a layer and what else it does to the streams
LaurelArgs = structure("laurel")  # for the native library: a mixer and the product beside it


class AltUpLayer:
    """A layer over several streams."""

    is_capturable = True

    def __init__(self, config: ModelConfig, layer: int, make: Maker, *, state: int) -> None:
        """`state` is the number of states of all layers before."""
        assert config.altup is not None, "the family has its settings"
        num, hidden, rank = config.altup.num_streams, config.hidden_size, config.altup.rank
        sparsity = config.layers[layer].sparsity
        self._attention = Attention(config, layer, make, state)
        self.states = self._attention.states
        self._feed_forward = SparseMLP(config, layer, make, sparsity) if sparsity else MLP(config, layer, make)
        self._before, self._after, self._before_ff, self._after_ff, self._after_gate = (
            RMSNorm(make, name, hidden, config)
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
                "post_per_layer_input_norm",
            )
        )
        self._gate = PerLayerGate(config, layer, make)
        self._left = make.linear({"laurel.linear_left": rank}, hidden)
        self._right = make.linear({"laurel.linear_right": hidden}, rank)
        self._after_laurel = RMSNorm(make, "laurel.post_laurel_norm", hidden, config)
        norm = make.tensor("altup.router_norm.weight", hidden, dtype=torch.float32)
        self._router, self._predict, self._correct = (
            make.tensor(f"altup.{name}.weight", *shape, dtype=torch.float32)
            for name, shape in (
                ("modality_router", (num, hidden)),
                ("prediction_coefs", (num * num, num)),
                ("correction_coefs", (num, num)),
            )
        )
        self._scale = make.tensor("altup.correct_output_scale", hidden, dtype=torch.float32)
        self._eps, is_scaled = config.norm_eps, config.altup.scales_output

        def complete(_: object) -> None:
            self._router.mul_(norm / hidden)
            self._after.weight.mul_(_HALF)
            if not is_scaled:
                self._scale.fill_(1.0)

        make.loads.append(Load({}, complete))

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,  # noqa: ARG002 - the layer before has added its own
        angles: Angles | None,
        attention: LayerStates,
        adapters: LayerAdapters | None,
        inputs: Tensor | None = None,
    ) -> None:
        """Replace the streams x [T, streams, hidden] by those that leave the layer."""
        assert inputs is not None, "the family has inputs of layers"
        streams = x.float()
        coefficients = F.linear(self._modalities(x[:, 0]), self._predict).view(len(x), *[x.shape[1]] * 2)
        predicted = coefficients @ streams + streams
        active = predicted[:, 0].to(x.dtype)
        normed = self._before(active)
        laurel = normed + self._after_laurel(self._right(self._left(normed)))
        mixed = (active + laurel) * _HALF + self._after(self._attention(normed, angles, attention, adapters))
        found = mixed + self._after_ff(self._feed_forward(self._before_ff(mixed), adapters))
        shares = F.linear(self._modalities(found), self._correct) + 1.0
        corrected = predicted + shares[..., None] * (found - predicted[:, 0])[:, None]
        x.copy_(corrected)
        first = (corrected[:, 0] * self._scale).to(x.dtype)
        x[:, 1:] += self._after_gate(self._gate(first, inputs))[:, None]

    def _modalities(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x.float(), x.shape[-1:], None, self._eps), self._router).tanh()

    def describe(self, rotary: int) -> LayerArgs | None:
        """Describe the loaded layer, of this rotary or -1, to the native library; None if that cannot compute it."""
        mixer, feed_forward, gate = self._attention.describe(), self._feed_forward.describe(), self._gate.describe()
        left, right = self._left.args, self._right.args
        if mixer is None or feed_forward is None or gate is None or left is None or right is None:
            return None
        self._laurel = LaurelArgs(mixer, left, right, self._after_laurel.weight.data_ptr())
        weights = (self._router, self._predict, self._correct, self._scale, self._after_gate.weight)
        self._args = AltUpArgs(gate, MixingArgs(*(weight.data_ptr() for weight in weights)))  # C keeps both addresses
        return LayerArgs(
            mixer=describe_part("laurel", (LinearArgs(), mixer.last), self._laurel),
            feed_forward=feed_forward,
            gate=describe_part("altup", args=self._args),
            before_mixer=norm_args(self._before.weight),
            after_mixer=norm_args(self._after.weight),
            before_feed_forward=norm_args(self._before_ff.weight),
            after_feed_forward=norm_args(self._after_ff.weight),
            stream_scale=1.0,
            rotary=rotary,
        )


SparseMLPArgs = structure("sparse_mlp")  # what the native library needs beside matrices


class SparseMLP:
    """An MLP whose gates are 0 below a share of them: their mean plus so many standard deviations is taken off first."""

    is_capturable = True

    def __init__(self, config: ModelConfig, layer: int, make: Maker, sparsity: float) -> None:
        make = make.within("mlp")
        hidden, width = config.hidden_size, config.layers[layer].width or config.intermediate_size
        self._gate_up = make.linear({"gate_proj": width, "up_proj": width}, hidden, place=AdaptedMatrix.GATE_UP)
        self._down = make.linear({"down_proj": hidden}, width, place=AdaptedMatrix.DOWN)
        self._deviations, self._activation = NormalDist().inv_cdf(sparsity), config.activation

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Return [T, hidden] of normed x [T, hidden]."""
        gate, up = adapted(self._gate_up, AdaptedMatrix.GATE_UP, x, adapters).chunk(2, 1)
        wide = gate.float()
        cut = wide.mean(-1, keepdim=True) + wide.std(-1, keepdim=True, correction=0) * self._deviations
        inner = activate((wide - cut).relu().to(gate.dtype), self._activation) * up
        return adapted(self._down, AdaptedMatrix.DOWN, inner, adapters)

    def describe(self) -> PartArgs | None:
        self._args = SparseMLPArgs(self._deviations, self._activation.value)  # C keeps its address
        return describe_part("sparse_mlp", (self._gate_up.args, self._down.args), self._args)
