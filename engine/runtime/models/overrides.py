"""Applies --hf-overrides to a model's config.json, without torch.

The rope is spelled `rope_scaling` beside `rope_theta` in older files, and `rope_parameters` since transformers 5. An override may
use either spelling, whichever the file has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import ConfigError
from engine.files.hf_config import HFConfig

_ROPES = ("rope_scaling", "rope_parameters")
_STRETCHING = ("yarn", "linear")  # kinds of rope that multiply the length a model was made for by their factor
_LENGTH, _TRAINED = "max_position_embeddings", "original_max_position_embeddings"


def override(config: HFConfig, overrides: Mapping[str, Any] | None) -> HFConfig:
    """Return a config with other values for some keys; those of an object that it has are merged. Raises ConfigError."""
    if not overrides:
        return config
    values = dict(config.values)
    for key, value in overrides.items():
        if key in _ROPES or (key == "rope_theta" and values.get("rope_parameters")):
            _override_rope(values, {key: value} if key == "rope_theta" else value)
        elif isinstance(value, Mapping) and isinstance(values.get(key), Mapping):
            values[key] = {**values[key], **value}
        else:
            values[key] = value
    if _LENGTH not in overrides and any(overrides.get(key) for key in _ROPES):
        _stretch(values)
    return HFConfig(values, f"{config.source} with --hf-overrides")


def _override_rope(values: dict[str, Any], given: Any) -> None:
    """Merge settings of the rope into the object that has them; null takes the scaling away."""
    name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    stored = values.get(name) or {}
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"--hf-overrides: {name} is {given!r}; it must be an object or null.")
    if given is None:
        given = {"rope_type": "default"}
        stored = {key: value for key, value in stored.items() if key == "rope_theta" or isinstance(value, Mapping)}
    is_nested = [any(isinstance(value, Mapping) for value in each.values()) for each in (stored, given)]
    if stored and is_nested[0] != is_nested[1]:
        kinds = ", ".join(stored) if is_nested[0] else "one object for all layers"
        raise ConfigError(f"--hf-overrides: the rope of this model has {kinds}; write its settings in that form.")
    values[name] = {**stored, **given}
    if name == "rope_scaling" and "rope_theta" in given:
        values["rope_theta"] = given["rope_theta"]


def _stretch(values: dict[str, Any]) -> None:
    """Multiply the longest sequence by the factor of the rope, as vLLM does."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    assert isinstance(rope, dict), "an override has set it"
    factor, longest = rope.get("factor"), values.get(_LENGTH)
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _STRETCHING or not isinstance(factor, int | float) or not isinstance(longest, int):
        return
    trained = rope.setdefault(_TRAINED, longest)
    if isinstance(trained, int):
        values[_LENGTH] = max(longest, int(trained * factor))
