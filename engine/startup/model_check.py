"""Checks a model from its small files, before torch is imported.

Main thread, at start-up. Checks that need torch or the device are in engine/startup/build.py, and conflicts of settings in
engine/settings/engine_config.py and server/settings/conflicts.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.files.gguf_header import read_beginning
from engine.files.hf_config import FLOAT_TYPES, HFConfig
from engine.files.vector_files import read_vectors
from engine.runtime.layers.model_config import ModelConfig, narrow_latents
from engine.runtime.models.complete import check_complete
from engine.runtime.models.config_file import (
    TOWERS,
    is_encoder,
    is_native,
    override,
    read_own,
    require_readable,
    servable,
)
from engine.runtime.models.encoder_families import read_encoder
from engine.runtime.models.families import read_config
from engine.runtime.native.build import type_in_16_bits
from engine.runtime.weights.checkpoint import Checkpoint, open_checkpoint
from engine.runtime.weights.gguf_config import check_architecture
from engine.settings.engine_config import EngineConfig
from engine.settings.speculative_config import METHODS, SpeculativeConfig
from engine.sources.adapter_config import check_adapters
from engine.sources.draft_source import complete, naming_draft, read_source
from engine.sources.model_source import check_entries, local_path
from engine.startup.ahead import runs_on_cpu


class ModelFacts(NamedTuple):
    """Facts about a model before it is loaded."""

    is_native: bool  # Quire's decoder runs it and its draft model; only the tokenizer may need transformers
    config: ModelConfig | None = None  # None: known only to transformers, or when a GGUF file is there
    takes_images: bool = False


def check_model(config: EngineConfig, *, has_tokenizer: bool = False) -> ModelFacts:
    """Check model, draft and adapters. Raises ModelLoadError or ConfigError.

    With `has_tokenizer` the model's tokenizer is not used.
    """
    config = complete(config)
    facts = _check_one(config, has_tokenizer=has_tokenizer)
    if facts.config is not None:
        config.check_length(facts.config.max_positions)
    check_adapters(config)
    return facts if config.speculation is None else _check_draft(config, config.speculation, facts)


def weight_bytes(config: EngineConfig) -> int:
    """Return the bytes of a model's weights in memory, packed; 0 of one that is not here yet, or has none. Raises ModelLoadError."""
    path, chosen = local_path(config.model), config.quantization
    if path is None:
        return 0
    checkpoint = open_checkpoint(config.load_format, path)
    name, in_16_bits = config.asked_dtype, type_in_16_bits(config.cpu_kernels) if runs_on_cpu(config) else None
    size = FLOAT_TYPES[checkpoint.config.float_type(in_16_bits) if name == "auto" else name]
    is_converted = chosen == "none" or (chosen == "auto" and config.dtype != "auto")
    return round(checkpoint.held_bytes(size, 1 if chosen in ("int8", "fp8") else size if is_converted else None))


def _check_draft(config: EngineConfig, asked: SpeculativeConfig, facts: ModelFacts) -> ModelFacts:
    """Check a draft, and return the facts of both models. Raises ModelLoadError or ConfigError."""
    method = METHODS[asked.method]
    if method.check:
        source = config.of_draft(asked) if method.has_model else config
        with naming_draft():
            if method.has_model:
                _check_weights(source)
            if facts.config is not None or not facts.is_native:
                resolve_name(method.check)(read_source(source), facts.config)
        return facts
    if not method.has_model:
        return facts
    with naming_draft():
        other = _check_one(config.of_draft(asked), has_tokenizer=True)
    if other.config is not None and facts.config is not None:
        asked.check_vocabulary(other.config.vocab_size, facts.config.vocab_size)
    return facts._replace(is_native=facts.is_native and other.is_native)


def _check_weights(config: EngineConfig) -> None:
    """Check the files of a draft that is a part of a model. Raises ModelLoadError or ConfigError."""
    path = local_path(config.model)
    if path is None:
        return  # read_source checks the list of its files
    if path.is_file():
        raise ConfigError(f"{path} is a {path.suffix} file; name a folder of safetensors.")
    check_entries(path)
    open_checkpoint(config.load_format, path).check()


def _check_one(config: EngineConfig, *, has_tokenizer: bool) -> ModelFacts:
    path = local_path(config.model)
    if path is None:
        return _check_remote(config, has_tokenizer=has_tokenizer)
    if path.is_dir():
        check_entries(path)
    checkpoint = open_checkpoint(config.load_format, path, mmproj=config.mmproj)
    facts = _facts(config, checkpoint, path)
    checkpoint.check()
    if is_encoder(checkpoint.config.values):
        read_vectors(servable(checkpoint.config, config.hf_overrides), path, is_encoder=True)
    if facts.config is None:
        return facts
    checkpoint.config = servable(checkpoint.config, config.hf_overrides)
    own = read_own(checkpoint, path)
    check_complete(own, checkpoint)
    return facts._replace(config=own)


def _check_remote(config: EngineConfig, *, has_tokenizer: bool) -> ModelFacts:
    """Check a model of the hub by config.json, or the header of a GGUF file, which alone are fetched.

    Its other files are checked when they have been fetched.
    """
    from engine.hub.model import open_model

    found = open_model(config.model, config.revision, config.download_dir)
    if found.is_folder:
        path = found.fetch_config(weights=config.load_format != "dummy")
        checkpoint = open_checkpoint("safetensors", path)
        checkpoint.config = HFConfig(checkpoint.config.values, f"{found.repo}/config.json")
        return _facts(config, checkpoint, path)
    from engine.runtime.weights.gguf import header_config
    from engine.text.gguf_tokenizer import check_tokenizer

    with closing(found.beginnings()) as beginnings:
        for source, content in beginnings:
            metadata, tensors = read_beginning(content)
            check_architecture(metadata, source)
            if tensors is None:
                continue
            if not has_tokenizer:
                check_tokenizer(metadata)
            model = header_config(metadata, tensors, source)
            return ModelFacts(True) if model is None else _own_facts(config, override(model, config.hf_overrides))
    return ModelFacts(True)


def _facts(config: EngineConfig, checkpoint: Checkpoint, path: Path) -> ModelFacts:
    """Return what the config says of the model. Raises ModelLoadError or ConfigError."""
    model = servable(checkpoint.config, config.hf_overrides)
    is_own = is_native(config, model, path)
    require_readable(checkpoint, is_own=is_own)
    return _own_facts(config, model) if is_own else ModelFacts(False)


def _own_facts(config: EngineConfig, model: HFConfig) -> ModelFacts:
    """Return what the config says of a model that Quire's decoder runs. Raises ModelLoadError or ConfigError."""
    if is_encoder(model.values):
        read_encoder(model)
        return ModelFacts(True)
    own = read_config(model.values, model.source)
    if config.kv_cache_dtype == "fp8" and any(layer.heads.latent is not None for layer in own.layers):
        raise narrow_latents(config.kv_cache_dtype)
    return ModelFacts(True, own, config.image_cache_memory > 0 and model.values.get("text_of") in TOWERS)
