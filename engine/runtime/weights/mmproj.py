"""Reads the vision tower of an mmproj file, under the names that its tensors have on the hub.

engine/files/mmproj.py reads the settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.core.errors import ModelLoadError
from engine.files.gguf_header import read_header
from engine.files.hf_config import HFConfig
from engine.files.mmproj import Mmproj, read_mmproj
from engine.runtime.native.rows import in_halves
from engine.runtime.weights.checkpoint import Checkpoint, StoredTensor
from engine.runtime.weights.gguf import GGUFTensor, check_kind, convert, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

_LAYER, _SWAPPED = re.compile(r"(v\.blk|v\.deepstack)\.(\d+)"), re.compile("ffn_up|ffn_down")


def _tower(layers: str, roles: Mapping[str, str], prefix: str, others: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a tower: `roles` are those in a layer, and `others` those around them."""
    of_layers = {f"v.blk.*.{theirs}": f"{prefix}{layers}.*.{ours}" for theirs, ours in roles.items()}
    return of_layers | {f"v.{theirs}": prefix + ours for theirs, ours in others.items()}


def _siglip(prefix: str) -> dict[str, str]:
    return _tower("encoder.layers", _SIGLIP_LAYER, prefix, _SIGLIP)


def _qwen(roles: Mapping[str, str], norm: str, projector: Sequence[str]) -> dict[str, str]:
    others = {"patch_embd": "patch_embed.proj", "post_ln": f"merger.{norm}"}
    merger = {f"mm.{index}": f"visual.merger.{name}" for index, name in zip((0, 2), projector, strict=True)}
    return _tower("blocks", {**_QWEN_LAYER, **roles}, "visual.", others) | merger


_SIGLIP = {
    "patch_embd": "embeddings.patch_embedding",
    "position_embd": "embeddings.position_embedding",
    "post_ln": "post_layernorm",
}
_SIGLIP_LAYER = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN_LAYER = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PIXTRAL_LAYER = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_GEMMA4_LINEARS = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_out": "self_attn.o_proj",
    **_GATED,
}
_GEMMA4_LAYER = {
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **_GEMMA4_LINEARS,  # whose bounds have endings such as input_max
    **{f"{theirs}.weight": f"{ours}.linear.weight" for theirs, ours in _GEMMA4_LINEARS.items()},
}
_GEMMA4 = {
    "patch_embd": "patch_embedder.input_proj",
    "position_embd.weight": "patch_embedder.position_embedding_table",
    "std_bias": "std_bias",
    "std_scale": "std_scale",
}
_INTERN_LAYER = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1.weight": "lambda_1",
    "ls2.weight": "lambda_2",
}
_INTERN = {
    "class_embd": "embeddings.cls_token",
    "position_embd.weight": "embeddings.position_embeddings",
    "patch_embd": "embeddings.patch_embeddings.projection",
}
_PROJECTOR = "multi_modal_projector."
# By projector type: of llama.cpp's names, whose endings may be left out, those of the hub. Where two become one, the
# tensors are joined.
_NAMES = {
    "qwen2vl_merger": _qwen({"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}, "ln_q", ("mlp.0", "mlp.2")),
    "qwen2.5vl_merger": _qwen(_GATED, "ln_q", ("mlp.0", "mlp.2")),
    "qwen3vl_merger": {
        **_qwen({"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}, "norm", ("linear_fc1", "linear_fc2")),
        "v.position_embd": "visual.pos_embed",
        "v.deepstack.*.norm": "visual.deepstack_merger_list.*.norm",
        "v.deepstack.*.fc1": "visual.deepstack_merger_list.*.linear_fc1",
        "v.deepstack.*.fc2": "visual.deepstack_merger_list.*.linear_fc2",
    },
    "gemma3": {
        **_siglip("vision_tower.vision_model."),
        "mm.input_projection.weight": f"{_PROJECTOR}mm_input_projection_weight",
        "mm.soft_emb_norm": f"{_PROJECTOR}mm_soft_emb_norm",
    },
    "gemma4v": {
        **_tower("encoder.layers", _GEMMA4_LAYER, "vision_tower.", _GEMMA4),
        "mm.input_projection": "embed_vision.embedding_projection",
    },
    "idefics3": {**_siglip("model.vision_model."), "mm.model.fc": "model.connector.modality_projection.proj"},
    "internvl": {
        **_tower("encoder.layer", _INTERN_LAYER, "vision_tower.", _INTERN),
        "mm.model.mlp.0": f"{_PROJECTOR}layer_norm",
        "mm.model.mlp.1": f"{_PROJECTOR}linear_1",
        "mm.model.mlp.3": f"{_PROJECTOR}linear_2",
    },
    "lfm2": {
        **_siglip("model.vision_tower.vision_model."),
        "mm.input_norm": f"{_PROJECTOR}layer_norm",
        "mm.1": f"{_PROJECTOR}linear_1",
        "mm.2": f"{_PROJECTOR}linear_2",
    },
    "pixtral": {
        **_tower(
            "transformer.layers", _PIXTRAL_LAYER, "vision_tower.", {"patch_embd": "patch_conv", "pre_ln": "ln_pre"}
        ),
        "mm.input_norm": f"{_PROJECTOR}norm",
        "mm.patch_merger": f"{_PROJECTOR}patch_merger.merging_layer",
        "mm.1": f"{_PROJECTOR}linear_1",
        "mm.2": f"{_PROJECTOR}linear_2",
    },
}
_ELSEWHERE = ("a.", "mm.a.", "v.token_embd.img_break")  # of sound; a row of the text half
_PAIRED = ("attn_q.weight", "attn_k.weight")  # rotated by neighbours in Pixtral's tower
_NUMBERS = ("_min", "_max")
_THREE_SIDES = ("cls_token", "position_embeddings")  # the first of 1
_OFFSET = ("mm.soft_emb_norm.weight",)  # Gemma 3's, stored as 1 + weight


def add_tower(checkpoint: Checkpoint, model: Path, path: Path) -> None:
    """Make a whole model of the text half: give its checkpoint the settings and tensors of a vision half.

    Raises ConfigError or ModelLoadError.
    """
    half, text = read_mmproj(path, model), dict(checkpoint.config.values)
    if half.sections:
        rope = text.get("rope_scaling") or {"rope_type": "default"}
        text["rope_scaling"] = {**rope, "mrope_section": [int(size) for size in half.sections]}
    checkpoint.config = HFConfig(
        {**half.config, "text_config": {**half.config.get("text_config", {}), **text}}, checkpoint.config.source
    )
    checkpoint.tower = list(_tensors(half))


def _tensors(half: Mmproj) -> Iterator[StoredTensor]:
    """Yield the tower's tensors. Raises ModelLoadError for a cut file, or one with tensors of another model."""
    infos = read_header(half.path).tensors
    for info in infos:
        check_kind(info.name, info.kind, str(half.path))
    found, joined = read_tensors(half.path, infos), dict[str, dict[int, GGUFTensor]]()
    down = found.get("v.blk.0.ffn_down.weight")
    # Converters of before May 2025 called the first matrix of an MLP the one down.
    swaps = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if down is not None and down.shape[1] < down.shape[0] else {}
    deep = sorted({int(layer[2]) for name in found if (layer := _LAYER.match(name)) and layer[1] == "v.deepstack"})
    for name, tensor in found.items():
        if not name.startswith(_ELSEWHERE):
            ours, place = _named(half, _SWAPPED.sub(lambda role: swaps.get(role[0], role[0]), name), deep)
            joined.setdefault(ours, {})[place] = tensor
    for name, parts in joined.items():
        yield _joined(half, name, [parts[place] for place in sorted(parts)])


def _named(half: Mmproj, name: str, deep: Sequence[int]) -> tuple[str, int]:
    """Return the name of a tensor on the hub, and its place among those that are one there. Raises ModelLoadError."""
    names, whole, number = _NAMES[half.projector], name.removesuffix(".1"), ""
    if layer := _LAYER.match(whole):
        whole = f"{layer[1]}.*{whole[layer.end() :]}"
        number = str(deep.index(int(layer[2]))) if layer[1] == "v.deepstack" else layer[2]
    stem, _, ending = whole.rpartition(".")
    if whole not in names and stem not in names:
        raise ModelLoadError(f"{half.path}: tensor {name!r} is not known of projector type {half.projector!r}.")
    found, known = (names[whole], whole) if whole in names else (f"{names[stem]}.{ending}", stem)
    return found.replace("*", number), 2 * list(names).index(known) + (whole != name)


def _joined(half: Mmproj, name: str, parts: Sequence[GGUFTensor]) -> StoredTensor:
    """Return one tensor: the filters of an image as those of two frames, or rows behind each other."""
    shape = parts[0].shape
    if name.endswith(_THREE_SIDES):
        shape = (1,) * (3 - len(shape)) + shape
    elif name.endswith(_NUMBERS):
        shape = ()
    elif half.projector in ("gemma4v", "lfm2") and len(shape) == 4:  # their modules take patches as rows of colours
        shape = (shape[0], math.prod(shape[1:]))
    elif len(parts) > 1:
        rest = (len(parts), *shape[2:]) if len(shape) == 4 else ()
        shape = (*shape[:2], *rest) if rest else (sum(part.shape[0] for part in parts), *shape[1:])
    num_bytes = sum(part.rows.nbytes for part in parts)
    return StoredTensor(name, shape, num_bytes, parts[0].path, partial(_copy, half, parts), kind="F32")


def _copy(half: Mmproj, parts: Sequence[GGUFTensor], target: Tensor) -> None:
    import torch  # a config is read before torch is imported

    whole = []
    for part in parts:
        whole.append(torch.empty(part.shape))
        rows = in_halves(part.rows, half.paired_rows) if part.name.endswith(_PAIRED) else part.rows
        convert(rows, part.kind, whole[-1].view(len(rows), -1), np.float32(part.name in _OFFSET))
    if whole[0].dim() == 4 and target.dim() == 2:
        whole = [whole[0].permute(0, 2, 3, 1)]
    target.copy_((torch.stack(whole, 2) if target.dim() == 5 else torch.cat(whole)).reshape(target.shape))
