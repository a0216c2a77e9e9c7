"""A setting that a config.json leaves out has transformers' default, or is refused; no family guesses another."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from engine.core.errors import ModelLoadError
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.models.families import FAMILIES, read_config
from tests.cpu.test_models_families import CASES

UNREAD = ("model_type", "architectures", "dtype")
# Heads for MTP are counted where weights have them, and a rope has the length that it was trained for.
OTHERWISE = ("num_nextn_predict_layers", "original_max_position_embeddings")


def ours(values: dict[str, Any]) -> ModelConfig | None:
    try:
        return read_config(values, "config.json")
    except ModelLoadError:
        return None


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_is_transformers_default(name: str) -> None:
    config = CASES[name].build()
    values = config.to_dict()
    if values["model_type"] not in FAMILIES:
        pytest.skip("another code's")
    for key in values.keys() - {*UNREAD, *OTHERWISE}:
        for more in ({}, {"num_attention_heads": 64, "hidden_size": 1024}) if key == "num_key_value_heads" else ({},):
            less = {**deepcopy(values), **more}
            del less[key]
            found = ours(less)
            try:
                whole = ours(type(config).from_dict(deepcopy(less)).to_dict())
            except Exception:  # any: transformers refuses it
                continue
            assert found == whole or None in (found, whole), key
