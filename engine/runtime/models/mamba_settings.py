"""The Mamba-2 layers of model families, from their config.json. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import LayerConfig, MambaConfig
from engine.runtime.models import common_settings as common

_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", common.FULL)  # published names, transformers' names


def with_mamba(hf: HFConfig, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return layers of which those that `layer_types` names, all by default, are Mamba-2."""
    types = common.layer_types(hf, [_MAMBA[0]] * len(layers), (*_MAMBA, *_ATTENTION))
    if set(_MAMBA).isdisjoint(types):
        return tuple(layers)
    if set(_ATTENTION).isdisjoint(types):
        raise hf.error("layer_types", "a layer with attention, whose keys and values give blocks their size")
    mamba = _mamba(hf)
    return tuple(
        replace(layer, rope=None, mixer="mamba", recurrent=mamba) if kind in _MAMBA else layer
        for kind, layer in zip(types, layers, strict=True)
    )


def _mamba(hf: HFConfig) -> MambaConfig:
    """Return the sizes of Mamba-2 layers, in the names of Granite 4."""
    num_heads = hf.size("mamba_n_heads", 128)
    width = hf.size("mamba_d_ssm", hf.size("mamba_expand", 2) * hf.size("hidden_size"))
    is_auto = hf.values.get("mamba_d_head", "auto") == "auto"
    mamba = MambaConfig(
        num_heads=num_heads,
        head_dim=width // num_heads if is_auto else hf.size("mamba_d_head"),
        num_groups=hf.size("mamba_n_groups", 1),
        state_dim=hf.size("mamba_d_state", 256),
        kernel=hf.size("mamba_d_conv", 4),
        has_conv_bias=hf.flag("mamba_conv_bias", True),
        has_bias=hf.flag("mamba_proj_bias"),
        step_limit=_step_limit(hf),
    )
    if num_heads % mamba.num_groups:
        raise hf.error("mamba_n_groups", f"a number that divides mamba_n_heads, {num_heads}")
    if mamba.width != width:
        raise hf.error("mamba_d_head", f"{width // num_heads}, for {num_heads} heads of {width} numbers")
    if mamba.kernel < 2:
        raise hf.error("mamba_d_conv", "2 or more, because a state keeps the tokens before")
    if common.activation(hf, "hidden_act", "silu") is not Activation.SILU:
        raise hf.error("hidden_act", "silu, which the convolution has too")
    return mamba


def _step_limit(hf: HFConfig) -> tuple[float, float]:
    """Return the bounds of a token's step; transformers writes infinity, which JSON lacks, as an object."""
    values = hf.values.get("time_step_limit")
    if values is None:
        return 0.0, math.inf
    found = [
        math.inf if isinstance(each, Mapping) and each.get("__float__") == "Infinity" else each
        for each in (values if isinstance(values, (list, tuple)) else ())
    ]
    if len(found) != 2 or not all(isinstance(each, (int, float)) for each in found) or found[0] > found[1]:
        raise hf.error("time_step_limit", "two numbers, of which the second may be infinite")
    return float(found[0]), float(found[1])
