"""Quantised experts, as checkpoints of the hub store them, against transformers over dequantised weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.cpu import packers
from tests.cpu.test_models_families import CASES, Case, load, logits_of, save_tiny, write_tiny

IDS = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "layer_types": None}


def wide(name: str, **settings: Any) -> Case:
    """A case whose rows are a multiple of a block, and whose kinds of layers are the default unless they are given."""
    sizes = {
        key: value
        for key, value in SIZES.items()
        if key != "layer_types" or "layers_block_type" not in CASES[name].settings
    }
    return replace(CASES[name], settings=CASES[name].settings | sizes | settings)


def log_probabilities(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(IDS[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)


def check(folder: Path, expected: Tensor) -> None:
    """Dequantised, the model equals the oracle; as stored it is near to it."""
    plain = logits_of(load(folder, quantization="none"), IDS, [30]).log_softmax(-1)
    torch.testing.assert_close(plain, expected, atol=1e-4, rtol=0)
    kept = logits_of(load(folder, quantization="stored"), IDS, [30]).log_softmax(-1)
    assert (expected.exp() * (expected - kept)).sum(-1).median().abs() < 0.02


def with_method(folder: Path, config: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def save_gpt_oss(folder: Path) -> Any:
    """Save MXFP4 in stacks of interleaved rows; return transformers' model with the same weights, by its conversion."""
    theirs = save_tiny(wide("gpt-oss", intermediate_size=96), folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name, parameter in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    with_method(folder, MXFP4)
    return theirs


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    check(tmp_path, log_probabilities(save_gpt_oss(tmp_path)))


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
AWQ = packers.awq(64)
FP8 = packers.fp8("block", ".weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [128, 128]})
GPTQ = packers.gptq(4, 32, shuffled=True, symmetric=False)
PACKED = {
    "mixtral": (wide("mixtral", intermediate_size=192), AWQ),
    "qwen3-moe": (wide("qwen3-moe", moe_intermediate_size=192), FP8),
    "qwen2-moe": (wide("qwen2-moe", moe_intermediate_size=192, shared_expert_intermediate_size=64), GPTQ),
}
KINDS = {"layer_types": ["linear_attention", "full_attention"]}
GRANITE = KINDS | {"mamba_d_head": 32, "shared_intermediate_size": 128}
NEMOTRON = {"mamba_head_dim": 16, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128}
HYBRIDS = {
    "qwen3_5": (wide("qwen3_5", linear_value_head_dim=16, intermediate_size=192, **KINDS), AWQ),
    "granitemoehybrid-mamba-dense": (wide("granitemoehybrid-mamba-dense", **GRANITE), FP8),
    "granitemoehybrid-mamba": (wide("granitemoehybrid-mamba", **GRANITE), GPTQ),
    "nemotron_h": (wide("nemotron_h", intermediate_size=192, **NEMOTRON), GPTQ),
    "nemotron_h-latent": (wide("nemotron_h-latent", moe_latent_size=64, intermediate_size=192, **NEMOTRON), FP8),
}
WIDE = {"moe_intermediate_size": 192, "intermediate_size": 192}
DELTA = KINDS | WIDE | {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64}
MIXTURES = {  # each in each format, with its experts one by one and all its projections
    "qwen3_5-moe": wide("qwen3_5-moe", **DELTA),
    "qwen3_next": wide("qwen3_next", **DELTA),
    "lfm2-moe": wide("lfm2-moe", **WIDE, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "gemma4-moe": wide("gemma4-moe", **WIDE, layer_types=["sliding_attention", "full_attention"]),
}
FORMATS = {"awq": AWQ, "fp8": FP8, "gptq": GPTQ, "mxfp4": packers.mxfp4()}
WHOLE = HYBRIDS | {f"{name}/{end}": (case, each) for name, case in MIXTURES.items() for end, each in FORMATS.items()}
METHODS = {"gpt-oss": MXFP4, **{name: packing.config for name, (_, packing) in PACKED.items()}}  # of the models here


def modules_of(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices of a tensor, by the names of their modules: of a stack of experts one by one."""
    if tensor.dim() == 2:
        return {key.removesuffix(".weight"): tensor}
    stem, _, matrix = key.rpartition(".")
    names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    return {
        f"{stem}.{expert}.{name}": rows
        for expert, whole in enumerate(tensor)
        for name, rows in zip(names, whole.chunk(len(names)), strict=True)
    }


def save_packed(name: str, packed_folder: Path, plain_folder: Path) -> None:
    """Save a mixture whose experts are packed one by one, or a model with all projections packed; and the same dequantised."""
    case, packing = (PACKED | WHOLE)[name]
    for folder in (packed_folder, plain_folder):
        write_tiny(case, folder)
    plain, packed, rng = load_file(plain_folder / "model.safetensors"), {}, np.random.default_rng(0)
    for key, tensor in sorted(plain.items()):
        is_expert = "expert" in key and tensor.shape[0] > 1 and not key.endswith(("bias", "scale"))
        is_meant = is_expert or (name in WHOLE and ("_proj" in key or "_linear" in key))
        if not is_meant or tensor.dim() == 1 or (tensor.dim() == 3 and ".experts." not in key):
            packed[key] = tensor
            continue
        for module, matrix in modules_of(key, tensor).items():
            parts, weight = packing.pack(rng, *matrix.shape)
            packed |= {module + ending: part.contiguous() for ending, part in parts.items()}
            matrix.copy_(torch.from_numpy(weight.copy()))
    save_file(plain, plain_folder / "model.safetensors")
    save_file(packed, packed_folder / "model.safetensors")
    with_method(packed_folder, packing.config)


@pytest.mark.parametrize("name", [*PACKED, *WHOLE])
def test_packed_modules_one_by_one(name: str, tmp_path: Path) -> None:
    """Every module has scales, zeros and an order of inputs for itself."""
    packed_folder, plain_folder = tmp_path / "packed", tmp_path / "plain"
    save_packed(name, packed_folder, plain_folder)
    theirs = AutoModelForCausalLM.from_pretrained(plain_folder, dtype=torch.float32, attn_implementation="eager")
    check(packed_folder, log_probabilities(theirs.eval()))
