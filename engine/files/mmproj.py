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
    sections: tuple[float, ...]  # of the text model's rotation, if it is in three axes
    paired_rows: int  # of a head, where its rows are in the order of a rotation of neighbours; else 0


class Projector(NamedTuple):
    """What a projector type says of a model."""

    kinds: Mapping[str, str]  # the model type, by the architecture of the text file
    settings: Callable[[HFConfig], tuple[Values, Values]]  # of config.json and of preprocessor_config.json
    tokens: Mapping[str, str]


def read_mmproj(path: Path, model: Path) -> Mmproj:
    """Return the vision half in a file, for the text half in another. Raises ConfigError or ModelLoadError."""
    if model.is_dir():
        raise ConfigError(
            f"--mmproj is {path}, and {model} is no GGUF file, whose vision half that would be; leave it out."
        )
    (metadata, tensors), text = read_header(path), read_header(model).metadata
    about, own_arch = HFConfig(text, str(model)), metadata.get("general.architecture")
    arch = about.text("general.architecture")
    if own_arch != "clip":
        raise ModelLoadError(
            f"{path} is not the vision half of a model (its architecture is {own_arch!r}, not 'clip'); name mmproj-*.gguf."
        )
    values = {key.removeprefix(_PREFIX): value for key, value in metadata.items()}
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    meta = HFConfig({**values, "shapes": shapes, "text": text}, str(path))
    name = str(metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type")))
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
    config, processor = row.settings(meta)
    colours = {key: meta.numbers(key) for key in ("image_mean", "image_std")}
    key = f"{arch}.rope.dimension_sections"
    sections = about.numbers(key)[:3] if about.has(key) else ()
    pairs = meta.size("embedding_length") // meta.size("attention.head_count") if name == "pixtral" else 0
    whole = {"model_type": row.kinds[arch], **config}
    return Mmproj(path, name, whole, row.tokens, {**colours, **processor}, sections, pairs)


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


def _tower(meta: HFConfig, **more: Any) -> Values:
    """Return a tower's settings in the usual spelling."""
    return {
        "hidden_size": meta.size("embedding_length"),
        "intermediate_size": meta.size("feed_forward_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": meta.size("attention.head_count"),
        "patch_size": meta.size("patch_size"),
        "image_size": meta.size("image_size"),
        "vision_use_head": False,
        **more,
    }


def _qwen(meta: HFConfig, fewest: int, most: int, **more: Any) -> tuple[Values, Values]:
    """Return the settings of a Qwen-VL: of its tower, under Qwen's names, and how many pixels an image may have."""
    tower = {
        "depth": meta.size("block_count"),
        "hidden_size": meta.size("embedding_length"),
        "intermediate_size": meta.size("feed_forward_length"),
        "num_heads": meta.size("attention.head_count"),
        "patch_size": meta.size("patch_size"),
        "spatial_merge_size": meta.size("spatial_merge_size", 2),
        "out_hidden_size": meta.size("projection_dim"),
        **more,
    }
    pixels = meta.size("image_min_pixels", fewest), meta.size("image_max_pixels", most)
    return {"vision_config": tower}, {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"],
        "size": dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True)),
    }


def _qwen2(meta: HFConfig) -> tuple[Values, Values]:
    sizes = {"embed_dim": meta.size("embedding_length"), "hidden_size": meta.size("projection_dim")}
    return _qwen(meta, *_QWEN2_PIXELS, **sizes)


def _qwen2_5(meta: HFConfig) -> tuple[Values, Values]:
    every, window = meta.size("n_wa_pattern"), meta.size("window_size", 112)
    whole = list(range(every - 1, meta.size("block_count"), every))
    return _qwen(meta, *_QWEN2_PIXELS, fullatt_block_indexes=whole, window_size=window)


def _qwen3(meta: HFConfig) -> tuple[Values, Values]:
    flags = meta.numbers("is_deepstack_layers") if meta.has("is_deepstack_layers") else ()
    places = (meta.size("image_size") // meta.size("patch_size")) ** 2
    deep = [layer for layer, flag in enumerate(flags) if flag]
    return _qwen(meta, 1 << 16, 1 << 24, num_position_embeddings=places, deepstack_visual_indexes=deep)


def _gemma3(meta: HFConfig) -> tuple[Values, Values]:
    side = meta.size("image_size") // meta.size("patch_size") // meta.size("projector.scale_factor", 4)
    config = {"vision_config": _tower(meta), "mm_tokens_per_image": side * side}
    return config, {"image_processor_type": "Gemma3ImageProcessor", "size": _square(meta)}


def _gemma4(meta: HFConfig) -> tuple[Values, Values]:
    shapes, tower, pool = meta.values["shapes"], _tower(meta), meta.size("projector.scale_factor", 3)
    has_inputs = meta.values["text"].get("gemma4.embedding_length_per_layer_input")
    tower |= {
        "num_key_value_heads": tower["num_attention_heads"],
        "head_dim": tower["hidden_size"] // tower["num_attention_heads"],
        "pooling_kernel_size": pool,
        "position_embedding_size": shapes.get("v.position_embd.weight", (2, 1))[1],
        "rms_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "standardize": "v.std_bias" in shapes,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in shapes,
    }
    # What files leave out: in the models for phones, as published, an image's tokens attend to those before alone.
    ways = {} if has_inputs else {"use_bidirectional_attention": "vision"}
    processor = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": tower["patch_size"]}
    return {"vision_config": tower, "text_config": ways}, {**processor, "pooling_kernel_size": pool}


def _idefics3(meta: HFConfig) -> tuple[Values, Values]:
    side = meta.size("image_size")
    return {"vision_config": _tower(meta), "scale_factor": meta.size("projector.scale_factor", 2)}, {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": meta.size("preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
    }


def _mistral3(meta: HFConfig) -> tuple[Values, Values]:
    act = "silu" if meta.flag("clip.use_silu") else "gelu"
    config = {
        "vision_config": _tower(meta, model_type="pixtral", hidden_act=act),
        "spatial_merge_size": meta.size("spatial_merge_size", 1),
        "vision_feature_layer": -1,
    }
    return config, {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": meta.size("image_size")}}


def _internvl(meta: HFConfig) -> tuple[Values, Values]:
    sides: Values = {key: [meta.size(key)] * 2 for key in ("image_size", "patch_size")}
    sides["attention_bias"] = "v.blk.0.attn_q.bias" in meta.values["shapes"]
    tower = _tower(meta, layer_norm_eps=meta.number("attention.layer_norm_epsilon"), **sides)
    return {"vision_config": tower, "downsample_ratio": 1 / meta.size("projector.scale_factor", 2)}, {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": _square(meta),
        "min_patches": meta.size("preproc_min_tiles", 1),
        "max_patches": meta.size("preproc_max_tiles", 12),
    }


def _lfm2(meta: HFConfig) -> tuple[Values, Values]:
    shapes, factor = meta.values["shapes"], meta.size("projector.scale_factor", 2)
    places, width = (shapes.get(name, (1,))[0] for name in ("v.position_embd.weight", "mm.1.weight"))
    config = {
        "vision_config": _tower(meta, model_type="siglip2_vision_model", num_patches=places),
        "downsample_factor": factor,
        "projector_hidden_size": width,
        "projector_use_layernorm": "mm.input_norm.weight" in shapes,
    }
    patches = {"encoder_patch_size": meta.size("patch_size"), "downsample_factor": factor}
    return config, {"image_processor_type": "Lfm2VlImageProcessor", **patches}


def _square(meta: HFConfig) -> Values:
    return dict.fromkeys(("height", "width"), meta.size("image_size"))


_QWEN2_PIXELS = 56 * 56, 16384 * 28 * 28  # what files leave out, as published
_QWEN_TOKEN, _IMAGE_TOKEN = {"image_token_id": "<|image_pad|>"}, {"image_token_id": "<image>"}
_GEMMA_TOKENS = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
_GEMMA4_TOKENS = {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"}
_QWEN3 = {"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
_INTERN = dict.fromkeys(("qwen2", "qwen3", "llama"), "internvl")
_MISTRAL = dict.fromkeys(("llama", "mistral3"), "mistral3")
PROJECTORS = {
    "qwen2vl_merger": Projector({"qwen2vl": "qwen2_vl"}, _qwen2, _QWEN_TOKEN),
    "qwen2.5vl_merger": Projector({"qwen2vl": "qwen2_5_vl"}, _qwen2_5, _QWEN_TOKEN),
    "qwen3vl_merger": Projector(_QWEN3, _qwen3, _QWEN_TOKEN),
    "gemma3": Projector({"gemma3": "gemma3"}, _gemma3, _GEMMA_TOKENS),
    "gemma4v": Projector({"gemma4": "gemma4"}, _gemma4, _GEMMA4_TOKENS),
    "idefics3": Projector({"llama": "idefics3"}, _idefics3, _IMAGE_TOKEN),
    "internvl": Projector(_INTERN, _internvl, {"image_token_id": "<IMG_CONTEXT>"}),
    "lfm2": Projector({"lfm2": "lfm2_vl"}, _lfm2, _IMAGE_TOKEN),
    "pixtral": Projector(_MISTRAL, _mistral3, {"image_token_index": "[IMG]"}),
}
