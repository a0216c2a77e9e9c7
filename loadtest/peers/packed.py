"""Quantises matrices as packed safetensors hold them, by rounding to nearest.

Tools of the hub choose roundings with more care, which is no matter for speed and hardly any for comparing formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

Stored = dict[str, Tensor]

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_NF4 = torch.tensor([-1, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803,
                     0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1])  # fmt: skip
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FP8_MAX = 448.0


class Packing(NamedTuple):
    """The tensors of a matrix by the endings of their names, and the quantization_config; both take a group size."""

    pack: Callable[[Tensor, int], Stored]
    config: Callable[[int], dict[str, Any]]


def group_of(*widths: int) -> int:
    """Return the largest usual group that divides all widths."""
    return next(group for group in (128, 64, 32) if not any(width % group for width in widths))


def _rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], scales and zero points [out, groups]."""
    groups, steps = weight.reshape(len(weight), -1, group), 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (steps / 2)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / steps
        zeros = (-low / scales).round().int()
    scales = scales.clamp(min=1e-6).half().float()
    codes = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, steps)
    return codes.flatten(1).int(), scales, zeros.int()


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words along the last dimension, the first code in the lowest bits."""
    parts = codes.reshape(len(codes), -1, 32 // bits).long() << torch.arange(0, 32, bits)
    return parts.sum(2).to(torch.int32)  # wraps


def _compressed(bits: int) -> Packing:
    def pack(weight: Tensor, group: int) -> Stored:
        codes, scales, _ = _rounded(weight, bits, group, symmetric=True)
        shape = torch.tensor(weight.shape)
        return {".weight_packed": _words(codes, bits), ".weight_scale": scales.half(), ".weight_shape": shape}

    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    return Packing(pack, lambda group: _config("pack-quantized", weights | {"group_size": group}))


def _config(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _gptq(weight: Tensor, group: int) -> Stored:
    codes, scales, zeros = _rounded(weight, 4, group, symmetric=True)
    return {
        ".qweight": _words(codes, 4).t().contiguous(),
        ".qzeros": _words(zeros.t() - 1, 4),  # the first format stores them less 1
        ".scales": scales.t().half().contiguous(),
        ".g_idx": (torch.arange(weight.shape[1]) // group).int(),
    }


def _awq(weight: Tensor, group: int) -> Stored:
    codes, scales, zeros = _rounded(weight, 4, group, symmetric=False)

    def words(rows: Tensor) -> Tensor:
        return _words(rows.t().reshape(rows.shape[1], -1, 8)[..., _AWQ_ORDER].flatten(1), 4)

    return {".qweight": words(codes), ".qzeros": words(zeros), ".scales": scales.t().half().contiguous()}


def _int8(weight: Tensor, _: int) -> Stored:
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {".weight": (weight / scales).round().to(torch.int8), ".weight_scale": scales}


def _fp8_rows(weight: Tensor, _: int) -> Stored:
    scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / _FP8_MAX
    return {".weight": (weight / scales).to(torch.float8_e4m3fn), ".weight_scale": scales}


def _fp8_tensor(weight: Tensor, _: int) -> Stored:
    scale = weight.abs().max() / _FP8_MAX
    return {".weight": (weight / scale).to(torch.float8_e4m3fn), ".weight_scale": scale[None]}


def _fp8_blocks(weight: Tensor, _: int) -> Stored:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    scales = padded.reshape(-(-rows // 128), 128, -1, 128).abs().amax((1, 3)).clamp(min=1e-12) / _FP8_MAX
    spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {".weight": (weight / spread).to(torch.float8_e4m3fn), ".weight_scale_inv": scales}


def _mxfp4(weight: Tensor, _: int) -> Stored:
    groups = weight.reshape(len(weight), -1, 32)
    exponents = groups.abs().amax(2).clamp(min=1e-30).log2().floor() - 2
    scaled = (groups / exponents.exp2()[..., None]).flatten(1)
    codes = torch.bucketize(scaled.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2) + 8 * (scaled < 0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return {".weight_packed": packed, ".weight_scale": (exponents + 127).to(torch.uint8)}


def _nf4(weight: Tensor, _: int) -> Stored:
    blocks = weight.reshape(-1, 64)
    peaks = blocks.abs().amax(1).clamp(min=1e-12)
    codes = torch.bucketize(blocks / peaks[:, None], (_NF4[1:] + _NF4[:-1]) / 2).reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    return {
        ".weight": (codes[:, :1] << 4 | codes[:, 1:]).to(torch.uint8),
        ".weight.absmax": peaks,
        ".weight.quant_map": _NF4.clone(),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


_TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
PACKINGS = {
    "w4a16": _compressed(4),
    "w8a16": _compressed(8),
    "w8a8": Packing(
        _int8,
        lambda _: _config(
            "int-quantized",
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            _TOKENS | {"type": "int"},
        ),
    ),
    "awq": Packing(
        _awq,
        lambda group: {
            "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
        },
    ),
    "gptq": Packing(
        _gptq, lambda group: {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    ),
    "fp8-tensor": Packing(
        _fp8_tensor, lambda _: _config("float-quantized", _FLOATS | {"strategy": "tensor"}, _TOKENS | {"type": "float"})
    ),
    "fp8-channel": Packing(
        _fp8_rows, lambda _: _config("float-quantized", _FLOATS | {"strategy": "channel"}, _TOKENS | {"type": "float"})
    ),
    "fp8-block": Packing(
        _fp8_blocks, lambda _: {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    ),
    "mxfp4-packed": Packing(
        _mxfp4,
        lambda _: _config(
            "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        ),
    ),
    "nf4": Packing(
        _nf4, lambda _: {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    ),
}  # fmt: skip


def save_packed(
    tensors: Iterable[tuple[str, Sequence[int], Callable[[], NDArray[np.float32]]]],
    path: Path,
    packing: Packing,
    group: int,
    *,
    alike: bool,
) -> None:
    """Save projections packed and others in bfloat16; `alike` repeats the first layer's codes in all layers."""
    stored: Stored = {}
    for name, size, make in tensors:
        module, first = name.removesuffix(".weight"), re.sub(r"layers\.\d+", "layers.0", name)
        if len(size) < 2 or not name.endswith("_proj.weight"):
            stored[name] = torch.from_numpy(make()).bfloat16()
        elif alike and first != name:
            start = first.removesuffix(".weight")
            codes = {key: tensor for key, tensor in stored.items() if key.startswith(f"{start}.")}
            stored |= {module + key.removeprefix(start): tensor.clone() for key, tensor in codes.items()}
        else:
            packed = packing.pack(torch.from_numpy(make()), group)
            stored |= {module + ending: tensor for ending, tensor in packed.items()}
    save_file(stored, path)
