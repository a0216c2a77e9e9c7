"""Names of tensors in safetensors: Quire's, for what each kind of model has in its files.

Inside Quire every expert has its matrices under its number, `mlp.experts.3.gate_proj.weight`. Some files hold all experts of a
layer as one stack; it is cut into views, and nothing is copied. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from engine.files.hf_config import HFConfig

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# A stack of experts: the module, the matrix, and the ending of a plain, biased, packed or scaled one.
_STACK = re.compile(r"(.+\.(?:mlp|moe)\.experts)\.(gate_up_proj|up_proj|down_proj)((?:_bias|_blocks|_scales)?)")
_GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa")
_GRANITE = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_BAMBA = {"feed_forward": "mlp", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
_BACKBONE = {"norm_f": "norm", "embeddings": "embed_tokens"}
_LFM2 = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "expert_bias": "gate.e_score_correction_bias",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "out_proj": "o_proj",
    **_MIXTRAL,
}
# Parts of the path of a module that a kind of model spells in its way.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "mixtral": {"block_sparse_moe": "mlp", **_MIXTRAL},
    **{kind: {"block_sparse_moe": "mlp"} for kind in _GRANITES},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": {
        **_LFM2,
        "out_proj": "out_proj",
        "post_operator_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
    },
    "gpt_oss": {"router": "gate"},
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "nemotron_h": {**_BACKBONE, "shared_experts": "shared_expert"},
    "mamba2": _BACKBONE,
    "deepseek_v2": {"shared_experts": "shared_expert"},
    "deepseek_v3": {"shared_experts": "shared_expert"},
    "glm4_moe": {"shared_experts": "shared_expert"},
    "glm4_moe_lite": {"shared_experts": "shared_expert"},
}
# Their heads for later tokens are in layers after the last; Qwen 3.5's, which is apart, is given DeepSeek's names.
_WITH_HEADS_FOR_LATER_TOKENS = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)
_HEAD = re.compile(r"mtp\.(?:layers\.(\d+)|(fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm))\.(.+)")
_HEAD_MODULES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_GEMMA4 = {
    ".experts.": ".moe.experts.",
    ".router.proj.": ".moe.gate.",
    ".router.scale": ".moe.gate_norm.weight",
    ".router.per_expert_scale": ".moe.gate.per_expert_scale",
}
_OF_ONE_PART = ("nemotron_h", "mamba2")  # a layer has one part, `mixer`, and one norm
_NEMOTRON_NORM = re.compile(r"(\.layers\.\d+)\.norm\.")
_NEMOTRON_MIXER = re.compile(r"\.mixer\.(\w+)")
_NEMOTRON_PARTS = {
    **dict.fromkeys(("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj"), "mamba"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
}  # all others are of feed-forwards
_SHARING = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
_KEYS_OR_VALUES = re.compile(r"layers\.(\d+)\.self_attn\.([kv]_(?:proj|norm))\.")


class Part(NamedTuple):
    """A tensor for Quire within one of a file; `view` cuts it out, without a copy.

    Its rows begin at element `first`, and every `step`-th is its own. If it is transposed, `first` is None.
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor]
    first: int | None = 0
    step: int = 1


def expert_parts(config: HFConfig, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the tensors that a file's tensor holds: itself, one an expert, or none."""
    kind = str(config.values.get("model_type"))
    if kind in _WITH_HEADS_FOR_LATER_TOKENS:
        name = _behind_the_last(name, config.size("num_hidden_layers"))
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) >= num_read_layers(config):
            return
    if ".self_attn." in name and kind in _SHARING:
        yield from (Part(each, shape, _whole) for each in names_of(config, name))
        return
    if ".shared_mlp." in name and kind in _GRANITES:
        yield from _granite_shared(config, name, shape)
        return
    if kind == "gemma4_text":
        name = next((name.replace(theirs, ours) for theirs, ours in _GEMMA4.items() if theirs in name), name)
    if kind == "nemotron_h" and name.startswith("mtp."):  # its head for later tokens is not served
        return
    if kind in _RENAMED:
        name = _renamed(kind, name)
    stack = _STACK.fullmatch(name)
    if stack is None or len(shape) < 2:
        yield Part(name, shape, _whole)
        return
    module, matrix, ending = stack.groups()
    is_transposed = kind == "gpt_oss" and not ending
    if config.values.get("text_of") == "qwen3_vl_moe":  # as published; transformers may save them the other way round
        is_transposed = shape[1 if matrix == "down_proj" else 2] != config.size("hidden_size")
    for expert in range(shape[0]):
        size = shape[:0:-1] if is_transposed else shape[1:]
        is_merged = matrix == "gate_up_proj"
        cuts = _halves(size[0], interleaved=kind == "gpt_oss") if is_merged else {matrix: slice(None)}
        for role, rows in cuts.items():
            view = partial(_cut, expert=expert, rows=rows, is_transposed=is_transposed)
            chosen = range(*rows.indices(size[0]))
            first = (expert * size[0] + chosen.start) * math.prod(size[1:])
            yield Part(
                f"{module}.{expert}.{role}{_ENDINGS.get(ending, ending)}",
                (len(chosen), *size[1:]),
                view,
                None if is_transposed else first,
                chosen.step,
            )


def num_read_layers(config: HFConfig) -> int:
    """Return how many layers are read of a checkpoint: those of the model, or of its head too."""
    return config.size("num_read_layers", config.size("num_hidden_layers"))


def _behind_the_last(name: str, num_layers: int) -> str:
    """Return the name of a tensor of a head as one of a layer behind the last, or any other name as it is."""
    head = _HEAD.fullmatch(name)
    if head is None:
        return name
    layer, module, rest = head.groups()
    if layer is None:
        return f"model.layers.{num_layers}.{_HEAD_MODULES[module]}.{rest}"
    return f"model.layers.{num_layers + int(layer)}.{rest}"


def names_of(config: HFConfig, name: str) -> tuple[str, ...]:
    """Return the names of a tensor: two where a matrix of keys stands for values, too, and none if no layer reads it.

    The last layers of some families read others' keys and values; some files have matrices for them nevertheless.
    """
    found = _KEYS_OR_VALUES.search(name)
    if found is None or config.values.get("model_type") not in _SHARING:
        return (name,)
    layer, num_layers = int(found[1]), config.size("num_hidden_layers")
    if layer >= num_layers - config.integer("num_kv_shared_layers", 0):
        return ()
    types = config.texts("layer_types") if config.has("layer_types") else ()
    is_full = types[layer] == "full_attention" if layer < len(types) else (layer + 1) % 6 == 0
    if found[2] != "k_proj" or not config.flag("attention_k_eq_v") or not (is_full or layer + 1 == num_layers):
        return (name,)
    return name, name.replace("k_proj", "v_proj")


_ENDINGS = {"": ".weight", "_bias": ".bias"}


_BY_COLUMNS = ("qweight", "qzeros", "scales")  # packed tensors whose columns are a matrix's outputs
_BY_INPUTS = ("g_idx", "weight_g_idx")


def _granite_shared(config: HFConfig, name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """Yield the matrices of the shared expert, which is the MLP of models without other experts; packed ones, too."""
    module = "mlp" if config.values.get("num_local_experts") == 0 else "mlp.shared_expert"
    stem, _, ending = name.replace("shared_mlp", module).rpartition(".")
    if not stem.endswith(".input_linear"):
        yield Part(f"{stem.replace('output_linear', 'down_proj')}.{ending}", shape, _whole)
        return
    dim = int(ending in _BY_COLUMNS)
    is_of_both = ending in _BY_INPUTS or math.prod(shape) == 1
    for role, rows in _halves(shape[dim] if shape else 1, interleaved=False).items():
        place = f"{stem.replace('input_linear', role)}.{ending}"
        if is_of_both:
            yield Part(place, shape, _whole)
            continue
        chosen = range(*rows.indices(shape[dim]))
        first = None if dim else chosen.start * math.prod(shape[1:])
        view = partial(_narrowed, dim=dim, chosen=chosen)
        yield Part(place, (*shape[:dim], len(chosen), *shape[dim + 1 :]), view, first)


def _renamed(kind: str, name: str) -> str:
    if kind in _GRANITES:
        name = name.replace(".router.layer.", ".gate.").replace(".router.", ".gate.")
        for theirs, ours in _GRANITE.items():
            name = name.removesuffix(theirs) + ours if name.endswith(theirs) else name
    if kind == "lfm3":
        name = name.replace(".self_attn.gate_proj.", ".self_attn.g_proj.").replace(".conv.out_proj.", ".conv.o_proj.")
    if kind in _OF_ONE_PART:
        name = _NEMOTRON_NORM.sub(r"\1.input_layernorm.", name)
        name = _NEMOTRON_MIXER.sub(lambda found: f".{_NEMOTRON_PARTS.get(found[1], 'mlp')}.{found[1]}", name)
    return ".".join(_RENAMED[kind].get(part, part) for part in name.split("."))


def their_name(kind: str, name: str) -> str:
    """Return what a kind of model calls a module outside experts, in adapters too."""
    theirs = {ours: their for their, ours in _RENAMED.get(kind, {}).items()}
    if kind == "lfm3":
        return ".".join(theirs.get(part, part) for part in name.replace("conv.o_proj", "conv.out_proj").split("."))
    if kind in _OF_ONE_PART:
        theirs |= dict.fromkeys(("mamba", "self_attn", "mlp"), "mixer")
    return ".".join(theirs.get(part, part) for part in name.split("."))


def _halves(num_rows: int, *, interleaved: bool) -> dict[str, slice]:
    """Return the rows of gate and up: every other one, or one half each."""
    if interleaved:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {"gate_proj": slice(0, num_rows // 2), "up_proj": slice(num_rows // 2, None)}


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _narrowed(tensor: Tensor, *, dim: int, chosen: range) -> Tensor:
    return tensor.narrow(dim, chosen.start, len(chosen))


def _cut(tensor: Tensor, *, expert: int, rows: slice, is_transposed: bool) -> Tensor:
    one = tensor[expert]
    return (one.t() if is_transposed else one)[rows]
