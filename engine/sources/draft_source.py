"""Completes --speculative-config from the config.json of model and draft, and fetches both.

The config of a speculator, a draft that was trained for one model, names its method. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.types import Progress
from engine.files.hf_config import HFConfig
from engine.files.mmproj import find_mmproj
from engine.runtime.weights.safetensors import read_config
from engine.settings.engine_config import EngineConfig
from engine.settings.setting import read_object
from engine.settings.speculative_config import DEFAULT_DRAFTS, FLAG, METHODS, SpeculativeConfig
from engine.sources.adapter_config import fetch_adapters
from engine.sources.model_source import fetch, local_path

_NO_CONFIG = HFConfig({}, "")
# Parts of a repository's name that vLLM reads the method from, in its order.
_NAMED = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_NUM_HEADS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_MTP_DRAFTS = 2  # where four of five are right, two gain more than one on two CPU cores, and three about as much as two


def complete(config: EngineConfig) -> EngineConfig:
    """Return the settings with a method and a number of drafts. Raises ConfigError or ModelLoadError."""
    own, asked = read_source(config), config.speculation
    if own.has("speculators_config"):
        raise ModelLoadError(
            f"{own.source} is of a draft; serve the model that it drafts for, and name this one in {FLAG} as model."
        )
    if asked is None:
        return config
    asked.check_named()
    if asked.method and asked.num_speculative_tokens and (asked.method != "mtp" or asked.model is None):
        return config
    with naming_draft():
        draft = own if asked.model is None else read_source(config.of_draft(asked))
    method = asked.method or _method(asked, draft)
    num_drafts = asked.num_speculative_tokens or _num_drafts(method, draft)
    if method == "mtp" and asked.model is not None:
        if asked.model != config.model:  # as vLLM allows it to be written
            raise ConfigError(f"{FLAG}: the method mtp drafts with layers of the model itself; leave out model.")
        config = _with_draft(config, model=None)
    return _with_draft(config, method=method, num_speculative_tokens=num_drafts)


def fetch_models(config: EngineConfig, report: Callable[[Progress], None]) -> EngineConfig:
    """Return complete settings with local paths for model, draft and adapters, fetched if they are ids. Raises ModelLoadError."""

    def fetch_one(config: EngineConfig, *, images: bool = False) -> str:
        weights = config.load_format != "dummy"
        return str(fetch(config.model, config.revision, config.download_dir, report, weights=weights, images=images))

    config = fetch_adapters(complete(config), report)
    looks = config.mmproj is None and config.image_cache_memory > 0
    path, draft = fetch_one(config, images=looks), config.speculation
    if path != config.model:
        config = replace(config, model=path)
    if looks and (beside := find_mmproj(Path(path))):
        config = replace(config, mmproj=str(beside))
    if draft is None or draft.model is None:
        return config
    with naming_draft():
        path = fetch_one(config.of_draft(draft))
    return config if path == draft.model else _with_draft(config, model=path)


@contextmanager
def naming_draft() -> Iterator[None]:
    """Name --speculative-config in the errors of a draft model."""
    try:
        yield
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{FLAG}: the draft model could not be loaded: {error}") from error


def _with_draft(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return the settings with other values of --speculative-config."""
    assert config.speculative_config is not None
    return replace(config, speculative_config={**read_object(FLAG, config.speculative_config), **changes})


def read_source(config: EngineConfig) -> HFConfig:
    """Return the config.json of a folder or repository; an empty one for a GGUF file."""
    path = config_path(config)
    return _NO_CONFIG if path is None or path.is_file() else read_config(path)


def config_path(config: EngineConfig) -> Path | None:
    """Return a model's folder or file, None for a GGUF file of a hub; of a folder there, the configs alone are fetched."""
    path = local_path(config.model)
    if path is not None:
        return path
    from engine.hub.model import open_model

    found = open_model(config.model, config.revision, config.download_dir)
    return found.fetch_config(weights=config.load_format != "dummy") if found.is_folder else None


def _method(asked: SpeculativeConfig, draft: HFConfig) -> str:
    """Return the method of a draft model, from its config, then its name. Raises ConfigError."""
    assert asked.model is not None, "otherwise a method is given"
    named = Path(asked.model).name.lower()
    method = _method_in(draft) or next((each for word, each in _NAMED.items() if word in named), "")
    if method and method not in METHODS:
        raise ConfigError(
            f"{FLAG}: {asked.model} is a draft of the method {method!r}, which Quire does not serve; choose one of "
            f"{', '.join(METHODS)}."
        )
    return method or "draft_model"


def _method_in(draft: HFConfig) -> str:
    """Return the method that a config.json names; "" if it is of an ordinary model."""
    if draft.has("speculators_model_type"):
        return draft.text("speculators_model_type")
    kinds = draft.texts("architectures") if draft.has("architectures") else ()
    if draft.has("draft_vocab_size") or any("eagle3" in kind.lower() for kind in kinds):
        return "eagle3"
    return "mtp" if any(draft.values.get(key) for key in _NUM_HEADS) else ""


def _num_drafts(method: str, draft: HFConfig) -> int:
    """Return the number of drafts that a config.json recommends, or Quire's."""
    if method == "mtp":  # by the first layer, however many there are
        return _MTP_DRAFTS
    proposals = draft.section("speculators_config").values.get("proposal_methods")
    if isinstance(proposals, list) and proposals and isinstance(proposals[0], Mapping):
        return HFConfig(proposals[0], draft.source).size("speculative_tokens", DEFAULT_DRAFTS)
    return DEFAULT_DRAFTS
