"""Reads a model's config, without torch: of a folder, or of a file that holds its metadata.

A Gemma 3 checkpoint with vision holds the text model's settings under `text_config`; they replace the whole config,
because the text model is served alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, ModelLoadError
from engine.files.hf_config import HFConfig
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.models.families import FAMILIES, read_config
from engine.runtime.models.overrides import override
from engine.runtime.models.servable import refuse_unservable
from engine.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from engine.settings.engine_config import EngineConfig

_ALIASES = {"kimi_k2": "deepseek_v3"}  # kinds of the hub that are another kind in everything
# The sizes that Gemma 3's published checkpoints with vision leave out, as transformers' Gemma3TextConfig has them.
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def read_model_config(path: Path, load_format: str = "auto", overrides: Mapping[str, Any] | None = None) -> HFConfig:
    """Return the language model's settings. Raises ModelLoadError for unservable kinds, too."""
    return servable(open_checkpoint(load_format, path).config, overrides)


def servable(config: HFConfig, overrides: Mapping[str, Any] | None = None) -> HFConfig:
    """Return the language model's settings, with --hf-overrides. Raises ModelLoadError for unservable kinds."""
    config = override(config, overrides)
    values = config.values
    refuse_unservable(values, config.source)
    if values["model_type"] in _ALIASES:
        return HFConfig({**values, "model_type": _ALIASES[values["model_type"]]}, config.source)
    if values.get("model_type") != "gemma3" or not config.has("text_config"):
        return config
    stored = {key: values[key] for key in ("dtype", "torch_dtype") if values.get(key)}
    text = config.section("text_config").values
    return HFConfig({**_GEMMA3, **stored, **text, "model_type": "gemma3_text"}, config.source)


def read_own(checkpoint: Checkpoint) -> ModelConfig:
    """Return the settings of a model that Quire's decoder runs. Raises ModelLoadError."""
    config = read_config(checkpoint.config.values, checkpoint.config.source)
    return config if config.tied_head or not checkpoint.is_body else replace(config, has_head=False)


def check_mtp(model: HFConfig, config: ModelConfig | None) -> None:
    """Raise ConfigError for a model without MTP layers; `config` None: transformers' code runs it."""
    if config is None:
        raise ConfigError(
            "MTP layers read the model's hidden states, and transformers' code runs this model, which does not show them; "
            "choose the method ngram or draft_model."
        )
    if not config.num_mtp_layers:
        raise ConfigError(
            f"{model.source or 'the model'} counts no MTP layers, as 'num_nextn_predict_layers' of DeepSeek-V3 and "
            "GLM-4.5 to 4.7 does; choose the method ngram or draft_model."
        )


def require_readable(checkpoint: Checkpoint, *, is_own: bool) -> None:
    """Raise ModelLoadError for quantised weights of a model that transformers' code runs."""
    if checkpoint.quantization is not None and not is_own:
        raise ModelLoadError(
            f"{checkpoint.config.source}: the weights are quantized by {checkpoint.quantization.method!r}, and transformers' "
            "code runs this model, which cannot read them here; serve the checkpoint they were made from, or one of "
            f"Quire's own families ({', '.join(FAMILIES)}) without --model-impl."
        )


def is_native(config: EngineConfig, model: HFConfig, path: Path) -> bool:
    """Return whether Quire's decoder runs the model, instead of transformers' code.

    Raises ConfigError if transformers' is asked for and cannot read the file."""
    if config.model_impl == "transformers" and path.is_file():
        kind = path.suffix.removeprefix(".").upper()
        raise ConfigError(
            f"--model-impl is 'transformers', and {path} is a {kind} file, which Quire's own models alone serve; leave it out."
        )
    return model.values.get("model_type") in FAMILIES if config.model_impl == "auto" else config.model_impl == "quire"
