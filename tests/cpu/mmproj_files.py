"""Writes a tiny checkpoint as two GGUF files, its text half and its vision half, as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from tests.cpu.gguf_rows import written
from tests.cpu.test_weights_gguf import DELTA, GEMMA4_NAMES, LFM2_NAMES, SANDWICH, convert, write

Kind = gguf.GGMLQuantizationType
# Tensors that the converter names in code of a model's own.
_OWN_NAMES = {
    **{
        f"multi_modal_projector.{theirs}": f"mm.model.mlp.{place}"
        for theirs, place in {"layer_norm": 0, "linear_1": 1, "linear_2": 3}.items()
    },
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "norm": "norm",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
}
_BOUNDS = tuple(f".{side}_{bound}" for side in ("input", "output") for bound in ("min", "max"))


class Half(NamedTuple):
    """What the converter writes of a kind."""

    arch: str
    projector: str
    names: Mapping[str, str]  # of tensors of the text half that differ
    text: Mapping[str, Any]  # further keys of it, without the architecture
    vision: Mapping[str, Any]  # further keys, without clip.vision.
    hub: Mapping[str, str] = MappingProxyType({})  # patterns of transformers' names, and the hub's that the table knows


HALVES = {
    "qwen3_vl": Half(
        "qwen3vl",
        "qwen3vl_merger",
        {},
        {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 2},
        {
            "spatial_merge_size": 2,
            "is_deepstack_layers": [True, True, False],
            "image_size": 32,
            "image_min_pixels": 64,
            "image_max_pixels": 4096,
        },
    ),
    "qwen3_5": Half(
        "qwen35",
        "qwen3vl_merger",
        DELTA,
        {
            "rope.dimension_sections": [4, 2, 2, 0],
            "rope.dimension_count": 16,
            "attention.recurrent_layers": [True, False, True, False],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 32,
            "ssm.state_size": 8,
            "ssm.time_step_rank": 4,
            "ssm.group_count": 2,
        },
        {"image_size": 32, "image_min_pixels": 64, "image_max_pixels": 4096},
    ),
    "gemma3": Half(
        "gemma3",
        "gemma3",
        SANDWICH,
        {
            "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [True, False, True, False],
            "rope.freq_base": 1_000_000.0,
        },
        {"projector.scale_factor": 2},
        {"^vision_tower": "vision_tower.vision_model", "_weight$": ".weight"},
    ),
    "gemma4": Half(
        "gemma4",
        "gemma4v",
        GEMMA4_NAMES,
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, False] * 2,
            "attention.key_length": 32,
            "attention.key_length_swa": 16,
            "rope.freq_base": 1_000_000.0,
            "rope.freq_base_swa": 10_000.0,
        },
        {"projector.scale_factor": 2, "attention.layer_norm_epsilon": 1e-6, "image_size": 224},
        {
            r"^vision_tower\.encoder": "vision_model.model",
            "^(?=vision_tower|embed_vision)": "model.",
            r"\.linear\.weight$": ".weight",
            "embedding_table$": "embedding_table.weight",
        },
    ),
    "idefics3": Half(
        "llama",
        "idefics3",
        {},
        {},
        {"projector.scale_factor": 2, "preproc_image_size": 32},
        {"^": "model."},
    ),
    "qwen2_5_vl": Half(
        "qwen2vl",
        "qwen2.5vl_merger",
        {},
        {"rope.dimension_sections": [4, 2, 2, 0]},
        {"n_wa_pattern": 2, "window_size": 16, "image_size": 560, "image_min_pixels": 64, "image_max_pixels": 4096},
    ),
    "qwen2_vl": Half(
        "qwen2vl",
        "qwen2vl_merger",
        {},
        {"rope.dimension_sections": [4, 2, 2, 0]},
        {"feed_forward_length": 64, "image_size": 560, "image_min_pixels": 64, "image_max_pixels": 4096},
    ),
    "internvl": Half(
        "qwen2",
        "internvl",
        {},
        {},
        {"projector.scale_factor": 2, "preproc_max_tiles": 4, "attention.layer_norm_epsilon": 1e-6},
        {"^vision_tower": "model.vision_tower", "(position_embeddings|lambda_.)$": r"\1.weight"},
    ),
    "lfm2_vl": Half(
        "lfm2",
        "lfm2",
        LFM2_NAMES,
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
        {"projector.scale_factor": 2, "image_size": 256},
        {"^vision_tower": "vision_tower.vision_model"},
    ),
    "mistral3": Half("llama", "pixtral", {}, {}, {"spatial_merge_size": 2}),
}


def write_text(path: Path, model: Any, half: Half) -> Path:
    """The text half."""
    tensors = {
        re.sub(r"^model\.(language_model|text_model)\.", "model.", name): values
        for name, values in model.state_dict().items()
        if not name.startswith("model.") or name.startswith(("model.language_model.", "model.text_model."))
    }
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    config = model.config.text_config
    shown: Any = SimpleNamespace(state_dict=lambda: tensors, config=config)
    return write(path, half.arch, config, convert(shown, half.arch, half.names), **half.text)


def write_vision(path: Path, model: Any, processor: Any, half: Half, **extra: Any) -> Path:
    """The vision half; `extra` are other values of its keys."""
    tower, writer = model.config.vision_config, gguf.GGUFWriter(path, "clip")
    sizes = {
        "projection_dim": model.config.text_config.hidden_size,
        "image_size": _side(tower, "image_size"),
        "patch_size": _side(tower, "patch_size"),
        "embedding_length": getattr(tower, "embed_dim", tower.hidden_size),
        "feed_forward_length": getattr(tower, "intermediate_size", 0),
        "block_count": getattr(tower, "depth", None) or tower.num_hidden_layers,
        "attention.head_count": getattr(tower, "num_heads", None) or tower.num_attention_heads,
        "image_mean": getattr(processor, "image_mean", [0.5] * 3),
        "image_std": getattr(processor, "image_std", [0.5] * 3),
    }
    writer.add_string("clip.projector_type", half.projector)
    for key, value in (sizes | dict(half.vision) | extra).items():
        if value is not None:
            adds = {int: writer.add_uint32, float: writer.add_float32}
            adds.get(type(value), writer.add_array)(f"clip.vision.{key}", value)
    for name, values in vision_tensors(model, half):
        writer.add_tensor(name, np.ascontiguousarray(values.numpy()), raw_dtype=Kind.F32)
    return written(writer, path)


def _side(tower: Any, key: str) -> int:
    value = getattr(tower, key, 0)
    return value[0] if isinstance(value, list | tuple) else value


def vision_tensors(model: Any, half: Half) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tower by the converter's names."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)  # of layers and of parts of projectors
    tower = model.config.vision_config
    for name, values in model.model.state_dict().items():
        if name.startswith(("language_model.", "text_model.")) or ".head." in name:
            continue
        stem, _, ending = name.rpartition(".")
        if "deepstack" in stem:
            _, _, index, role = stem.split(".")
            yield f"v.deepstack.{tower.deepstack_visual_indexes[int(index)]}.{_OWN_NAMES[role]}.{ending}", values
            continue
        if stem in _OWN_NAMES and half.projector not in ("pixtral", "lfm2"):
            yield f"{_OWN_NAMES[stem]}.{ending}", values
            continue
        if values.dim() == 5:  # filters of two frames
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
            continue
        for pattern, hub in half.hub.items():
            name = re.sub(pattern, hub, name, count=1)
        parts = {name: values}
        if ".qkv." in name and half.projector != "qwen3vl_merger":
            parts = {name.replace("qkv", role): part for role, part in zip("qkv", values.chunk(3), strict=True)}
        if half.projector == "pixtral" and re.search(r"\.[qk]_proj\.", name):  # rotated by neighbours
            heads = values.unflatten(0, (tower.num_attention_heads, 2, -1))
            parts = {name: heads.transpose(1, 2).reshape(values.shape)}
        if name.endswith(("patch_embedding.weight", "input_proj.weight")) and values.dim() == 2:  # as filters
            side = tower.patch_size
            parts = {name: values.view(-1, side, side, 3).permute(0, 3, 1, 2)}
        for each, part in parts.items():
            found = table.get_name(each, (".weight", ".bias", *_BOUNDS))
            assert found is not None, each
            yield found, part.reshape(part.shape or 1) + ("mm_soft_emb_norm" in each)
