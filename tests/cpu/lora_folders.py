"""Adapters as PEFT saves them, made of random numbers, and the models they come to when they are merged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.runtime.lora.loader import LoraAdapter, LoraLoader
from engine.runtime.models.decoder import Decoder

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
ALL += ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")


def save_adapter(
    model: torch.nn.Module | Decoder,
    folder: Path,
    *,
    rank: int = 4,
    seed: int = 1,
    targets: Sequence[str] = ALL,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """An adapter of some of a model's linears, transformers' or ours."""
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    values |= config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in _shapes(model, targets).items():
        own = values.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        for side, shape in (("A", (own, inputs)), ("B", (outputs, own))):
            noise = torch.randn(shape, generator=generator) * (size / math.sqrt(own))
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = noise
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: torch.nn.Module, folder: Path) -> None:
    """W += scale * B A, in place: what PEFT's merge_and_unload does."""
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    for name, module in linears(model, config["target_modules"]).items():
        a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        last, rank = name.rpartition(".")[2], len(a)
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        with torch.no_grad():
            module.weight += scale * (b.double() @ a.double()).float()


def _shapes(model: torch.nn.Module | Decoder, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    if isinstance(model, Decoder):
        every = {name: (target.num_rows, target.shape[1]) for name, target in model.adapter_targets.items()}
        return {name: shape for name, shape in every.items() if name.rpartition(".")[2] in names}
    return {name: tuple(module.weight.shape) for name, module in linears(model, names).items()}


def linears(model: torch.nn.Module, targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Return those of a model that are called so; experts, which adapters cannot change, only if a target names them."""

    def is_meant(name: str, target: str) -> bool:
        return f".{name}".endswith(f".{target}") and ("expert" in target or "expert" not in name)

    found = {name: module for name, module in model.named_modules() if any(is_meant(name, each) for each in targets)}
    return {name: module for name, module in found.items() if isinstance(module, torch.nn.Linear)}


def load_adapter(model: Any, folder: Path, name: str = "some", max_rank: int = 64) -> LoraAdapter:
    assert model.capabilities.adapters
    loader = LoraLoader(
        model.adapter_targets,
        max_rank=max_rank,
        dtype=model.dtype,
        device=torch.device("cpu"),
    )
    return loader.load(name, str(folder))
