"""Checkpoints packed as the hub's tools pack them, and independent dequantisation, in numpy.

A packer returns the tensors of one module, by the endings of their names, and its weight as the format's documents
dequantise it. Codes and scales are random: nothing is fitted to a weight, since only reading is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

Stored = dict[str, Tensor]
Packer = Callable[[np.random.Generator, int, int], tuple[Stored, np.ndarray]]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of each nibble
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1]  # fmt: skip


class Packing(NamedTuple):
    """A module's packer, and the config that describes it."""

    pack: Packer
    config: dict[str, Any]


def bit_stream(codes: np.ndarray, bits: int) -> Tensor:
    """Rows of codes [n, k] as int32 words: code j at bits j * bits and on."""
    planes = (codes[:, :, None].astype(np.int64) >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    planes = np.pad(planes, ((0, 0), (0, -planes.shape[1] % 32)))
    return torch.from_numpy(np.packbits(planes, axis=1, bitorder="little").view(np.int32).copy())


def scales_of(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float16, bits: int = 4) -> Tensor:
    return torch.from_numpy(rng.uniform(0.5, 1.5, shape) * 0.25 / 2**bits).to(dtype)


def groups_of(rng: np.random.Generator, inputs: int, group: int, *, shuffled: bool) -> np.ndarray:
    order = np.arange(inputs) // group
    return rng.permutation(order) if shuffled else order


def compressed(bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False) -> Packing:
    """pack-quantized of compressed-tensors."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, num = rng.integers(0, 2**bits, (out, width)), -(-width // (group or width))
        scales, zeros = scales_of(rng, out, num, dtype=torch.bfloat16, bits=bits), np.full((out, num), 2 ** (bits - 1))
        order = groups_of(rng, width, group or width, shuffled=shuffled)
        stored = {
            ".weight_packed": bit_stream(codes, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([out, width]),
        }
        if not symmetric:
            zeros = rng.integers(2 ** (bits - 1) - 2, 2 ** (bits - 1) + 3, (out, num))
            stored[".weight_zero_point"] = bit_stream(zeros.T, bits).t().contiguous()
        if shuffled:
            stored[".weight_g_idx"] = torch.from_numpy(order).int()
        return stored, (codes - zeros[:, order]) * scales.double().numpy()[:, order]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or -1}
    weights |= {"strategy": "group" if group else "channel", "actorder": "group" if shuffled else None}
    return Packing(pack, compressed_config("pack-quantized", weights))


def compressed_config(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def int8(*, symmetric: bool = True) -> Packing:
    """int-quantized of compressed-tensors: W8A8 with a scale for each row."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, scales = rng.integers(-128, 128, (out, width)), scales_of(rng, out, 1, dtype=torch.bfloat16, bits=8)
        stored = {".weight": torch.from_numpy(codes).to(torch.int8), ".weight_scale": scales}
        zeros = np.zeros((out, 1), np.int64)
        if not symmetric:
            zeros = rng.integers(-9, 10, (out, 1))
            stored[".weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
        return stored, (codes - zeros) * scales.double().numpy()

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Packing(pack, compressed_config("int-quantized", weights, {"num_bits": 8, "dynamic": True}))


def fp8(scale: str, ending: str, config: dict[str, Any], *, extra: Sequence[str] = ()) -> Packing:
    """FP8 with scales for all ("all"), rows ("row"), or blocks of 128 x 128 ("block")."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        values = torch.from_numpy(rng.normal(0, 120, (out, width))).clamp(-448, 448).to(torch.float8_e4m3fn)
        shape = {"all": (), "one": (1,), "row": (out, 1), "flat": (out,), "block": (-(-out // 128), -(-width // 128))}
        size = shape.get(scale) or (*shape["block"][:1], 1, *shape["block"][1:], 1)
        size = () if scale == "all" else size
        scales = scales_of(rng, *size, dtype=torch.float32, bits=8) / 2 if size else torch.tensor(0.0012)
        grid = scales.double().numpy()
        if scale in ("block", "4d"):
            grid = grid.reshape(shape["block"]).repeat(128, 0)[:out].repeat(128, 1)[:, :width]
        if scale == "flat":
            grid = grid[:, None]
        stored = {".weight": values, ending: scales} | {name: torch.tensor(0.02) for name in extra}
        return stored, values.double().numpy() * grid

    return Packing(pack, config)


def awq(group: int, *, zeros: bool = True) -> Packing:
    """AWQ for gemm."""

    def words(codes: np.ndarray) -> Tensor:
        nibbles = codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER].astype(np.uint64) << np.arange(0, 32, 4, np.uint64)
        return torch.from_numpy(nibbles.sum(2).astype(np.uint32).view(np.int32))

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, order = rng.integers(0, 16, (width, out)), np.arange(width) // group
        offsets = rng.integers(5, 11, (width // group, out)) if zeros else np.full((width // group, out), 8)
        scales = scales_of(rng, width // group, out)
        stored = {".qweight": words(codes), ".scales": scales} | ({".qzeros": words(offsets)} if zeros else {})
        return stored, ((codes - offsets[order]) * scales.double().numpy()[order]).T

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMM", "zero_point": zeros}
    return Packing(pack, config)


def gptq(bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False, version: int = 1) -> Packing:
    """GPTQ: its first format stores zero points less 1."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        own = group or width
        codes, order = rng.integers(0, 2**bits, (out, width)), groups_of(rng, width, own, shuffled=shuffled)
        num, middle = -(-width // own), 2 ** (bits - 1)
        zeros = np.full((num, out), middle) if symmetric else rng.integers(max(middle - 3, 0), middle + 2, (num, out))
        scales = scales_of(rng, num, out, bits=bits)
        stored = {
            ".qweight": bit_stream(codes, bits).t().contiguous(),
            ".qzeros": bit_stream((zeros - (version == 1)) % 2**bits, bits),
            ".scales": scales,
            ".g_idx": torch.from_numpy(order).int(),
            ".bias": torch.zeros(out, dtype=torch.float16),
        }
        return stored, (codes - zeros.T[:, order]) * scales.double().numpy().T[:, order]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": shuffled, "sym": symmetric}
    return Packing(pack, config | ({"checkpoint_format": "gptq_v2"} if version == 2 else {}))


def nf4(*, nested: bool) -> Packing:
    """bitsandbytes' 4 bits, its blocks over the flattened matrix."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, table = rng.integers(0, 16, out * width), torch.tensor(NF4)
        num = -(-out * width // 64)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, width]}
        absmax = torch.from_numpy(rng.uniform(0.1, 0.3, num)).float()
        spread = absmax.double().numpy()
        stored = {".weight.quant_map": table}
        if nested:
            small, outer = rng.integers(0, 256, num), torch.from_numpy(rng.uniform(0.05, 0.1, -(-num // 256))).float()
            inner = torch.linspace(-1, 1, 256)
            spread = inner.double().numpy()[small] * outer.double().numpy().repeat(256)[:num] + 0.15
            state |= {"nested_blocksize": 256, "nested_offset": 0.15, "nested_dtype": "float32"}
            absmax = torch.from_numpy(small).to(torch.uint8)
            stored |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": inner}
        pairs = codes.reshape(-1, 2)
        stored |= {
            ".weight": torch.from_numpy(pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None],
            ".weight.absmax": absmax,
            ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        }
        weight = table.double().numpy()[codes] * spread.repeat(64)[: out * width]
        return stored, weight.reshape(out, width)

    return Packing(pack, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})


def bnb_int8() -> Packing:
    """bitsandbytes' bytes."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, peaks = rng.integers(-127, 128, (out, width)), scales_of(rng, out, dtype=torch.float32, bits=1)
        stored = {".weight": torch.from_numpy(codes).to(torch.int8), ".SCB": peaks}
        stored[".weight_format"] = torch.tensor(0, dtype=torch.uint8)
        return stored, codes * peaks.double().numpy()[:, None] / 127

    return Packing(pack, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def fp4_bytes(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def nvfp4(*, modelopt: bool) -> Packing:
    """NVFP4: ModelOpt's tensor scale multiplies, the one of compressed-tensors divides."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes = rng.integers(0, 16, (out, width))
        scales = torch.from_numpy(rng.uniform(20, 60, (out, width // 16))).to(torch.float8_e4m3fn)
        whole = torch.tensor(0.0015 if modelopt else 700.0)
        factor = float(whole) if modelopt else 1 / float(whole)
        names = (".weight", ".weight_scale_2") if modelopt else (".weight_packed", ".weight_global_scale")
        stored = {names[0]: fp4_bytes(codes), ".weight_scale": scales, names[1]: whole if modelopt else whole[None]}
        return stored, E2M1[codes] * scales.double().numpy().repeat(16, 1) * factor

    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = compressed_config("nvfp4-pack-quantized", args)
    return Packing(pack, {"quant_method": "modelopt", "quant_algo": "NVFP4"} if modelopt else config)


def mxfp4() -> Packing:
    """MXFP4 of compressed-tensors: a power of two for every 32 inputs."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        codes, exponents = rng.integers(0, 16, (out, width)), rng.integers(121, 125, (out, width // 32))
        stored = {".weight_packed": fp4_bytes(codes), ".weight_scale": torch.from_numpy(exponents).to(torch.uint8)}
        return stored, E2M1[codes] * 2.0 ** (exponents.repeat(32, 1) - 127)

    args = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Packing(pack, compressed_config("mxfp4-pack-quantized", args))


def mxfp8() -> Packing:
    """MXFP8: a power of two for every 32 inputs."""

    def pack(rng: np.random.Generator, out: int, width: int) -> tuple[Stored, np.ndarray]:
        values = torch.from_numpy(rng.normal(0, 100, (out, width))).clamp(-448, 448).to(torch.float8_e4m3fn)
        exponents = rng.integers(115, 118, (out, width // 32))
        stored = {".weight": values, ".weight_scale": torch.from_numpy(exponents).to(torch.uint8)}
        return stored, values.double().numpy() * 2.0 ** (exponents.repeat(32, 1) - 127)

    args = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    return Packing(pack, compressed_config("mxfp8-quantized", args))


def save(
    folder: Path,
    packing: Packing | dict[str, Packing],
    *,
    kind: type[PretrainedConfig] = LlamaConfig,
    hidden: int = 256,
    inner: int = 384,
    **settings: Any,
) -> torch.nn.Module:
    """Save a tiny packed model, a Llama by default; return transformers' with the weights as they are dequantised here, in float32.

    Several packings are by endings of module names, and the first has the config.
    """
    by_name = packing if isinstance(packing, dict) else {"_proj": packing}
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    sizes |= {"max_position_embeddings": 256, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = kind(hidden_size=hidden, intermediate_size=inner, **(sizes | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=0.3)
        model.lm_head.weight.normal_(std=0.05)
    model.save_pretrained(folder)
    plain, stored, rng = load_file(folder / "model.safetensors"), {}, np.random.default_rng(0)
    for name, tensor in sorted(plain.items()):
        module = name.removesuffix(".weight")
        packer = next((each.pack for end, each in by_name.items() if module.endswith(end)), None)
        if packer is None:
            stored[name] = tensor
            continue
        packed, weight = packer(rng, *tensor.shape)
        stored |= {module + ending: each for ending, each in packed.items()}
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.from_numpy(weight.copy()))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": next(iter(by_name.values())).config}
    path.write_text(json.dumps(values))
    return model
