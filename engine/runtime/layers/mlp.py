"""The dense feed-forward: gates, ups, and a product back; or ups alone."""

from __future__ import annotations

from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.parts import AdaptedMatrix, LayerAdapters, Maker, adapted, summed
from engine.runtime.layers.shards import Plan, colwise, rowwise
from engine.runtime.native.library import PartArgs
from engine.runtime.native.parts import describe_part

_PLAN: Plan = {
    "gate_proj": colwise("width"),
    "up_proj": colwise("width"),
    "gate_up_proj": colwise("width", "width"),
    "down_proj": rowwise("width"),
}


def widths_of(activation: Activation, width: int) -> dict[str, int]:
    """Return the matrices that an activation takes, and their rows."""
    return dict.fromkeys(("gate_proj", "up_proj") if activation.is_gated else ("up_proj",), width)


class MLP:
    """down(act(gate x) * up x), gate and up from one matrix; or down(act(up x))."""

    is_capturable = True

    def __init__(self, config: ModelConfig, layer: int, make: Maker) -> None:
        make = make.within("mlp", plan=_PLAN)
        hidden, bias = config.hidden_size, config.mlp_bias
        width = config.layers[layer].width or config.intermediate_size
        rows = {"gate_up_proj": 2 * width} if config.merged_checkpoint else widths_of(config.activation, width)
        self._gate_up = make.linear(rows, hidden, bias=bias, activation=config.activation, place=AdaptedMatrix.GATE_UP)
        self._down = make.linear({"down_proj": hidden}, width, bias=bias, place=AdaptedMatrix.DOWN)
        self._group = make.group

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        inner = adapted(self._gate_up, AdaptedMatrix.GATE_UP, x, adapters)
        return summed(self._down, AdaptedMatrix.DOWN, inner, adapters, self._group)

    def describe(self) -> PartArgs | None:
        return describe_part("mlp", (self._gate_up.args, self._down.args))
