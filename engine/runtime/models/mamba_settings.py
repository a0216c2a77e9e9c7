"""The Mamba-2 layers of model families, from their config.json. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation
from engine.runtime.layers.model_config import LayerConfig, MambaConfig
from engine.runtime.models import common_settings as common
from engine.runtime.models.expert_settings import nemotron_experts

# The names of sizes, and their defaults.
_GRANITE = {
    "num_heads": ("mamba_n_heads", 128),
    "num_groups": ("mamba_n_groups", 1),
    "state_dim": ("mamba_d_state", 256),
    "kernel": ("mamba_d_conv", 4),
}
_MAMBA2 = {
    "num_heads": ("num_heads", 128),
    "num_groups": ("n_groups", 8),
    "state_dim": ("state_size", 128),
    "kernel": ("conv_kernel", 4),
}
_NEMOTRON = {
    "num_heads": ("mamba_num_heads", 128),
    "num_groups": ("n_groups", 8),
    "state_dim": ("ssm_state_size", 128),
    "kernel": ("conv_kernel", 4),
}
_BLOCKS = {  # published names, transformers' names and the letters of patterns
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", common.FULL), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}
_MAX_STEP = 1e30  # of finite bounds; float32 has more
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", common.FULL)  # published names, transformers' names


def with_mamba(hf: HFConfig, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Return layers of which those that `layer_types` names, all by default, are Mamba-2."""
    types = common.layer_types(hf, [_MAMBA[0]] * len(layers), (*_MAMBA, *_ATTENTION))
    if set(_MAMBA).isdisjoint(types):
        return tuple(layers)
    mamba = mamba_sizes(hf)
    return tuple(
        replace(layer, rope=None, mixer="mamba", recurrent=mamba) if kind in _MAMBA else layer
        for kind, layer in zip(types, layers, strict=True)
    )


def one_part_layers(hf: HFConfig) -> tuple[LayerConfig, ...]:
    """Return Nemotron's layers: each is Mamba-2, attention, an MLP or a mixture alone, as a list or a pattern says."""
    is_listed = hf.has("layers_block_type")
    key = "layers_block_type" if is_listed else "hybrid_override_pattern"
    kinds = [_BLOCKS.get(each) for each in (hf.texts(key) if is_listed else hf.text(key))]
    if None in kinds or not {"attention", "mamba"}.intersection(kinds):
        raise hf.error(key, f"{', '.join(_BLOCKS)}, one a layer, and one of them attention or mamba")
    hf = HFConfig({**hf.values, "num_hidden_layers": len(kinds)}, hf.source)
    mamba = _mamba_of_nemotron(hf) if "mamba" in kinds else None
    moe = nemotron_experts(hf)[0] if "moe" in kinds else None
    attention = LayerConfig(common.heads(hf), None, None, has_feed_forward=False)
    layers = {
        "attention": attention,
        "mamba": replace(attention, mixer="mamba", recurrent=mamba),
        "mlp": replace(attention, mixer="", has_feed_forward=True),
        "moe": replace(attention, mixer="", has_feed_forward=True, moe=moe),
    }
    return tuple(layers[kind] for kind in kinds if kind is not None)


def mamba_sizes(hf: HFConfig) -> MambaConfig:
    """Return the sizes of Mamba-2 layers, in the names of Granite 4."""
    width = hf.size("mamba_d_ssm", hf.size("mamba_expand", 2) * hf.size("hidden_size"))
    num_heads, is_auto = hf.size(*_GRANITE["num_heads"]), hf.values.get("mamba_d_head", "auto") == "auto"
    head_dim = width // num_heads if is_auto else hf.size("mamba_d_head")
    if num_heads * head_dim != width:
        raise hf.error("mamba_d_head", f"{width // num_heads}, for {num_heads} heads of {width} numbers")
    return _read(hf, _GRANITE, head_dim, _step_limit(hf), biases=("mamba_conv_bias", "mamba_proj_bias"))


def mamba_alone(hf: HFConfig) -> MambaConfig:
    """Return the same in the names of models that have nothing else."""
    return _read(hf, _MAMBA2, hf.size("head_dim", 64), _step_limit(hf))


def _mamba_of_nemotron(hf: HFConfig) -> MambaConfig:
    """Return the same in the names of Nemotron, whose steps have a lower bound alone, as in transformers."""
    if _step_limit(hf) != (0.0, math.inf):
        raise hf.error("time_step_limit", "0 and infinity: 'time_step_min' is the bound of this family")
    step_limit = (hf.number("time_step_min", 0.001), math.inf)
    return _read(hf, _NEMOTRON, hf.size("mamba_head_dim", 64), step_limit, activation="mamba_hidden_act")


def _read(
    hf: HFConfig,
    names: Mapping[str, tuple[str, int]],
    head_dim: int,
    step_limit: tuple[float, float],
    *,
    biases: tuple[str, str] = ("use_conv_bias", "use_bias"),
    activation: str = "hidden_act",
) -> MambaConfig:
    """Return the sizes by their names. Raises ModelLoadError for those that no layer can have."""
    num_heads, num_groups = hf.size(*names["num_heads"]), hf.size(*names["num_groups"])
    if num_heads % num_groups:
        raise hf.error(names["num_groups"][0], f"a number that divides {names['num_heads'][0]}, {num_heads}")
    if common.activation(hf, activation, "silu") is not Activation.SILU:
        raise hf.error(activation, "silu, which the convolution has too")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=hf.size(*names["state_dim"]),
        kernel=common.taps(hf, *names["kernel"]),
        has_conv_bias=hf.flag(biases[0], True),
        has_bias=hf.flag(biases[1]),
        step_limit=step_limit,
    )


def _step_limit(hf: HFConfig) -> tuple[float, float]:
    """Return the bounds of a token's step; transformers writes infinity, which JSON lacks, as an object."""
    values = hf.values.get("time_step_limit")
    if values is None:
        return 0.0, math.inf
    found = [
        math.inf if isinstance(each, Mapping) and each.get("__float__") == "Infinity" else each
        for each in (values if isinstance(values, (list, tuple)) else ())
    ]
    found = [each for each in found if isinstance(each, (int, float)) and (each == math.inf or abs(each) < _MAX_STEP)]
    if len(found) != 2 or len(values) != 2 or found[0] > found[1] or found[0] == math.inf or found[1] < 0:
        raise hf.error("time_step_limit", "two numbers, of which the second is 0 or more, and may be infinite")
    return float(found[0]), float(found[1])
