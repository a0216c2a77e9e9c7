"""Writes a tiny checkpoint as two GGUF files, its text half and its vision half, as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch

from tests.cpu.test_weights_gguf import SANDWICH, convert, write

Kind = gguf.GGMLQuantizationType
# How the hub names what transformers' modules name otherwise; the converter's names begin with the hub's.
_ON_THE_HUB = {
    r"^vision_tower\.(?!vision_model)": "vision_tower.vision_model.",
    r"^vision_model\.": "model.vision_model.",
    r"^connector\.": "model.connector.",
    r"_weight$": ".weight",
}
# Tensors that the converter names in code of a model's own.
_OWN_NAMES = {
    "visual.merger.norm": "v.post_ln",
    "visual.merger.linear_fc1": "mm.0",
    "visual.merger.linear_fc2": "mm.2",
    "norm": "norm",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
}


class Half(NamedTuple):
    """What the converter writes of a kind."""

    arch: str
    projector: str
    names: Mapping[str, str]  # of tensors of the text half that differ
    text: Mapping[str, Any]  # further keys of it, without the architecture
    vision: Mapping[str, Any]  # further keys, without clip.vision.


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
    ),
    "idefics3": Half("llama", "idefics3", {}, {}, {"projector.scale_factor": 2, "preproc_image_size": 32}),
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
        "image_size": getattr(tower, "image_size", 0),
        "patch_size": tower.patch_size,
        "embedding_length": tower.hidden_size,
        "feed_forward_length": tower.intermediate_size,
        "block_count": getattr(tower, "depth", None) or tower.num_hidden_layers,
        "attention.head_count": getattr(tower, "num_heads", None) or tower.num_attention_heads,
        "image_mean": processor.image_processor.image_mean,
        "image_std": processor.image_processor.image_std,
    }
    writer.add_string("clip.projector_type", half.projector)
    for key, value in (sizes | dict(half.vision) | extra).items():
        if value is not None:
            add = writer.add_array if isinstance(value, list | tuple) else writer.add_uint32
            add(f"clip.vision.{key}", value)
    for name, values in vision_tensors(model, sizes["block_count"]):
        writer.add_tensor(name, np.ascontiguousarray(values.numpy()), raw_dtype=Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vision_tensors(model: Any, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tower by the converter's names."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)
    deep = getattr(model.config.vision_config, "deepstack_visual_indexes", ())
    for name, values in model.model.state_dict().items():
        if name.startswith(("language_model.", "text_model.")) or ".head." in name:
            continue
        for pattern, hub in _ON_THE_HUB.items():
            name = re.sub(pattern, hub, name)
        stem, _, ending = name.rpartition(".")
        if "deepstack" in stem:
            _, _, index, role = stem.split(".")
            yield f"v.deepstack.{deep[int(index)]}.{_OWN_NAMES[role]}.{ending}", values
        elif stem in _OWN_NAMES:
            yield f"{_OWN_NAMES[stem]}.{ending}", values
        elif values.dim() == 5:  # filters of two frames
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        else:
            found = table.get_name(name, (".weight", ".bias"))
            assert found is not None, name
            yield found, values + ("mm_soft_emb_norm" in name)
