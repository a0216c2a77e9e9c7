"""Chooses the sampling where a request names none: the model's recommendation, OpenAI's, or the operator's.

The daemon and the offline LLM share the settings `generation_config` and `override_generation_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError
from engine.settings.setting import unknown_key
from engine.sources.model_source import DEFAULT_FILE, DEFAULT_NAME, DEFAULT_SAMPLING
from engine.system.regular_file import expanded
from engine.text.generation_config import FILE, read_sampling, sampling_of
from engine.text.types import SamplingDefaults

_OVERRIDE = "--override-generation-config"


def check_sampling_source(source: str, override: Mapping[str, Any] | None) -> None:
    """Raise ConfigError for sampling that cannot be followed, whatever the model recommends."""
    known = asdict(SamplingDefaults())
    if source not in ("auto", "vllm") and not (expanded(source) / FILE).is_file():
        raise ConfigError(f"--generation-config is {source!r}; it must be auto, vllm or a folder with {FILE}.")
    given = override or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_OVERRIDE} is {given!r}; it must be a JSON object.")
    if unknown := given.keys() - {*known, "do_sample"}:
        raise unknown_key(_OVERRIDE, min(unknown, key=str), known)
    sampling_of(given, SamplingDefaults(), _OVERRIDE)


def default_sampling(
    source: str, override: Mapping[str, Any] | None, model: Path, log: logging.Logger
) -> SamplingDefaults:
    """Return the sampling where a request names none, and log what is not OpenAI's. Raises ConfigError or ModelLoadError."""
    from engine.text.fields.sampling import check_defaults  # pydantic

    neutral = SamplingDefaults()
    folder = model if source == "auto" else expanded(source)
    if source == "auto" and folder.is_file() and folder.name == DEFAULT_FILE:
        defaults = sampling_of(DEFAULT_SAMPLING, neutral, DEFAULT_NAME)
    else:
        defaults = neutral if source == "vllm" or folder.is_file() else read_sampling(folder)
    defaults = sampling_of(override or {}, defaults, _OVERRIDE)
    check_defaults(defaults)
    if defaults != neutral:
        named = {name: value for name, value in asdict(defaults).items() if value != getattr(neutral, name)}
        log.info("sampling where a request names none: %s", ", ".join(f"{name} {named[name]}" for name in named))
    return defaults
