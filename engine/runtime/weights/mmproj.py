"""Reads the vision tower of an mmproj file, under the names that its tensors have on the hub.

engine/files/mmproj.py reads the settings.
"""

from __future__ import annotations

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
from engine.runtime.weights.checkpoint import Checkpoint, StoredTensor
from engine.runtime.weights.gguf import GGUFTensor, check_kind, convert, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

_LAYER, _SWAPPED = re.compile(r"(v\.blk|v\.deepstack)\.(\d+)"), re.compile("ffn_up|ffn_down")
_BLOCK = "v.blk.*."
_SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
    f"{_BLOCK}ln1": "encoder.layers.*.layer_norm1",
    f"{_BLOCK}ln2": "encoder.layers.*.layer_norm2",
    f"{_BLOCK}attn_q": "encoder.layers.*.self_attn.q_proj",
    f"{_BLOCK}attn_k": "encoder.layers.*.self_attn.k_proj",
    f"{_BLOCK}attn_v": "encoder.layers.*.self_attn.v_proj",
    f"{_BLOCK}attn_out": "encoder.layers.*.self_attn.out_proj",
    f"{_BLOCK}ffn_up": "encoder.layers.*.mlp.fc1",
    f"{_BLOCK}ffn_down": "encoder.layers.*.mlp.fc2",
}
_QWEN = {
    "v.patch_embd": "patch_embed.proj",
    f"{_BLOCK}ln1": "blocks.*.norm1",
    f"{_BLOCK}ln2": "blocks.*.norm2",
    f"{_BLOCK}attn_qkv": "blocks.*.attn.qkv",
    f"{_BLOCK}attn_out": "blocks.*.attn.proj",
}
_QWEN3 = _QWEN | {
    "v.position_embd": "pos_embed",
    f"{_BLOCK}ffn_up": "blocks.*.mlp.linear_fc1",
    f"{_BLOCK}ffn_down": "blocks.*.mlp.linear_fc2",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
    "v.deepstack.*.norm": "deepstack_merger_list.*.norm",
    "v.deepstack.*.fc1": "deepstack_merger_list.*.linear_fc1",
    "v.deepstack.*.fc2": "deepstack_merger_list.*.linear_fc2",
}


def _below(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: prefix + ours for theirs, ours in names.items()}


# By projector type: of llama.cpp's names, whose endings may be left out, those of the hub. Where two become one, the
# tensors are joined.
_NAMES = {
    "qwen3vl_merger": _below("model.visual.", _QWEN3),
    "gemma3": {
        **_below("vision_tower.vision_model.", _SIGLIP),
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
    "idefics3": {
        **_below("model.vision_model.", _SIGLIP),
        "mm.model.fc": "model.connector.modality_projection.proj",
    },
}
_OFFSET = ("mm.soft_emb_norm.weight",)  # Gemma 3's, stored as 1 + weight


def add_tower(checkpoint: Checkpoint, model: Path, path: Path) -> None:
    """Make a whole model of the text half: give its checkpoint the settings and tensors of a vision half.

    Raises ConfigError or ModelLoadError.
    """
    half, text = read_mmproj(path, model), dict(checkpoint.config.values)
    if half.sections:
        rope = text.get("rope_scaling") or {"rope_type": "default"}
        text["rope_scaling"] = {**rope, "mrope_section": half.sections[:3]}
    checkpoint.config = HFConfig({**half.config, "text_config": text}, checkpoint.config.source)
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
        if not name.startswith("a."):  # of sound
            ours, place = _named(half, _SWAPPED.sub(lambda role: swaps.get(role[0], role[0]), name), deep)
            joined.setdefault(ours, {})[place] = tensor
    for name, parts in joined.items():
        yield _joined(name, [parts[place] for place in sorted(parts)])


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


def _joined(name: str, parts: Sequence[GGUFTensor]) -> StoredTensor:
    """Return one tensor: the filters of an image as those of two frames, or rows behind each other."""
    shape = parts[0].shape
    if len(parts) > 1:
        shape = (
            (*shape[:2], len(parts), *shape[2:])
            if len(shape) == 4
            else (sum(part.shape[0] for part in parts), *shape[1:])
        )
    num_bytes = sum(part.rows.nbytes for part in parts)
    return StoredTensor(name, shape, num_bytes, parts[0].path, partial(_copy, parts), kind="F32")


def _copy(parts: Sequence[GGUFTensor], target: Tensor) -> None:
    import torch  # a config is read before torch is imported

    whole = []
    for part in parts:
        whole.append(torch.empty(part.shape))
        convert(part.rows, part.kind, whole[-1].view(len(part.rows), -1), np.float32(part.name in _OFFSET))
    target.copy_(whole[0] if len(whole) == 1 else (torch.stack(whole, 2) if target.dim() == 5 else torch.cat(whole)))
