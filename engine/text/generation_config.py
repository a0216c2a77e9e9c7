"""Reads a generation_config.json: the sampling that a model recommends. Imports no third-party module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.core.errors import ModelLoadError
from engine.system.regular_file import read_json
from engine.text.types import SamplingDefaults

FILE = "generation_config.json"
_MOST = 1e300


def read_sampling(folder: Path) -> SamplingDefaults:
    """Return the sampling that a folder's generation_config.json recommends; OpenAI's without one. Raises ModelLoadError."""
    return sampling_of(read_json_beside(folder / FILE), SamplingDefaults(), FILE)


def sampling_of(values: Mapping[str, Any], base: SamplingDefaults, source: str) -> SamplingDefaults:
    """Return `base` with the sampling in the keys of a generation config. Raises ModelLoadError, naming the source."""
    names = [each.name for each in fields(SamplingDefaults)]
    named = {name: values[name] for name in names if values.get(name) is not None}
    for name, value in named.items():
        if type(value) not in (int, float) or not abs(value) < _MOST:  # nor is NaN
            raise ModelLoadError(f"{source}: {name!r} is {value!r:.80}, not a number; correct or remove it.")
    if named.keys() - {"max_tokens", "max_new_tokens"} and values.get("do_sample") is False:
        named["temperature"] = 0.0
    return replace(base, **named)


def read_json_beside(path: Path) -> dict[str, Any]:
    """Return the content of a small file beside the tokenizer; empty if there is none."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}.") from error
    return content if isinstance(content, dict) else {}
