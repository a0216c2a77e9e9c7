"""Names of tensors in GGUF files, as Hugging Face's, with every expert by itself.

GGUF stacks the experts of a layer in one tensor [experts, rows, columns]; it is cut into ranges of rows. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2's, which is behind the last layer, too
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GLOBAL_STACKS = {"altup_proj": "model.altup_projections", "altup_unembd_proj": "model.altup_unembed_projections"}
_ENCODERS = ("bert", "nomic-bert", "modern-bert")  # encoder_names.py knows their names
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
}
_WHOLE_NAMES = {
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "ffn_gate_inp.scale": "moe.gate_norm.weight",
    "ffn_down_exps.scale": "moe.gate.per_expert_scale",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_sinks.weight": "self_attn.sinks",
}
_AFTER_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICH = _AFTER_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",  # of which it holds -exp
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_a": "mamba.A_log",  # of which it holds -exp
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
# The norm ahead of the MLP, of which the converter leaves out the ending where it was called pre_ff_layernorm.
_UNENDED = dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight")
_SHORT_CONV = {
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.o_proj",
}
_NEMOTRON = _MAMBA | {"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_BY_ARCH = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma-embedding": _SANDWICH,
    "gemma3n": _SANDWICH
    | _PER_LAYER
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    "gemma4": _SANDWICH
    | _PER_LAYER
    | {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "moe.gate",
    },
    "olmo2": _AFTER_NORMS,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm"},  # ahead of the MLP
    "glm4moe": {"post_attention_norm": "post_attention_layernorm"},
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "qwen3next": _DELTA,
    "granitehybrid": _MAMBA | _UNENDED,
    "falcon-h1": _MAMBA | _UNENDED,
    "mamba2": _MAMBA,
    "lfm2": _SHORT_CONV,
    "lfm2moe": _SHORT_CONV,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
_MERGED = ("granite_swa", "ffn_up_shexp")  # an architecture, and its tensor of the shared expert's gates and then ups
_STACK = re.compile(r"ffn_(gate|up|down|gate_up)_exps")
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")  # files of before the stacks
_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")  # in transformers' form, each channel reads one
_MATRICES = ("mlp.shared_expert_gate.weight",)  # of one row, which the file has as a vector


class Part(NamedTuple):
    """A tensor for Quire within one of a file: its rows from `first_row` on."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


def parts_of(arch: str, name: str, shape: tuple[int, ...], num_layers: int) -> Iterator[Part]:
    """Yield the tensors that a file's tensor holds: itself, one an expert, or none.

    Layers after the last predict later tokens; they are left out.
    """
    layer = _LAYER.fullmatch(name)
    if arch in _ENCODERS:
        yield Part(name, shape)
        return
    if layer is None:
        stem, _, ending = name.rpartition(".")
        if stem in _GLOBAL_STACKS and len(shape) > 1:
            for place in range(shape[0]):
                yield Part(f"{_GLOBAL_STACKS[stem]}.{place}.{ending}", shape[1:], place * shape[1])
            return
        yield Part(f"{_GLOBAL[stem]}.{ending}" if stem in _GLOBAL else name, shape)
        return
    if int(layer[1]) < num_layers:
        yield from _parts_in_layer(arch, name, shape, *layer.groups())


def _parts_in_layer(arch: str, name: str, shape: tuple[int, ...], index: str, role: str, ending: str) -> Iterator[Part]:
    prefix, expert = f"model.layers.{index}.", _EXPERT.fullmatch(role)
    if len(shape) > 1 and (stack := _STACK.fullmatch(role)):
        experts = f"{prefix}{'moe' if arch == 'gemma4' else 'mlp'}.experts"
        yield from _cut_stack([f"{experts}.{each}" for each in range(shape[0])], stack[1], ending, shape)
        return
    if (arch, role) == _MERGED:
        yield from _cut_stack([f"{prefix}mlp.shared_expert"], "gate_up", ending, (1, *shape))
        return
    names: Mapping[str, str] = _WHOLE_NAMES | _IN_LAYER | _BY_ARCH.get(arch, {})
    whole = role if ending is None else f"{role}.{ending}"
    if expert is not None:
        found = f"mlp.experts.{expert[2]}.{expert[1]}_proj.{ending}"
    elif whole in names:
        found = names[whole]
    elif role in names:
        found = f"{names[role]}.{ending}"
    else:
        found = ""
    if found in _MATRICES and len(shape) == 1:
        shape = (1, *shape)
    if found.endswith(_CONVOLUTIONS):
        shape = (shape[0], 1, *shape[1:])
    elif len(shape) == 3:  # the heads of a matrix
        shape = (shape[0] * shape[1], shape[2])
    yield Part(prefix + found if found else name, shape)


def _cut_stack(modules: Sequence[str], matrix: str, ending: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield every expert's matrix or bias; of merged ones the gate, then the up."""
    roles = ("gate", "up") if matrix == "gate_up" else (matrix,)
    num_rows = math.prod(shape[1:-1]) // len(roles)
    one = shape[1:] if len(roles) == 1 else (num_rows, *shape[2:])
    for expert, module in enumerate(modules):
        for place, role in enumerate(roles):
            first = (expert * len(roles) + place) * num_rows
            yield Part(f"{module}.{role}_proj.{ending}", one, first)
