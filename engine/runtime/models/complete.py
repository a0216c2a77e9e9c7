"""Finds tensors that a checkpoint of Quire's decoder lacks, from the headers of its files, without torch.

A layer must have the modules of the other layers of its kind. fill.py compares every tensor, once the model is
there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from engine.core.errors import ModelLoadError
from engine.runtime.layers.model_config import LayerConfig, ModelConfig
from engine.runtime.weights.checkpoint import Checkpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Buffers in old checkpoints that every model computes itself.
COMPUTED = (".rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.[^.]+")


def check_complete(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError if files lack modules of the model; random weights lack nothing."""
    names = [tensor.name for tensor in checkpoint.tensors({}) if not tensor.name.endswith(COMPUTED)]
    if not names:
        return
    modules = {name.rpartition(".")[0] for name in names}
    wanted = [EMBEDDING, "model.norm.weight"]
    if config.has_head and not config.tied_head:
        wanted.append(HEAD)
    missing = [name for name in wanted if name.rpartition(".")[0] not in modules] + _missing_in_layers(config, names)
    if missing:
        raise lacking(checkpoint.config.source, missing)


def _missing_in_layers(config: ModelConfig, names: Sequence[str]) -> list[str]:
    """Return the modules that some layers lack, and others of their kind have."""
    found: list[set[str]] = [set() for _ in config.layers]
    for name in names:
        match = _LAYER.fullmatch(name)
        if match is not None and int(match[1]) < len(found):
            found[int(match[1])].add(match[2])
    kinds: dict[tuple[tuple[str, ...], str, bool], set[str]] = defaultdict(set)
    for layer, modules in zip(config.layers, found, strict=True):
        kinds[_kind_of(layer)] |= modules
    return [
        f"model.layers.{index}.{module}"
        for index, (layer, modules) in enumerate(zip(config.layers, found, strict=True))
        for module in sorted(kinds[_kind_of(layer)] - modules or ({"self_attn"} if not modules else ()))
    ]


def _kind_of(layer: LayerConfig) -> tuple[tuple[str, ...], str, bool]:
    return layer.mixers, layer.feed_forward, layer.source is None


def lacking(source: str, missing: Sequence[str]) -> ModelLoadError:
    """Return the error for a checkpoint without some tensors."""
    return ModelLoadError(f"{source} does not match its weights: it lacks {listed(missing)}.")


def listed(names: Sequence[str]) -> str:
    """Return some names as a sentence shows them."""
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
