"""Checks a model from its small files, before torch is imported.

Main thread, at start-up. Checks that need torch or the device are in engine/build.py, and conflicts of settings in
engine/config.py and server/settings/conflicts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.model_source import check_entries, resolve_model_path
from engine.runtime.lora.config import check_folder, naming
from engine.runtime.models.config import narrow_latents
from engine.runtime.models.config_file import is_native, require_readable, servable
from engine.runtime.models.families import read_config
from engine.runtime.weights.formats import choose_format


class ModelFacts(NamedTuple):
    """Facts about a model before it is loaded."""

    is_native: bool  # Quire's decoder runs it and its draft model; only the tokenizer may need transformers
    vocab_size: int | None = None  # None: known only to transformers
    max_positions: int | None = None


def check_model(config: EngineConfig) -> ModelFacts:
    """Check model, draft model and adapters. Raises ModelLoadError or ConfigError."""
    facts = _check_one(config)
    if facts.max_positions is not None:
        config.check_length(facts.max_positions)
    for module in config.lora_modules:
        with naming(module):
            check_folder(Path(module.path))
    draft = config.speculation
    if draft is None or draft.model is None:
        return facts
    try:
        other = _check_one(config.of_draft(draft))
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"--speculative-config: the draft model could not be loaded: {error}") from error
    if other.vocab_size is not None and facts.vocab_size is not None:
        draft.check_vocabulary(other.vocab_size, facts.vocab_size)
    return facts._replace(is_native=facts.is_native and other.is_native)


def _check_one(config: EngineConfig) -> ModelFacts:
    path = resolve_model_path(config.model, config.revision, weights=False)
    if path.is_dir():
        check_entries(path)
    checkpoint = choose_format(config.load_format, path).open(path)
    model = servable(checkpoint.config)
    if Path(config.model).expanduser().exists():  # of a hub's model, the weights are not here yet
        checkpoint.check()
    is_own = is_native(config, model, path)
    require_readable(checkpoint, is_own=is_own)
    if not is_own:
        return ModelFacts(False)
    own = read_config(model.values, model.source)
    if own.latent is not None and config.kv_cache_dtype != "auto":
        raise narrow_latents(config.kv_cache_dtype)
    return ModelFacts(True, own.vocab_size, own.max_positions)
