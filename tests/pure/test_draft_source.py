"""What config.json files decide about drafts: the method, how many, and the model that a speculator drafts for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import ConfigError, ModelLoadError
from engine.settings.engine_config import EngineConfig
from engine.settings.speculative_config import METHODS
from engine.sources.draft_source import complete

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
SPECULATOR = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": None},
    },
}


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def completed(model: str, asked: dict[str, Any] | None) -> tuple[str, int]:
    found = complete(EngineConfig(model=model, speculative_config=asked)).speculation
    assert found is not None
    return found.method, found.num_speculative_tokens


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("small", LLAMA, ("draft_model", 4)),
    ]
    + [
        ("any", SPECULATOR, ("eagle3", 3)),
        ("any", {**LLAMA, "draft_vocab_size": 32000}, ("eagle3", 4)),
        ("any", {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"]}, ("eagle3", 4)),
        ("EAGLE3-LLaMA3.1-Instruct-8B", LLAMA, ("eagle3", 4)),
    ]
    * ("eagle3" in METHODS),
)
def test_a_drafts_config_or_name_says_the_method(
    tmp_path: Path, name: str, config: dict[str, Any], expected: tuple[str, int]
) -> None:
    model, draft = write(tmp_path / "model", LLAMA), write(tmp_path / name, config)
    assert completed(model, {"model": draft}) == expected
    assert completed(model, {"model": draft, "num_speculative_tokens": 7}) == (expected[0], 7)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_an_mtp_layer_drafts_twice_whatever_the_config_counts(tmp_path: Path, num_layers: int) -> None:
    model = write(tmp_path / "model", {**LLAMA, "num_nextn_predict_layers": num_layers})
    assert completed(model, {"method": "mtp"}) == ("mtp", 2)


@pytest.mark.parametrize(
    ("name", "config", "method"),
    [
        ("EAGLE-LLaMA3-Instruct-8B", LLAMA, "eagle"),
        ("Qwen3-8B-DFlash-b16", LLAMA, "dflash"),
        ("any", {**SPECULATOR, "speculators_model_type": "dspark"}, "dspark"),
    ],
)
def test_other_drafts_are_refused_by_name(tmp_path: Path, name: str, config: dict[str, Any], method: str) -> None:
    model, draft = write(tmp_path / "model", LLAMA), write(tmp_path / name, config)
    with pytest.raises(ConfigError, match=f"is a draft of the method '{method}', which Quire does not serve; choose"):
        complete(EngineConfig(model=model, speculative_config={"model": draft}))


def test_a_speculator_as_the_model_is_refused(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", SPECULATOR)
    with pytest.raises(ModelLoadError, match="is of a draft; serve the model that it drafts for"):
        complete(EngineConfig(model=draft))
