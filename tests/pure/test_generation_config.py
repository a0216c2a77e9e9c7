"""Sampling where a request names none: the model's recommendation, unless the user sets another."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, ModelLoadError
from engine.sources.model_source import DEFAULT_FILE
from engine.text.generation_config import sampling_of
from engine.text.requests.default_sampling import check_sampling_source, default_sampling
from engine.text.types import SamplingDefaults
from server.settings.serve_config import ServeConfig

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [1], "max_length": 20}


def _sampling(config: ServeConfig, model: Path) -> SamplingDefaults:
    source, override = config.generation_config, config.override_generation_config
    return default_sampling(source, override, model, logging.getLogger(__name__))


def _check_sampling(config: ServeConfig) -> None:
    check_sampling_source(config.generation_config, config.override_generation_config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return tmp_path


def test_the_models_recommendation_is_the_default(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _sampling(ServeConfig(), model) == SamplingDefaults(temperature=0.6, top_k=20)
    assert "sampling where a request names none: temperature 0.6, top_k 20" in caplog.text


def test_a_folder_without_a_recommendation_and_a_file_have_openais(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert _sampling(ServeConfig(), tmp_path) == _sampling(ServeConfig(), file) == SamplingDefaults()


def test_the_default_model_has_the_sampling_of_its_card(tmp_path: Path) -> None:
    file = tmp_path / DEFAULT_FILE
    file.touch()
    assert _sampling(ServeConfig(), file) == SamplingDefaults(temperature=0.2, top_p=0.9, max_tokens=1024)
    assert _sampling(ServeConfig(generation_config="vllm"), file) == SamplingDefaults()
    warmer = ServeConfig(override_generation_config={"temperature": 0.8})
    assert _sampling(warmer, file) == SamplingDefaults(temperature=0.8, top_p=0.9, max_tokens=1024)


def test_others_can_be_set(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _sampling(ServeConfig(generation_config="vllm"), model) == SamplingDefaults()
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.5, "max_new_tokens": 3}')
    config = ServeConfig(generation_config=str(other), override_generation_config={"temperature": 0.1})
    assert _sampling(config, model) == SamplingDefaults(temperature=0.1, top_p=0.5, max_new_tokens=3)
    monkeypatch.setenv("HOME", str(tmp_path))
    _check_sampling(ServeConfig(generation_config="~/other"))
    assert _sampling(ServeConfig(generation_config="~/other"), model).top_p == 0.5
    assert sampling_of({"do_sample": False, "top_p": 1}, SamplingDefaults(), "here").temperature == 0


@pytest.mark.parametrize("values", [{"temperature": -1}, {"max_new_tokens": 0}, {"max_new_tokens": 1.5}, {"top_p": 2}])
def test_a_value_that_no_request_may_name_is_refused(values: dict[str, float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has {next(iter(values))} "):
        _sampling(ServeConfig(override_generation_config=values), tmp_path)


def test_what_cannot_be_followed_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it must be auto, vllm or a folder with"):
        _check_sampling(ServeConfig(generation_config=str(tmp_path)))
    with pytest.raises(ConfigError, match="--override-generation-config has no key 'seed'"):
        _check_sampling(ServeConfig(override_generation_config={"seed": 1}))
    for value in (True, float("nan"), 10**400):
        with pytest.raises(
            ModelLoadError, match=f"--override-generation-config: 'top_k' is {value!r:.80}, not a number"
        ):
            _check_sampling(ServeConfig(override_generation_config={"top_k": value}))
