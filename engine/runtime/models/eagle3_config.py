"""Reads the config.json of an EAGLE-3 draft, in SafeAILab's layout or the speculators library's. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.core.errors import ConfigError
from engine.files.hf_config import HFConfig
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.models.config_file import servable
from engine.runtime.models.families import read_config

_LAYERS = ("llama", "qwen3")  # whose decoder layers are EAGLE-3's


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 draft. models/eagle3.py defines the arithmetic."""

    model: ModelConfig  # of the draft's layers
    draft_vocab_size: int  # tokens that it can draft
    target_hidden_size: int
    streams: tuple[int, ...]  # of the target: the stream before layer i; the number of layers: after the last
    needs_all: bool  # the last of these streams leaves the target's last layer
    norm_before_residual: bool  # the residual of the first layer is the normed state
    norm_before_fc: bool  # the target's states are normed as one vector
    fc_norm: bool  # each of the target's states is normed
    norm_output: bool  # the next draft reads the normed state


def read_eagle3(hf: HFConfig, target: ModelConfig) -> Eagle3Config:
    """Return a draft's settings. Raises ModelLoadError, or ConfigError for one that was made for another target."""
    layers = hf.section("transformer_layer_config") if hf.has("transformer_layer_config") else hf
    layers = servable(HFConfig({"model_type": "llama", **layers.values}, layers.source))
    layers.require(layers.text("model_type") in _LAYERS, "model_type", f"{' or '.join(_LAYERS)} for an EAGLE-3 draft")
    model, settings = read_config(layers.values, layers.source), _Settings(hf)
    if settings.section("eagle_config").values.get("use_aux_hidden_state") is False:
        raise settings.section("eagle_config").error("use_aux_hidden_state", "true, as EAGLE-3 has it")
    streams = _streams(settings, len(target.layers))
    config = Eagle3Config(
        model=model,
        draft_vocab_size=hf.size("draft_vocab_size", model.vocab_size),
        target_hidden_size=hf.size("target_hidden_size", model.hidden_size),
        streams=streams,
        needs_all=streams[-1] == len(target.layers),
        norm_before_residual=settings.flag("norm_before_residual", True),
        norm_before_fc=settings.flag("norm_before_fc"),
        fc_norm=settings.flag("fc_norm"),
        norm_output=settings.flag("norm_output"),
    )
    _check(config, target, hf.source)
    return config


def check_eagle3(draft: HFConfig, target: ModelConfig | None) -> None:
    """Check the configs of a draft and its target, None for a model that transformers' code runs.

    Raises ConfigError or ModelLoadError.
    """
    if target is None:
        raise foreign_target()
    read_eagle3(draft, target)


def foreign_target() -> ConfigError:
    """Return the error for a target whose states cannot be read."""
    return ConfigError(
        "EAGLE-3 reads states between the model's layers, and transformers' code runs this model, which does not show "
        "them; choose the method ngram or draft_model."
    )


class _Settings(HFConfig):
    """The top level of a config, beside which `eagle_config` may hold the same settings."""

    def __init__(self, hf: HFConfig) -> None:
        nested: Mapping[str, Any] = hf.section("eagle_config").values
        own = {key: value for key, value in hf.values.items() if value is not None}
        super().__init__({**nested, **own}, hf.source)


def _streams(settings: HFConfig, num_layers: int) -> tuple[int, ...]:
    """Return the target's streams in ascending order. Raises ModelLoadError."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = settings.numbers(key) if settings.has(key) else (2, num_layers // 2, num_layers - 3)
    ids = sorted({int(each) for each in named})
    if not ids or ids[0] < 0 or ids[-1] > num_layers or any(each % 1 for each in named):
        raise settings.error(key, f"whole numbers from 0 to {num_layers}, the target's number of layers")
    return tuple(ids)


def _check(config: Eagle3Config, target: ModelConfig, source: str) -> None:
    """Raise ConfigError for a draft that was made for another target."""
    for what, own, wanted in (
        ("states of {} numbers", config.target_hidden_size, target.hidden_size),
        ("a vocabulary of {} tokens", config.model.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            raise ConfigError(
                f"{source} is of a draft for {what.format(own)}, and the model has {wanted}; choose one that was "
                "trained for this model."
            )
    if config.draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"{source} has a draft vocabulary of {config.draft_vocab_size} tokens, more than the model's "
            f"{target.vocab_size}; choose one that was trained for this model."
        )
