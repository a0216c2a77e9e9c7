"""Finds the adapters of --lora-modules: folders, or Hugging Face ids, whose files are fetched. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.sources.adapter_config import check_folder, naming, read_config

_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def check_adapters(config: EngineConfig) -> None:
    """Raise ConfigError for adapters that cannot be loaded; of a repository its config alone is fetched and checked."""
    for module in config.lora_modules:
        with naming(module):
            if _is_remote(module):
                read_config(_fetch(module, config, None, weights=False))
            else:
                check_folder(Path(module.path))


def fetch_adapters(config: EngineConfig, report: Callable[[Progress], None]) -> EngineConfig:
    """Return the settings with folders for all adapters, fetched if they are ids. Raises ConfigError."""
    if not any(_is_remote(module) for module in config.lora_modules):
        return config
    modules = [
        module._replace(path=str(_fetch(module, config, report))) if _is_remote(module) else module
        for module in config.lora_modules
    ]
    return replace(config, lora_modules=tuple(modules))


def _is_remote(module: LoraModule) -> bool:
    """Return whether a path is an id: two names, and no folder here."""
    return _ID.fullmatch(module.path) is not None and not Path(module.path).exists()


def _fetch(
    module: LoraModule, config: EngineConfig, report: Callable[[Progress], None] | None, *, weights: bool = True
) -> Path:
    from engine.hub.model import open_model

    try:
        return open_model(module.path, None, config.download_dir).fetch_adapter(report, weights=weights)
    except ModelLoadError as error:
        raise ConfigError(f"--lora-modules has {module.name}={module.path}: {error}") from error
