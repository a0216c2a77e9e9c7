"""Checks a model from its small files, before torch is imported.

Main thread, at start-up. Checks that need torch or the device are in engine/build.py, and conflicts of settings in
engine/config.py and server/settings/conflicts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from engine.config import EngineConfig
from engine.core.errors import ConfigError, ModelLoadError
from engine.gguf_header import read_header
from engine.regular_file import MAX_BYTES, check_regular, reason
from engine.runtime.lora.config import check_folder, naming
from engine.runtime.models.config_file import is_native, read_model_config
from engine.runtime.models.families import read_config
from engine.runtime.models.source import resolve_model_path
from engine.runtime.weights.hf_config import HFConfig
from engine.runtime.weights.weight_files import weight_files

_SMALL = (".json", ".jinja", ".txt", ".model")  # files of a model folder that are read whole


class ModelFacts(NamedTuple):
    """Facts about a model before it is loaded."""

    is_native: bool  # Quire's decoder runs it and its draft model; only the tokenizer may need transformers
    vocab_size: int | None = None  # None: known only from the weights, or to transformers
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
    if path.suffix == ".gguf":
        if config.model_impl == "transformers":
            raise ConfigError(
                f"--model-impl is 'transformers', and {path} is a GGUF file, which Quire's own models alone serve; leave it out."
            )
        return ModelFacts(True, max_positions=_gguf_positions(config, path))
    check_entries(path)
    values, source = read_model_config(path), str(path / "config.json")
    if config.load_format != "dummy" and Path(config.model).expanduser().is_dir():
        weight_files(path)
    if is_native(config, path):
        own = read_config(values, source)
        return ModelFacts(True, own.vocab_size, own.max_positions)
    return ModelFacts(False)


def _gguf_positions(config: EngineConfig, path: Path) -> int | None:
    """Return the model's context length; None if none is configured."""
    if config.max_model_len is None:
        return None
    metadata = HFConfig(read_header(path).metadata, str(path))
    return metadata.size(f"{metadata.text('general.architecture')}.context_length")


def check_entries(folder: Path) -> None:
    """Raise ModelLoadError for files that block a library, or have no end."""
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {reason(error)}.") from None
    for path in paths:
        if path.suffix not in (*_SMALL, ".safetensors") or path.is_dir():
            continue
        try:
            check_regular(path, MAX_BYTES if path.suffix in _SMALL else None)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {reason(error)}.") from None
