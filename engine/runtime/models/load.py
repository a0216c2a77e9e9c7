"""Loads the model of an EngineConfig, with its weights. Runs once, at start-up.

models/decoder.py serves the families that it implements; transformers' code, through the adapter, serves the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core.errors import ConfigError, MemoryBudgetError, ModelLoadError
from engine.core.types import Progress
from engine.runtime.cuda.available import has_triton
from engine.runtime.linear import FP8_FIRST_CAPABILITY, FP8_MULTIPLE, Quantization
from engine.runtime.models.base import CausalLM
from engine.runtime.models.config_file import is_native, read_model_config
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.families import read_config
from engine.runtime.models.source import resolve_model_path
from engine.runtime.native.library import Isa, native
from engine.runtime.weights.checkpoint import Checkpoint, Keep, Report, check_size, fill
from engine.runtime.weights.dummy import check_room, fill_dummy
from engine.runtime.weights.safetensors import SafetensorsCheckpoint

_CPU_FEATURES = Path("/proc/cpuinfo")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: EngineConfig, device: torch.device, dtype: torch.dtype, report: Report) -> CausalLM:
    """Build the model on `device` in `dtype` and fill it, reporting progress to `report`."""
    path = resolve_model_path(config.model, config.revision)
    use_decoder = is_native(config, path)
    quantization = _resolve_quantization(config, path, device, use_decoder)
    if quantization is Quantization.FP8:
        _require_fp8(device, dtype)
    if config.num_loras:
        _require_adaptable(config, dtype, quantization, use_decoder)
    try:
        if use_decoder:
            return _load_decoder(config, path, device, dtype, quantization, report)
        # transformers' model code takes seconds to import, and most models do not need it
        from engine.runtime.models.transformers_adapter import load_adapter

        return load_adapter(config, path, device, dtype, report)
    except torch.OutOfMemoryError:
        raise MemoryBudgetError(
            f"{config.model} does not fit the memory of {device} in {str(dtype).removeprefix('torch.')}; choose a "
            "smaller model, a smaller --dtype or a larger device."
        ) from None


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return --dtype; auto is the checkpoint's, but on a CPU bfloat16 only if it multiplies it."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    path = resolve_model_path(config.model, config.revision)
    stored = torch.bfloat16 if _is_gguf(path) else _stored_dtype(path)
    if device.type == "cpu" and stored != torch.float32:
        return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    return stored


def _resolve_quantization(config: EngineConfig, path: Path, device: torch.device, use_decoder: bool) -> Quantization:
    """Return the format for --quantization; auto keeps a GGUF file's unless --dtype is set.

    The portable kernels gain nothing from bytes (8 bits take twice the time of float32 at 32 rows), so auto dequantises
    for them. Raises ConfigError for a format that is not available here.
    """
    asked, has_gguf = config.quantization, _is_gguf(path) and config.load_format != "dummy"
    library = native()
    can_multiply = device.type == "cpu" and use_decoder and library is not None
    if asked == "auto":
        is_faster = can_multiply and library is not None and library.isa > Isa.PORTABLE
        return Quantization.GGUF if has_gguf and is_faster and config.dtype == "auto" else Quantization.NONE
    if asked == "none":
        return Quantization.NONE
    if asked == "gguf" and not has_gguf:
        reason = "the weights do not come from a GGUF file; int8 quantises those of any"
    elif asked == "fp8" and device.type != "cuda":
        reason = f"fp8 weights are for a CUDA device, and the device is {device}; choose int8"
    elif asked != "fp8" and device.type != "cpu":
        reason = f"quantised weights are for a CPU, and the device is {device}; choose fp8"
    elif not use_decoder:
        reason = "transformers' code runs this model, which multiplies its weights itself"
    elif asked == "fp8":
        return Quantization.FP8
    elif not can_multiply:
        reason = "the native kernels are missing or switched off; see --cpu-kernels, or install a C compiler"
    else:
        return Quantization(asked)
    raise ConfigError(f"--quantization is {asked!r}, but {reason}.")


def _require_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if torch has no product of fp8 rows here."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_FIRST_CAPABILITY:
        reason = (
            f"which needs compute capability {'.'.join(map(str, FP8_FIRST_CAPABILITY))} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, capability))}; leave it out"
        )
    elif not has_triton(device):
        reason = "which needs the package triton; install it, or leave it out"
    elif dtype != torch.bfloat16:
        reason = (
            f"whose products are bfloat16, and --dtype is {str(dtype).removeprefix('torch.')!r}; set it to bfloat16"
        )
    else:
        return
    raise ConfigError(f"--quantization is 'fp8', {reason}.")


def _require_adaptable(config: EngineConfig, dtype: torch.dtype, quantization: Quantization, use_decoder: bool) -> None:
    """Raise ConfigError if the model's products do not support addends."""
    flag = "--lora-modules names adapters" if config.lora_modules else "--allow-runtime-lora-updating is on"
    if not use_decoder:
        raise ConfigError(
            f"{flag}, but transformers' code runs this model, to which they cannot be added; leave it out."
        )
    if dtype == torch.float16 and quantization in (Quantization.GGUF, Quantization.INT8):
        raise ConfigError(
            f"{flag}, which cannot be added to quantised weights in float16; set --dtype to bfloat16 or float32."
        )


def _load_decoder(
    config: EngineConfig,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
    report: Report,
) -> CausalLM:
    checkpoint = _open(path, config.load_format)
    model_config = read_config(checkpoint.config, checkpoint.source)
    config.check_length(model_config.max_positions)
    if config.load_format == "dummy":
        check_room(model_config.num_weights, dtype, device)
    else:
        check_size(checkpoint, model_config.num_weights)
    served_len = config.max_model_len or model_config.max_positions
    model = Decoder(
        model_config,
        served_len=served_len,
        dtype=dtype,
        device=device,
        quantization=quantization,
    )
    targets = model.tensors()
    keepers = model.keepers() if quantization in (Quantization.GGUF, Quantization.FP8) else {}
    if quantization is Quantization.FP8:
        keepers = _fp8_keepers(targets, keepers, report)
    if config.load_format == "dummy":
        fill_dummy(targets, config.seed, report, keepers)
    else:
        fill(targets, checkpoint, report, tied_head=model_config.tied_head, keepers=keepers)
    model.finish()
    return model


def _fp8_keepers(targets: Mapping[str, Tensor], keepers: Mapping[str, Keep], report: Report) -> dict[str, Keep]:
    """Return the sinks of matrices that become fp8: not the head, nor unsuitable shapes."""
    kept = {name: keep for name, keep in keepers.items() if targets[name].dtype == torch.float8_e4m3fn}
    num_plain = len(keepers) - 1 - len(kept)
    plain = f"; {num_plain}, of sides that are no multiples of {FP8_MULTIPLE}, stay as they are" if num_plain else ""
    report(Progress("quantization", f"fp8: {len(kept)} matrices{plain}"))
    return kept


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _open(path: Path, load_format: str) -> Checkpoint:
    if _is_gguf(path):
        if load_format == "safetensors":
            raise ModelLoadError(f"{path} is a GGUF file, but --load-format asks for safetensors.")
        from engine.runtime.weights.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    if load_format == "gguf":
        raise ModelLoadError(f"{path} is a folder; with --load-format gguf, name the .gguf file itself.")
    return SafetensorsCheckpoint(path, read_model_config(path))


def _stored_dtype(folder: Path) -> torch.dtype:
    values = read_model_config(folder)
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelLoadError(
            f"{folder / 'config.json'}: dtype {name!r} is not one of {', '.join(_DTYPES)}; set --dtype."
        )
    return _DTYPES[name]


def _multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions; emulation is much slower than float32.

    The kernel's list is read instead of timing products, so that a machine makes the same choice at every start.
    """
    try:
        features = set(_CPU_FEATURES.read_text().split())
    except OSError:
        return False
    return not features.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
