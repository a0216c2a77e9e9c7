"""A feed-forward of two: a dense MLP, and a mixture of experts beside it (Gemma 4), each between norms of its own.

The router reads the stream through a norm of its own, too.
"""

from __future__ import annotations

from ctypes import Structure

from torch import Tensor

from engine.runtime.layers.adapters import LayerAdapters
from engine.runtime.layers.maker import Load, Maker
from engine.runtime.layers.mixture import MoE
from engine.runtime.layers.mlp import MLP
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.norms import RMSNorm
from engine.runtime.native.decoder import describe_part, norm_args
from engine.runtime.native.library import PartArgs
from engine.runtime.native.structs import mirror

_NORMS = {  # their names in a checkpoint
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm_1",
    "before_router": "moe.gate_norm",
    "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
}


@mirror("beside")
class BesideArgs(Structure):
    """Both parts and their norms, for the native library."""


class MLPBesideMixture:
    """norm(mlp(norm x)) + norm(experts(norm x))."""

    _args: BesideArgs  # C keeps its address

    def __init__(self, config: ModelConfig, layer: int, make: Maker) -> None:
        moe, hidden = config.layers[layer].moe, config.hidden_size
        assert moe is not None, "the layer has the settings of a mixture"
        self._mlp, self._experts = MLP(config, layer, make), MoE(moe, hidden, make.within("moe"))
        self._norms = {place: RMSNorm(make, name, hidden, config) for place, name in _NORMS.items()}
        router = self._norms["before_router"]
        make.loads.append(Load({}, lambda _: router.weight.mul_(hidden**-0.5)))

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph can hold the experts."""
        return self._experts.is_capturable

    @property
    def lacking(self) -> str:
        """Return a matrix of the experts that the native library does not multiply."""
        return self._experts.lacking

    def __call__(self, x: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Return [T, hidden] of the stream x [T, hidden], which stays as it is."""
        norms = self._norms
        dense = norms["after_mlp"](self._mlp(norms["before_mlp"](x), adapters))
        experts = self._experts(norms["before_experts"](x), routed=norms["before_router"](x))
        return dense + norms["after_experts"](experts)

    def describe(self) -> PartArgs | None:
        """Describe the part to the native library, if that holds every matrix."""
        mlp, experts = self._mlp.describe(), self._experts.describe()
        if mlp is None or experts is None:
            return None
        norms = {place: norm_args(norm.weight) for place, norm in self._norms.items()}
        self._args = BesideArgs(mlp=mlp, experts=experts, **norms)
        return describe_part("beside", args=self._args)
