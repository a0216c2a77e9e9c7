"""Finds the adapters of --lora-modules, folders or Hugging Face ids, and reads PEFT's adapter_config.json.

Unsupported settings that would change the answer are refused by name; training settings are ignored. Loading thread.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.core.errors import AdapterLoadError, AdapterNotFoundError, ClientError, ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.hub.files import LORA_CONFIG, LORA_WEIGHTS
from engine.settings.engine_config import EngineConfig, LoraModule
from engine.system.regular_file import check_regular, read_object, reason

_MAX_CONFIG_BYTES = 1 << 20

Number = TypeVar("Number", int, float)

# Variants of LoRA with another computation. False, empty or absent means off.
_MUST_BE_OFF = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
# Prefixes of init_lora_weights whose training changes the base model's weights.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Ranks and scales by module; a pattern names modules by the end of their names."""

    rank: int
    alpha: float
    rank_stabilised: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of the product of the two matrices."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_config(folder: Path) -> LoraConfig:
    """Return the adapter's settings. Raises AdapterLoadError with the wrong key."""
    path = folder / LORA_CONFIG
    missing = f"{folder} has no {LORA_CONFIG}; name a folder that PEFT has saved."
    values = read_object(path, _MAX_CONFIG_BYTES, AdapterLoadError, missing)
    _refuse(path, values)
    return LoraConfig(
        rank=int(_positive(path, values, "r", 8)),
        alpha=_positive(path, values, "lora_alpha", 8),
        rank_stabilised=bool(values.get("use_rslora")),
        rank_pattern={name: int(value) for name, value in _pattern(path, values, "rank_pattern").items()},
        alpha_pattern=_pattern(path, values, "alpha_pattern"),
    )


def _refuse(path: Path, values: Mapping[str, Any]) -> None:
    kind = values.get("peft_type")
    if kind != "LORA":
        raise AdapterLoadError(f"{path}: peft_type is {kind!r}; only LORA is supported.")
    bias = values.get("bias", "none")
    if bias != "none":
        raise AdapterLoadError(f"{path}: bias is {bias!r}, and adapters with biases are not supported; only 'none' is.")
    for key in _MUST_BE_OFF:
        if values.get(key):
            raise AdapterLoadError(
                f"{path}: {key} is {values[key]!r}, which is not supported; leave it off in training."
            )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        raise AdapterLoadError(
            f"{path}: init_lora_weights is {start!r}, which has changed the base model's weights too; save the adapter with "
            "path_initial_model_for_weight_conversion, so that it holds all of the difference."
        )


def _positive(path: Path, values: Mapping[str, Any], key: str, default: int) -> float:
    value = values.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
    if not is_number or (key in ("r", "rank_pattern") and value != int(value)):
        raise AdapterLoadError(f"{path}: {key} is {value!r}; it must be a number above 0.")
    return float(value)


def _pattern(path: Path, values: Mapping[str, Any], key: str) -> dict[str, float]:
    pattern = values.get(key) or {}
    if not isinstance(pattern, dict):
        raise AdapterLoadError(f"{path}: {key} is {pattern!r}; it must be an object of names and numbers.")
    for name in pattern:
        # PEFT accepts regular expressions, and some of those never terminate.
        if not name.replace(".", "").replace("_", "").isalnum():
            raise AdapterLoadError(f"{path}: {key} has {name!r}; only names of modules, or their ends, are supported.")
    return {name: _positive(path, {key: value}, key, 0) for name, value in pattern.items()}


def _matching(pattern: Mapping[str, Number], module: str, default: Number) -> Number:
    """Return the first entry that is the module's name, or its end after a dot."""
    return next((value for name, value in pattern.items() if f".{module}".endswith(f".{name}")), default)


def check_folder(folder: Path) -> LoraConfig:
    """Check what needs no model. Raises AdapterNotFoundError or AdapterLoadError."""
    try:
        is_folder = folder.is_dir()
    except OSError as error:
        raise AdapterLoadError(f"{folder!s:.200} cannot be read: {reason(error)}.") from None
    if not is_folder:
        raise AdapterNotFoundError(
            f"There is no folder {folder}; name one that PEFT has saved an adapter in.", param="lora_path"
        )
    config = read_config(folder)
    try:
        check_regular(folder / LORA_WEIGHTS)
    except FileNotFoundError:
        if not (folder / "adapter_model.bin").exists():
            raise AdapterLoadError(f"{folder} has no {LORA_WEIGHTS}; name a folder that PEFT has saved.") from None
        raise AdapterLoadError(
            f"{folder} holds only pickled weights (adapter_model.bin), which can run code when read; save the adapter with "
            "safe_serialization=True."
        ) from None
    except OSError as error:
        raise AdapterLoadError(f"{folder / LORA_WEIGHTS} cannot be read: {reason(error)}.") from None
    return config


@contextmanager
def naming(module: LoraModule) -> Iterator[None]:
    """At start-up, turn an adapter's fault into one of the setting that names it."""
    try:
        yield
    except ClientError as error:
        raise ConfigError(f"--lora-modules has {module.name}={module.path}: {error}") from error


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
