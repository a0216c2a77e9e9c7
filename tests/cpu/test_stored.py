"""Quantised checkpoints as the hub stores them, against weights that packers.py dequantises by itself."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5TextConfig

from engine.core.errors import ConfigError, ModelLoadError
from engine.runtime.native.library import WeightFormat, native
from engine.runtime.native.ops import FLOAT_FORMATS
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.runtime.weights.stored.packed import Packed, e8m0
from engine.runtime.weights.stored.storage import Storage
from tests.cpu import packers
from tests.cpu.test_models_families import QWEN3_5, load, logits_of

IDS = torch.arange(3, 43)
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_DYNAMIC = packers.compressed_config("float-quantized", FLOAT | {"strategy": "channel"})
FP8_BLOCK = packers.compressed_config("float-quantized", FLOAT | {"strategy": "block", "block_structure": [128, 128]})
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}

CASES = {
    "w4a16": packers.compressed(4, 128),
    "w4a16-asym": packers.compressed(4, 32, symmetric=False),
    "w4a16-actorder": packers.compressed(4, 32, shuffled=True),
    "w4a16-channel": packers.compressed(4, 0),
    "w3a16": packers.compressed(3, 64),
    "w5a16": packers.compressed(5, 64),
    "w8a16": packers.compressed(8, 128),
    "w8a16-asym": packers.compressed(8, 128, symmetric=False),
    "w8a8": packers.int8(),
    "w8a8-asym": packers.int8(symmetric=False),
    "fp8-tensor": packers.fp8("one", ".weight_scale", AUTO_FP8, extra=[".input_scale"]),
    "fp8-scalar-inv": packers.fp8("all", ".weight_scale_inv", AUTO_FP8, extra=[".activation_scale"]),
    "fp8-channel": packers.fp8("row", ".weight_scale", FP8_DYNAMIC),
    "fp8-block": packers.fp8("block", ".weight_scale_inv", BLOCKS),
    "fp8-block-compressed": packers.fp8("block", ".weight_scale", FP8_BLOCK),
    "fbgemm": packers.fp8("row", ".weight_scale", {"quant_method": "fbgemm_fp8"}, extra=[".input_scale_ub"]),
    "modelopt-fp8": packers.fp8("all", ".weight_scale", MODELOPT, extra=[".input_scale"]),
    "modelopt-fp8-row": packers.fp8("flat", ".weight_scale", MODELOPT),
    "modelopt-fp8-block": packers.fp8("4d", ".weight_scale", MODELOPT | {"quant_algo": "FP8_PB_WO"}),
    "mxfp8": packers.mxfp8(),
    "awq": packers.awq(128),
    "awq-symmetric": packers.awq(64, zeros=False),
    "gptq-4": packers.gptq(4, 128),
    "gptq-4-asym": packers.gptq(4, 32, symmetric=False),
    "gptq-4-actorder": packers.gptq(4, 32, shuffled=True, symmetric=False),
    "gptq-4-v2": packers.gptq(4, 64, symmetric=False, version=2),
    "gptq-4-whole": packers.gptq(4, 0),
    "auto-round": packers.gptq(4, 64)._replace(config={"quant_method": "auto-round", "bits": 4, "group_size": 64}),
    "gptq-2": packers.gptq(2, 64, symmetric=False),
    "gptq-3": packers.gptq(3, 64, symmetric=False),
    "gptq-8": packers.gptq(8, 128),
    "nf4": packers.nf4(nested=False),
    "nf4-nested": packers.nf4(nested=True),
    "bnb-int8": packers.bnb_int8(),
    "nvfp4": packers.nvfp4(modelopt=True),
    "nvfp4-of-vllm": packers.nvfp4(modelopt=True)._replace(
        config={"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    ),
    "nvfp4-compressed": packers.nvfp4(modelopt=False),
    "mxfp4": packers.mxfp4(),
}


# Each way of unpacking, through the whole model; the others are compared matrix by matrix.
SERVED = [
    "w4a16-actorder", "w8a8", "fp8-block", "fbgemm", "awq", "gptq-3", "auto-round", "nf4-nested", "nvfp4", "nvfp4-of-vllm",
]  # fmt: skip


def log_probabilities(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[None], use_cache=False).logits[0].log_softmax(-1)


def found(folder: Path, **settings: Any) -> torch.Tensor:
    return logits_of(load(folder, **settings), IDS, [len(IDS)]).log_softmax(-1)


def unpacked(folder: Path, packing: packers.Packing, rows: int, inputs: int) -> tuple[Packed, np.ndarray]:
    """A matrix of random codes as Quire unpacks it, and as packers.py dequantises it."""
    packed, weight = packing.pack(np.random.default_rng(0), rows, inputs)
    name = "model.layers.0.mlp.down_proj"
    save_file({name + ending: tensor for ending, tensor in packed.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": packing.config}))
    checkpoint = SafetensorsCheckpoint(folder)
    storage = Storage(checkpoint.quantization, checkpoint.headers())
    endings = storage.shapes(name, rows, inputs)
    tensors = {tensor.name.removeprefix(name): tensor for tensor in checkpoint.tensors({name + ".weight": ()})}
    assert {ending: tensors[ending].shape for ending in endings} == dict(endings)
    assert not (tensors.keys() - endings.keys())
    packed = storage.unpack(name, {ending: tensors[ending] for ending in endings})
    assert packed is not None
    return packed, weight


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(128, 256), (328, 384)])
def test_a_matrix_is_dequantised_as_documented(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    packed, expected = unpacked(tmp_path, CASES[name], *shape)
    torch.testing.assert_close(packed.dequantise().double(), torch.from_numpy(expected), atol=1e-7, rtol=1e-6)


def test_a_grid_of_scales_may_have_more_rows_than_the_matrix(tmp_path: Path) -> None:
    pack = packers.fp8("block", ".weight_scale_inv", BLOCKS).pack

    def padded(rng: np.random.Generator, out: int, width: int) -> tuple[packers.Stored, np.ndarray]:
        stored, weight = pack(rng, out, width)
        grid = stored[".weight_scale_inv"]
        return stored | {".weight_scale_inv": torch.cat((grid, grid[:1] * 9))}, weight

    packed, expected = unpacked(tmp_path, packers.Packing(padded, BLOCKS), 200, 300)
    torch.testing.assert_close(packed.dequantise().double(), torch.from_numpy(expected), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", SERVED)
def test_a_model_equals_the_dequantised_one(name: str, tmp_path: Path) -> None:
    """--quantization none in float32 is within 1e-4 of transformers over weights dequantised by packers.py."""
    expected = log_probabilities(packers.save(tmp_path, CASES[name]))
    torch.testing.assert_close(found(tmp_path, quantization="none"), expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


def test_the_gates_of_delta_layers_may_be_left_as_floats(tmp_path: Path) -> None:
    """As published: the others are multiplied as stored."""
    plain = [f"model.layers.{layer}.linear_attn.in_proj_{gate}" for layer in (0, 2) for gate in "ab"]
    packing = CASES["fp8-block"]._replace(config=BLOCKS | {"modules_to_not_convert": plain})
    packings = dict.fromkeys(("_proj", "in_proj_qkv", "in_proj_z"), packing)
    sizes = QWEN3_5 | {"num_hidden_layers": 3}
    expected = log_probabilities(packers.save(tmp_path, packings, kind=Qwen3_5TextConfig, **sizes))
    torch.testing.assert_close(found(tmp_path, quantization="none"), expected, atol=1e-4, rtol=0)
    stored = load(tmp_path, quantization="stored")
    assert (logits_of(stored, IDS, [len(IDS)]).log_softmax(-1) - expected).abs().max() < 0.2
    assert expected.std() > 0.1
    if native() is not None:
        gates = stored._layers[0]._mixer._gates.args.format, stored._layers[0]._mixer._in.args.format
        assert gates == (FLOAT_FORMATS[torch.float32], WeightFormat.Q8)


@pytest.mark.parametrize(("name", "is_tied"), [("w4a16", False), ("w8a16", True), ("nf4-nested", True)])
def test_a_packed_embedding_is_dequantised(name: str, is_tied: bool, tmp_path: Path) -> None:
    packing = CASES[name]
    config = deepcopy(packing.config)
    for group in config.get("config_groups", {}).values():
        group["targets"].append("Embedding")
    by_name = {"embed_tokens": packing._replace(config=config), "_proj": packing}
    expected = log_probabilities(packers.save(tmp_path, by_name, tie_word_embeddings=is_tied))
    torch.testing.assert_close(found(tmp_path, quantization="none"), expected, atol=1e-4, rtol=0)
    assert (found(tmp_path, quantization="stored") - expected).abs().max() < 0.2
    assert expected.std() > 0.1


def test_scales_of_255_are_not_numbers() -> None:
    assert e8m0(torch.tensor([0, 127, 254, 255], dtype=torch.uint8)).isnan().tolist() == [False, False, False, True]
    assert e8m0(torch.tensor([0, 127, 130], dtype=torch.uint8)).tolist() == [2.0**-127, 1.0, 8.0]


def test_spare_biases_of_gptq_are_zeros_or_an_error(tmp_path: Path) -> None:
    packers.save(tmp_path, packers.gptq(4, 128))
    load(tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"it has '{name}' that its config does not call for"):
        load(tmp_path)


def test_tensors_decide_which_modules_are_packed(tmp_path: Path) -> None:
    """Some modules and a head of other bits; the list of AWQ's exceptions is not a list of names."""
    eight = packers.gptq(8, 32)
    config = packers.gptq(4, 32).config | {"lm_head": True, "dynamic": {r"+:.*(down|lm_)": {"bits": 8}}}
    mixed = {"o_proj": packers.gptq(4, 32)._replace(config=config), "down_proj": eight, "lm_head": eight}
    expected = log_probabilities(packers.save(tmp_path, mixed))
    torch.testing.assert_close(found(tmp_path, quantization="none"), expected, atol=1e-4, rtol=0)
    awq = packers.awq(32)
    awq.config["modules_to_not_convert"] = ["gate"]  # as Mixtral's: within "gate_proj", too
    assert unpacked(tmp_path, awq, 64, 64)


def test_contradictions_of_shapes_and_orders_are_one_sentence(tmp_path: Path) -> None:
    packing = packers.gptq(4, 32)
    packers.save(tmp_path, packing._replace(config=packing.config | {"bits": 8}))
    with pytest.raises(
        ModelLoadError, match=r"qweight' has shape \[\d+, \d+\], but the config asks for \[\d+, \d+\]\."
    ):
        load(tmp_path)
    packers.save(tmp_path, packing)


@pytest.mark.parametrize("group", [-2, -1, 8, 99])
@pytest.mark.parametrize("name", ["g_idx", "weight_g_idx"])
def test_a_group_that_does_not_exist_is_refused(tmp_path: Path, name: str, group: int) -> None:
    """The first behind the last, and -1 beside others: all -1 alone says that the inputs are in order."""
    packers.save(tmp_path, CASES["gptq-4-actorder" if name == "g_idx" else "w4a16-actorder"])
    tensors = load_file(tmp_path / "model.safetensors")
    order = tensors[f"model.layers.0.self_attn.q_proj.{name}"]
    assert int(order.max()) == 7
    order[5] = group
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=rf"self_attn\.q_proj: 'g_idx' names group {group}, and there are 8, from 0"
    ):
        load(tmp_path)


def test_int8_and_plain_weights_are_made_of_packed_ones(tmp_path: Path) -> None:
    """--quantization int8 quantises any checkpoint; stored is refused for one that is not quantised."""
    exact = log_probabilities(packers.save(tmp_path, packers.awq(64)))
    assert (found(tmp_path, quantization="int8") - exact).abs().max() < 0.3
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="--quantization is 'stored', but the checkpoint is not quantised"):
        load(tmp_path, quantization="stored")
    with pytest.raises(ModelLoadError, match="is stored as I32; Quire reads F32, BF16, F16, F64"):
        load(tmp_path)
