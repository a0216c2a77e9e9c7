"""Loads the model of an EngineConfig, with its weights. Runs once, at start-up.

models/decoder.py serves the families that it implements; transformers' code, through the adapter, serves the others.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import torch

from engine.core.errors import ConfigError, MemoryBudgetError, ModelLoadError
from engine.core.types import Pooling, Progress, ReportProgress
from engine.files.formats import FORMATS, choose_format
from engine.files.hf_config import HFConfig
from engine.files.vector_files import VectorSettings, read_vectors
from engine.runtime.attention.table import load_backend
from engine.runtime.layers.model_config import ModelConfig
from engine.runtime.layers.parts import Maker
from engine.runtime.layers.shards import Shards, blocks_of
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.config_file import (
    BOTH_WAYS,
    TOWERS,
    check_mtp,
    is_encoder,
    is_native,
    override,
    read_model_config,
    read_own,
    require_readable,
    servable,
)
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.eagle3 import Eagle3
from engine.runtime.models.eagle3_config import foreign_target, read_eagle3
from engine.runtime.models.encoder_families import EncoderConfig, read_encoder
from engine.runtime.models.fill import check_size, fill
from engine.runtime.models.mtp import MTPHead
from engine.runtime.models.pooler import make_pooler
from engine.runtime.native.build import type_in_16_bits
from engine.runtime.native.library import native
from engine.runtime.parallel.group import SINGLE, Group
from engine.runtime.schemes import SCHEMES
from engine.runtime.schemes.linear import Circumstances, Scheme
from engine.runtime.weights.checkpoint import FLOATS, Checkpoint, open_checkpoint
from engine.runtime.weights.encoder_names import EncoderTensors
from engine.runtime.weights.stored.storage import Storage
from engine.settings.engine_config import EngineConfig
from engine.system.calls import TRANSFORMERS
from engine.system.regular_file import read_json

if TYPE_CHECKING:
    from engine.runtime.models.encoder import Encoder
    from engine.runtime.models.tower import Tower

_BERT_SEPARATOR = 102
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, report: ReportProgress, group: Group = SINGLE
) -> CausalLM:
    """Build the model on `device` in `dtype` and fill it, reporting progress to `report`."""
    checkpoint, here = _open(config, device, dtype)
    scheme = choose_scheme(config.quantization, here)
    if is_encoder(checkpoint.config.values) and (config.num_loras or group.size > 1):
        flag = "--tensor-parallel-size" if group.size > 1 else "--lora-modules"
        raise ConfigError(f"{flag}: an encoder takes no adapters, and cannot be divided; leave it out.")
    if config.num_loras:
        _require_adaptable(config, scheme, here, checkpoint.config)
    if group.size > 1:
        _require_divisible(config, group, here)
    try:
        if is_encoder(checkpoint.config.values):
            return load_encoder(config, checkpoint, device, dtype, scheme, report)
        if here.is_own:
            return load_decoder(config, checkpoint, device, dtype, scheme, report, group)
        # transformers' model code takes seconds to import, and most models do not need it
        from engine.runtime.models.transformers_adapter import load_adapter

        return load_adapter(config, Path(config.model), checkpoint, device, dtype, report)
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"{config.model} does not fit the memory of {device} in {str(dtype).removeprefix('torch.')}; choose a "
            "smaller model, a smaller --dtype or a larger device."
        ) from None


def sees_images(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether a model of Quire's own has a vision tower, which is served; `checkpoint` has its text half."""
    is_asked = config.image_cache_memory > 0 and config.tensor_parallel_size == 1
    is_known = checkpoint.config.values.get("text_of") in TOWERS and _attends_as_wanted(config, checkpoint, device)
    if checkpoint.num_weights is None or not (is_asked and is_known):
        return is_asked and is_known  # random weights are of any kind
    kinds = {tensor.kind for tensor in checkpoint.towers()}
    return bool(kinds) and kinds.issubset(FLOATS)


def _attends_as_wanted(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Return whether images attend to later tokens of theirs, where the model wants that."""
    kind, wanted = checkpoint.config.values.get("text_of"), checkpoint.config.values.get("use_bidirectional_attention")
    is_causal = kind not in BOTH_WAYS or (kind != "gemma3" and wanted != "vision")
    return is_causal or load_backend(config.attention_backend, device).capabilities.both_ways


def load_vision(config: EngineConfig, model: CausalLM, device: torch.device, report: ReportProgress) -> Tower | None:
    """Load the vision tower of the checkpoint that a model was loaded from, if it has one. Raises ModelLoadError."""
    checkpoint = open_checkpoint(config.load_format, Path(config.model), config.seed, config.mmproj)
    whole = override(checkpoint.config, config.hf_overrides)
    checkpoint.config = servable(checkpoint.config, config.hf_overrides)
    if not (isinstance(model, Decoder) and sees_images(config, checkpoint, device)):
        return None
    named = "" if config.mmproj is None else f", in {config.mmproj}"
    report(Progress("vision", f"the tower of {checkpoint.config.text('text_of')}{named}"))
    with TRANSFORMERS:
        from engine.runtime.models.tower import load_tower  # transformers' model code takes seconds to import

        return load_tower(whole, checkpoint, model.dtype, device)


def load_mtp(config: EngineConfig, target: CausalLM, device: torch.device, report: ReportProgress) -> MTPHead:
    """Load the MTP head of the checkpoint that `target` was loaded from. Raises ConfigError or ModelLoadError."""
    _require_whole(target)
    own = target.config if isinstance(target, Decoder) else None
    check_mtp(read_model_config(Path(config.model), config.load_format, config.hf_overrides), own)
    assert isinstance(target, Decoder)
    checkpoint, here = _open(config, device, target.dtype, num_more_layers=1)
    make = Maker(target.dtype, device, choose_scheme(config.quantization, here), loads=[], targets={})
    head = MTPHead(target, config.max_model_len or target.max_model_len, make)
    fill(make.loads, checkpoint, report, is_part=True)
    return head


def _open(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, num_more_layers: int = 0
) -> tuple[Checkpoint, Circumstances]:
    """Return a checkpoint, and what decides the scheme of its matrices.

    Readers leave out the layers behind the last that the config counts, except for `num_more_layers`.
    """
    path = Path(config.model)
    file_format = choose_format(config.load_format, path)
    checkpoint = open_checkpoint(config.load_format, path, config.seed, config.mmproj)
    model = servable(checkpoint.config, config.hf_overrides)
    if num_more_layers:
        num_layers = model.size("num_hidden_layers") + num_more_layers
        model = HFConfig({**model.values, "num_read_layers": num_layers}, model.source)
    checkpoint.config = model
    is_own, has_gguf_rows = is_native(config, model, path), file_format is FORMATS["gguf"]
    return checkpoint, _circumstances(config, checkpoint, device, dtype, has_gguf_rows=has_gguf_rows, is_own=is_own)


def load_eagle3(
    config: EngineConfig, target: CausalLM, device: torch.device, report: ReportProgress, *, served_len: int
) -> Eagle3:
    """Build the EAGLE-3 draft of a target, in its type, and fill it. Raises ConfigError or ModelLoadError."""
    if not isinstance(target, Decoder):
        raise foreign_target()
    _require_whole(target)
    path = Path(config.model)
    checkpoint = open_checkpoint(config.load_format, path, config.seed)
    own = read_eagle3(checkpoint.config, target.config)
    scheme = choose_scheme(
        config.quantization, _circumstances(config, checkpoint, device, target.dtype, has_gguf_rows=False, is_own=True)
    )
    stored = {tensor.name for tensor in checkpoint.tensors({})}
    draft = Eagle3(own, target, stored, served_len=served_len, device=device, scheme=scheme)
    fill(draft.loads, checkpoint, report)
    draft.loads.clear()
    return draft


def _circumstances(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    has_gguf_rows: bool,
    is_own: bool,
) -> Circumstances:
    return Circumstances(
        has_gguf_rows=has_gguf_rows,
        is_dtype_named=config.dtype != "auto",
        device=device,
        dtype=dtype,
        is_own=is_own,
        library=native(),
        storage=_storage(checkpoint, is_own=is_own),
    )


def choose_scheme(asked: str, here: Circumstances) -> Scheme:
    """Return the scheme of --quantization. Raises ConfigError for one that is not available."""
    schemes: dict[str, type[Scheme]] = {name: resolve_name(place) for name, place in SCHEMES.items()}
    if asked == "auto":
        return next((scheme for scheme in schemes.values() if scheme.is_default(here)), Scheme)(here.storage)
    reason = schemes[asked].refusal(here)
    if reason is not None:
        raise ConfigError(f"--quantization is {asked!r}, but {reason}.")
    return schemes[asked](here.storage)


def _storage(checkpoint: Checkpoint, *, is_own: bool) -> Storage:
    """Return how a checkpoint's matrices are stored. Raises ModelLoadError if its model cannot read them."""
    require_readable(checkpoint, is_own=is_own)
    config = checkpoint.quantization
    return Storage() if config is None else Storage(config, checkpoint.headers())


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return --dtype; auto is the checkpoint's, but on a CPU bfloat16 for 16 bits, and float32 with --portable-bits."""
    if config.asked_dtype != "auto":
        return _DTYPES[config.asked_dtype]
    model = read_model_config(Path(config.model), config.load_format, config.hf_overrides)
    return default_dtype(model, device, config.cpu_kernels)


def default_dtype(model: HFConfig, device: torch.device, cpu_kernels: str) -> torch.dtype:
    """Return what --dtype auto is for a model. Raises ModelLoadError."""
    return _DTYPES[model.float_type(type_in_16_bits(cpu_kernels) if device.type == "cpu" else None)]


def _require_adaptable(config: EngineConfig, scheme: Scheme, here: Circumstances, model: HFConfig) -> None:
    """Raise ConfigError if the model's products do not support addends, or are not those that adapters add to."""
    flag = "--lora-modules names adapters" if config.lora_modules else "--allow-runtime-lora-updating is on"
    if not here.is_own:
        raise ConfigError(
            f"{flag}, but transformers' code runs this model, to which they cannot be added; leave it out."
        )
    if model.flag("multipliers_in_matrices"):
        raise ConfigError(
            f"{flag}, and this GGUF file has the model's multipliers in its matrices, which adapters come before; serve its "
            "safetensors."
        )
    if scheme.is_native and here.dtype == torch.float16:
        raise ConfigError(
            f"{flag}, which cannot be added to quantised weights in float16; set --dtype to bfloat16 or float32."
        )


def _require_divisible(config: EngineConfig, group: Group, here: Circumstances) -> None:
    """Raise ConfigError for what a model on several ranks does not have."""
    flag = f"--tensor-parallel-size is {group.size}"
    if not here.is_own:
        raise ConfigError(f"{flag}, but transformers' code runs this model, which cannot be divided; leave it out.")
    if config.num_loras:
        raise ConfigError(f"{flag}, but adapters cannot be divided; leave out it or the adapters.")


def _require_whole(target: CausalLM) -> None:
    """Raise ConfigError for a target on several ranks, whose heads for drafts would be computed on each."""
    if isinstance(target, Decoder) and target.group.size > 1:
        raise ConfigError(
            f"--tensor-parallel-size is {target.group.size}, but MTP and EAGLE-3 heads cannot be divided; leave out it or them."
        )


def _require_no_drafts(config: EngineConfig) -> None:
    """Raise ConfigError for drafts of, or by, a model without an LM head."""
    if config.speculation is not None:
        raise ConfigError(
            f"--speculative-config drafts tokens, and {config.model} has no LM head, so it generates none; leave it out."
        )


def load_decoder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    scheme: Scheme,
    report: ReportProgress,
    group: Group = SINGLE,
) -> Decoder:
    """Build Quire's decoder and fill it from a checkpoint."""
    path = Path(config.model)
    model_config = read_own(checkpoint, path)
    vectors = read_vectors(checkpoint.config, path, is_encoder=model_config.both_ways)
    config.check_length(model_config.max_positions)
    if checkpoint.config.has("text_of"):
        seen = (
            "text and images; sound is"
            if sees_images(config, checkpoint, device)
            else "text alone; images and sound are"
        )
        kind = checkpoint.config.text("text_of")
        why = ""
        if kind in TOWERS and group.size > 1:
            why = "; ranks compute no images (--tensor-parallel-size)"
        elif kind in TOWERS and not _attends_as_wanted(config, checkpoint, device):
            why = "; its images attend both ways, for which this device needs --attention-backend torch"
        report(Progress("text", f"{kind} serves {seen} refused{why}"))
    if not model_config.has_head:
        _require_no_drafts(config)
        does = f"scores {', '.join(vectors.labels)}" if vectors.labels else "makes vectors"
        report(Progress("head", f"the model {does}, without an LM head; generation is refused"))
    check_size(checkpoint, model_config.num_weights, dtype, device)
    served_len = config.max_model_len or model_config.max_positions
    shards = None
    if group.size > 1:
        shards = Shards(model_config, group, blocks_of(model_config, checkpoint.tensors({})))
    for remark in dict.fromkeys(layer.rope.remark(served_len) for layer in model_config.layers if layer.rope):
        if remark:
            report(Progress("positions", remark))
    state_dtype = _DTYPES[config.state_dtype]
    model = Decoder(
        model_config, served_len=served_len, dtype=dtype, device=device, scheme=scheme, shards=shards,
        state_dtype=state_dtype,
    )  # fmt: skip
    _add_pooler(model, vectors, checkpoint.config, path, model_config)
    is_part = vectors.is_embedder or bool(vectors.labels)
    fill(model.loads, checkpoint, report, is_tied=model.config.tied_head, is_part=is_part)
    model.finish(checkpoint.config.text("model_type"))
    if scheme.summary():
        report(Progress("quantization", scheme.summary()))
    if model.summary():
        report(Progress("kernels", model.summary()))
    return model


def load_encoder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    scheme: Scheme,
    report: ReportProgress,
) -> Encoder:
    """Build Quire's encoder and fill it from a checkpoint."""
    from engine.runtime.models.encoder import Encoder

    own, path = read_encoder(checkpoint.config), Path(config.model)
    vectors = read_vectors(checkpoint.config, path, is_encoder=True)
    config.check_length(own.max_positions)
    _require_no_drafts(config)
    report(Progress("head", f"it scores {', '.join(vectors.labels)}" if vectors.labels else "it makes vectors"))
    check_size(checkpoint, own.num_weights, dtype, device)
    model = Encoder(
        own, served_len=config.max_model_len or own.max_positions, dtype=dtype, device=device, scheme=scheme,
        separator=_separator(path) if vectors.labels and own.num_types > 1 else None,
    )  # fmt: skip
    _add_pooler(model, vectors, checkpoint.config, path, own)
    fill(model.loads, EncoderTensors(checkpoint), report, is_part=True)
    model.finish()
    return model


def _add_pooler(
    model: Decoder | Encoder,
    vectors: VectorSettings,
    config: HFConfig,
    path: Path,
    own: ModelConfig | EncoderConfig,
) -> None:
    """Add what comes behind a model's last layer, to be loaded with it."""
    make = Maker(torch.float32, model.device, Scheme(), loads=model.loads, targets={})
    model.vectors = vectors
    model.pooler = make_pooler(vectors, config, own, make, path)
    is_divided = isinstance(own, ModelConfig) and not own.both_ways and vectors.pooling is Pooling.MEAN
    if model.pooler is not None and is_divided and not model.pooler.comes_first:
        raise ModelLoadError(
            f"{config.source}: dense modules behind the mean of a causal model's states are not served."
        )
    model.max_model_len = min(model.max_model_len, vectors.max_tokens or model.max_model_len)


def _separator(path: Path) -> int:
    """Return the id behind the first of two texts: the tokenizer's, or that of BERT's own vocabulary."""
    try:
        added = read_json(path / "tokenizer.json").get("added_tokens", ())
        return next((int(token["id"]) for token in added if token["content"] == "[SEP]"), _BERT_SEPARATOR)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _BERT_SEPARATOR
