"""Reads the settings of an mmproj file: the vision half of a model, whose text half is another GGUF file.

They become those of the whole model's config.json and preprocessor_config.json. Imports no torch; the tensors are read by
engine/runtime/weights/mmproj.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import ConfigError, ModelLoadError
from engine.files.gguf_header import read_header
from engine.files.hf_config import HFConfig

log = logging.getLogger("quire.engine")

_PREFIX = "clip.vision."
_KINDS = ("bf16", "f16", "q8_0")  # of files in a folder, by preference

Values = dict[str, Any]


class Mmproj(NamedTuple):
    """The vision half of a model."""

    path: Path
    projector: str
    config: Values  # of config.json, beside `text_config`
    tokens: Mapping[str, str]  # by keys of config.json: not the ids, but the tokens
    processor: Values  # preprocessor_config.json
    sections: list[int] | None  # of the text model's rotation, in three axes


class Projector(NamedTuple):
    """What a projector type says of a model."""

    kinds: Mapping[str, str]  # the model type, by the architecture of the text file
    config: Callable[[HFConfig], Values]
    processor: Callable[[HFConfig], Values]
    tokens: Mapping[str, str]


def read_mmproj(path: Path, model: Path) -> Mmproj:
    """Return the vision half in a file, for the text half in another. Raises ConfigError or ModelLoadError."""
    if model.is_dir():
        raise ConfigError(f"--mmproj is {path}, and {model} has its vision tower in its own files; leave it out.")
    metadata, text = read_header(path).metadata, read_header(model).metadata
    arch, own_arch = HFConfig(text, str(model)).text("general.architecture"), metadata.get("general.architecture")
    if own_arch != "clip":
        raise ModelLoadError(
            f"{path} is not the vision half of a model (its architecture is {own_arch!r}, not 'clip'); name mmproj-*.gguf."
        )
    meta = HFConfig({key.removeprefix(_PREFIX): value for key, value in metadata.items()}, str(path))
    name = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    if name not in PROJECTORS:
        raise ModelLoadError(
            f"{path}: projector type {name!r} is not supported; Quire reads {', '.join(PROJECTORS)} (--mmproj)."
        )
    row = PROJECTORS[name]
    width, own_width = text.get(f"{arch}.embedding_length"), meta.size("projection_dim")
    if arch not in row.kinds or width != own_width:
        raise ModelLoadError(
            f"{path} makes vectors of {own_width} numbers for {' or '.join(row.kinds)}, and {model} is {arch} of {width}; "
            "name the file of the same model."
        )
    vocabulary = text.get("tokenizer.ggml.tokens")
    lacking = [token for token in row.tokens.values() if vocabulary and token not in vocabulary]
    if lacking:
        raise ModelLoadError(
            f"{path} needs the token {lacking[0]!r}, which {model} lacks; name the file of the same model."
        )
    config = {"model_type": row.kinds[arch], **row.config(meta)}
    rule = {"image_mean": meta.numbers("image_mean"), "image_std": meta.numbers("image_std"), **row.processor(meta)}
    return Mmproj(path, name, config, row.tokens, rule, text.get(f"{arch}.rope.dimension_sections"))


def find_mmproj(model: Path) -> Path | None:
    """Return the mmproj file beside a GGUF file that fits it, if there is one."""
    if model.is_file():
        for path in sorted(model.parent.glob("*mmproj*.gguf"), key=lambda path: preference(path.name)):
            try:
                return read_mmproj(path, model).path
            except ModelLoadError as error:  # noqa: PERF203 - of the few files there
                log.info("%s is not used: %s", path.name, error)
    return None


def preference(name: str) -> tuple[int, str]:
    """Return a key that sorts the names of mmproj files of one model, the one to take first."""
    return next((place for place, kind in enumerate(_KINDS) if kind in name.lower()), len(_KINDS)), name


def _sizes(meta: HFConfig, num_layers: str, num_heads: str) -> Values:
    return {
        "hidden_size": meta.size("embedding_length"),
        "intermediate_size": meta.size("feed_forward_length"),
        num_layers: meta.size("block_count"),
        num_heads: meta.size("attention.head_count"),
        "patch_size": meta.size("patch_size"),
    }


def _siglip(meta: HFConfig) -> Values:
    return {
        **_sizes(meta, "num_hidden_layers", "num_attention_heads"),
        "image_size": meta.size("image_size"),
        "vision_use_head": False,
    }


def _gemma3(meta: HFConfig) -> Values:
    side = meta.size("image_size") // meta.size("patch_size") // meta.size("projector.scale_factor", 4)
    return {"vision_config": _siglip(meta), "mm_tokens_per_image": side * side}


def _qwen3(meta: HFConfig) -> Values:
    flags = meta.values.get("is_deepstack_layers", ())
    tower = {
        **_sizes(meta, "depth", "num_heads"),
        "out_hidden_size": meta.size("projection_dim"),
        "spatial_merge_size": meta.size("spatial_merge_size", 2),
        "num_position_embeddings": (meta.size("image_size") // meta.size("patch_size")) ** 2,
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    return {"vision_config": tower}


def _qwen_processor(fewest: int, most: int) -> Callable[[HFConfig], Values]:
    def made(meta: HFConfig) -> Values:
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": meta.size("patch_size"),
            "merge_size": meta.size("spatial_merge_size", 2),
            "size": {
                "shortest_edge": meta.size("image_min_pixels", fewest),
                "longest_edge": meta.size("image_max_pixels", most),
            },
        }

    return made


def _idefics3_processor(meta: HFConfig) -> Values:
    side = meta.size("image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": meta.size("preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
    }


def _square(kind: str) -> Callable[[HFConfig], Values]:
    def made(meta: HFConfig) -> Values:
        side = meta.size("image_size")
        return {"image_processor_type": kind, "size": {"height": side, "width": side}}

    return made


PROJECTORS = {
    "qwen3vl_merger": Projector(
        {"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"},
        _qwen3,
        _qwen_processor(1 << 16, 1 << 24),
        {"image_token_id": "<|image_pad|>"},
    ),
    "gemma3": Projector(
        {"gemma3": "gemma3"},
        _gemma3,
        _square("Gemma3ImageProcessor"),
        {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
    ),
    "idefics3": Projector(
        {"llama": "idefics3"},
        lambda meta: {"vision_config": _siglip(meta), "scale_factor": meta.size("projector.scale_factor", 2)},
        _idefics3_processor,
        {"image_token_id": "<image>"},
    ),
}
