"""--hf-overrides replaces keys of config.json, whichever spelling of the rope it has."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import ConfigError
from engine.files.hf_config import HFConfig
from engine.runtime.models.config_file import override

OLD = {"model_type": "qwen3", "max_position_embeddings": 40_960, "rope_theta": 1e6, "rope_scaling": None}
NEW = {
    "model_type": "qwen3",
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


def values(config: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return dict(override(HFConfig(config, "config.json"), overrides).values)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_in_either_spelling_reaches_either_file_and_stretches_the_length(name: str) -> None:
    assert values(OLD, **{name: YARN}) == OLD | {"rope_scaling": YARN, "max_position_embeddings": 131_072}
    made = values(NEW, **{name: YARN})
    assert made["rope_parameters"] == {**YARN, "rope_theta": 1e6}
    assert made["max_position_embeddings"] == 131_072


def test_a_length_that_is_named_is_kept_and_the_trained_one_is_remembered() -> None:
    assert values(OLD, rope_scaling=YARN, max_position_embeddings=50_000)["max_position_embeddings"] == 50_000
    made = values(OLD, rope_scaling={"type": "linear", "factor": 2})
    assert made["max_position_embeddings"] == 81_920
    assert made["rope_scaling"]["original_max_position_embeddings"] == 40_960
    assert values(OLD, rope_scaling={"rope_type": "dynamic", "factor": 2.0})["max_position_embeddings"] == 40_960


def test_a_base_reaches_either_file() -> None:
    assert values(OLD, rope_theta=5.0)["rope_theta"] == 5.0
    assert values(NEW, rope_theta=5.0)["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}
    assert values(OLD, rope_parameters={"rope_theta": 5.0})["rope_theta"] == 5.0


def test_null_takes_a_scaling_away() -> None:
    scaled = NEW | {"rope_parameters": {**YARN, "rope_theta": 1e6}}
    assert values(scaled, rope_scaling=None)["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert values(OLD | {"rope_scaling": YARN}, rope_scaling=None)["rope_scaling"] == {"rope_type": "default"}


def test_objects_are_merged_and_other_values_replaced() -> None:
    config = {"text_config": {"a": 1, "b": 2}, "c": 3}
    assert values(config, text_config={"b": 4}, c=5, d=6) == {"text_config": {"a": 1, "b": 4}, "c": 5, "d": 6}
    assert config == {"text_config": {"a": 1, "b": 2}, "c": 3}
    unchanged = HFConfig(config, "config.json")
    assert override(unchanged, None) is unchanged
    assert override(unchanged, {"c": 1}).source == "config.json with --hf-overrides"


@pytest.mark.parametrize(
    ("config", "given", "sentence"),
    [
        (NEW, 3, "rope_parameters is 3; it must be an object or null"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            YARN,
            "has full_attention, sliding_attention;",
        ),
        (NEW, {"full_attention": YARN}, "has one object for all layers"),
    ],
)
def test_a_rope_of_another_form_is_refused(config: dict[str, Any], given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        values(config, rope_scaling=given)


@pytest.mark.parametrize(
    ("source", "is_reranker"),
    [
        ("/models/Qwen3-Reranker-0.6B/config.json", True),
        ("Qwen/Qwen3-Reranker-0.6B/config.json", True),
        ("/cache/hub/models--Qwen--Qwen3-Reranker-4B/snapshots/0123/config.json", True),
        ("/models/qwen3-reranker-0.6b-q8_0.gguf", True),
        ("/home/ann/qwen3-reranker-service/models/Qwen3-0.6B/config.json", False),
        ("/models/Qwen3-Embedding-0.6B/config.json", False),
    ],
)
def test_a_name_makes_a_causal_model_a_reranker(source: str, is_reranker: bool) -> None:
    """The model's own name: a folder somewhere above is another's. One that is a classifier already stays as it is."""
    causal = OLD | {"architectures": ["Qwen3ForCausalLM"]}
    assert ("classifier_from_token" in override(HFConfig(causal, source), None).values) is is_reranker
    ready = OLD | {"architectures": ["Qwen3ForSequenceClassification"]}
    assert override(HFConfig(ready, source), None).values == ready
