"""Quantised checkpoints multiplied as stored on a CPU: rows, documented arithmetic of activations, engine, adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.native.build import Isa
from engine.runtime.native.library import native
from engine.runtime.native.rows import RepackedRows
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.runtime.weights.stored.packed import Blocks, Codes, Floats, Integers, repacked
from engine.settings.engine_config import EngineConfig
from tests.cpu import packers
from tests.cpu.lora_folders import load_adapter, merge, save_adapter
from tests.cpu.model_driver import request, serve, settings
from tests.cpu.native_linears import quantised
from tests.cpu.test_lora import forward
from tests.cpu.test_models_families import CASES as FAMILIES
from tests.cpu.test_models_families import Case, logits_of, write_tiny
from tests.cpu.test_stored import BLOCKS, CASES, FP8_DYNAMIC, IDS, unpacked
from tests.cpu.tile_model import tiles_in_use

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels cannot be built here")

CPU = torch.device("cpu")
KINDS = {
    "w4a16": 2,
    "w4a16-asym": 3,
    "w4a16-channel": 2,
    "w3a16": 2,
    "w5a16": 8,
    "w8a16": 8,
    "w8a8": 8,
    "awq": 3,
    "awq-symmetric": 2,
    "gptq-4": 2,
    "gptq-4-asym": 3,
    "gptq-2": 2,
    "gptq-3": 2,
    "gptq-8": 8,
    "bnb-int8": 8,
    "mxfp4": 39,
    "fp8-channel": 8,
    "fp8-block": 8,
}
DEQUANTISED = ["w4a16-actorder", "gptq-4-actorder", "w8a16-asym", "w8a8-asym", "nf4", "nvfp4"]


def stored(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Decoder, str]:
    """A model with its codes as stored, and the start's line."""
    lines = [""]
    config = EngineConfig(**({"model": str(folder), "quantization": "stored"} | changes))
    model = load_model(config, CPU, dtype, lambda p: lines.append(p.detail) if p.stage == "quantization" else None)
    assert isinstance(model, Decoder)
    return model, lines[-1]


def divergence(exact: Tensor, other: Tensor) -> float:
    """The mean KL divergence of logits from the exact ones, in float64."""
    p, q = (logits.double().log_softmax(-1) for logits in (exact, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS[None], use_cache=False).logits[0]
        return found


def made(rows: RepackedRows) -> np.ndarray:
    library = native()
    assert library is not None
    return quantised(library, [rows], rows.num_inputs, torch.float32, None).rows(torch.arange(rows.num_rows)).numpy()


@pytest.mark.parametrize("name", KINDS)
def test_rows_hold_the_same_weights(name: str, tmp_path: Path) -> None:
    packed, weight = unpacked(tmp_path, CASES[name], 72, 384)
    rows = repacked(packed)
    assert rows is not None
    assert rows.kind == KINDS[name]
    found = made(rows)
    if name.startswith("fp8"):  # the only one that is rounded again, to 127 steps a block of 32
        peak = np.abs(weight).reshape(72, -1, 32).max(2).repeat(32, 1)
        assert (np.abs(found - weight) <= peak / 127 * 0.51).all()
    else:  # scales, and scales times zeros, are float16
        np.testing.assert_allclose(found, weight, rtol=1e-3, atol=16 * 2**-11 * 0.025 if rows.kind == 3 else 1e-7)


@pytest.mark.parametrize("shape", [(72, 384), (136, 128)])
@pytest.mark.parametrize("name", [name for name in KINDS if not name.startswith(("w3", "w5", "gptq-2", "gptq-3"))])
def test_the_library_makes_the_same_rows(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Of codes where they lie in the file, or as they are laid out, and of those that were decoded in memory."""
    packed = unpacked(tmp_path, CASES[name], *shape)[0]
    assert not isinstance(packed, Floats)
    if isinstance(packed, Blocks):
        decoded = packed._replace(values=packed.values._replace(place=None))
    else:
        decoded = packed._replace(codes=packed.codes._replace(place=None))
    rows, others = repacked(packed), repacked(decoded)
    assert rows is not None
    assert others is not None
    assert (rows.file is None, others.file is None) == (name.startswith(("awq", "gptq")), True)
    np.testing.assert_array_equal(made(rows), made(others))


@pytest.mark.parametrize("name", DEQUANTISED)
def test_other_weights_have_no_rows(name: str, tmp_path: Path) -> None:
    packed, _ = unpacked(tmp_path, CASES[name], 64, 384)
    assert repacked(packed) is None


def test_scales_that_float16_cannot_hold_have_no_rows() -> None:
    codes, zeros = torch.zeros(4, 64, dtype=torch.uint8), torch.full((1, 1), 8, dtype=torch.int16)
    for scale, kept in ((1e-3, True), (1e-7, False), (1e6, False), (0.0, True)):
        assert (
            repacked(Integers(Codes((4, 64), lambda: codes), torch.full((4, 2), scale), zeros, 4, 32)) is not None
        ) is kept


# Documented arithmetic: a weight is multiplied exactly, and inputs are rounded, in float64.


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale


def static(x: Tensor) -> Tensor:
    return rounded(x, torch.tensor(0.02, dtype=torch.float64))


def per_token(x: Tensor) -> Tensor:
    return rounded(x, x.abs().amax(-1, keepdim=True) / 448)


def per_token_and_128(x: Tensor) -> Tensor:
    parts = F.pad(x, (0, -x.shape[-1] % 128)).unflatten(-1, (-1, 128))
    return rounded(parts, parts.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).flatten(-2)[..., : x.shape[-1]]


def int8_per_token(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


ARITHMETIC: dict[str, tuple[packers.Packing, Callable[[Tensor], Tensor]]] = {
    "w8a8": (CASES["w8a8"], int8_per_token),
    "fp8-static": (CASES["fp8-tensor"], static),
    "fp8-dynamic": (packers.fp8("row", ".weight_scale", FP8_DYNAMIC), per_token),
    "fp8-block": (packers.fp8("block", ".weight_scale_inv", BLOCKS), per_token_and_128),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_rows_are_nearer_to_the_weights_than_documented_activations(name: str, tmp_path: Path) -> None:
    """Quire rounds inputs to bytes, a scale for every 32, which loses less than each format's own rounding."""
    packing, rounding = ARITHMETIC[name]
    theirs = packers.save(tmp_path, packing, inner=416).double()
    exact = logits(theirs)
    for module in theirs.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args: (rounding(args[0]),))
    documented = logits(theirs)
    model, line = stored(tmp_path)
    assert line.endswith("matrices as stored: 14 in 8 bits")
    ours = logits_of(model, IDS, [len(IDS)])
    lost, allowed = divergence(exact, ours), divergence(exact, documented)
    assert 0 < lost < max(allowed, 4e-4)
    assert divergence(documented, ours) < 2 * allowed + 4e-4


def test_bytes_with_one_scale_a_row_take_inputs_of_16_bits_on_tiles(tmp_path: Path) -> None:
    exact = logits(packers.save(tmp_path, CASES["w8a8"], inner=416).double())
    with tiles_in_use():
        model, line = stored(tmp_path)
        found = logits_of(model, IDS, [len(IDS)])
    assert line.endswith("matrices as stored: 14 in 8 bits")
    assert divergence(exact, found) < 1e-7  # with other kernels 1e-4


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "awq", "gptq-3", "mxfp4"])
def test_rows_of_4_bits_stay_near_the_weights(name: str, tmp_path: Path) -> None:
    exact = logits(packers.save(tmp_path, CASES[name]))
    model, line = stored(tmp_path)
    assert line.endswith("matrices as stored: 14 in 4 bits")
    assert 0 < divergence(exact, logits_of(model, IDS, [len(IDS)])) < 2e-3


def test_the_start_says_what_is_dequantised(tmp_path: Path) -> None:
    by_name = {"mlp.down_proj": packers.gptq(4, 32, shuffled=True), "_proj": packers.gptq(4, 32)}
    packers.save(tmp_path, by_name)
    model, line = stored(tmp_path, torch.bfloat16)
    assert line == "gptq: matrices as stored: 2 dequantised to bfloat16, 12 in 4 bits"
    assert model._native is not None  # the whole step is still one call


def test_merged_matrices_keep_their_parts_order_and_blocks(tmp_path: Path) -> None:
    """q, k and v with orders of their own; gates and ups of 392 rows, which end within a block of 128."""
    order = packers.gptq(4, 32, shuffled=True, symmetric=False)
    blocks = packers.fp8("block", ".weight_scale_inv", BLOCKS)
    for case in (order, blocks):
        folder = tmp_path / case.config["quant_method"]
        exact = logits(packers.save(folder, case, hidden=192, inner=416))
        model, _ = stored(folder, quantization="none")
        found = logits_of(model, IDS, [len(IDS)])
        torch.testing.assert_close(found.log_softmax(-1), exact.log_softmax(-1), atol=1e-4, rtol=0)
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    q, k = (tensors[f"model.layers.0.self_attn.{name}_proj.g_idx"] for name in "qk")
    assert not torch.equal(q, k)


def test_a_w4a16_checkpoint_through_the_engine(tmp_path: Path) -> None:
    """Chunks, preemption, the prefix cache and two choices give the tokens of one request alone."""
    packers.save(tmp_path, CASES["w4a16"])
    model, line = stored(tmp_path, torch.bfloat16, quantization="auto")
    library = native()
    assert line.endswith("14 in 4 bits") or (library is not None and library.isa is Isa.PORTABLE)
    prompts = [list(range(3, 40)), list(range(3, 35)), [7, 9, 11], list(range(3, 50))]
    alone = [serve(model, settings(), [request("r", prompt)]).ids["r", 0] for prompt in prompts]
    config = settings(num_blocks=24, max_model_len=64, max_num_batched_tokens=13)
    scheduler = Scheduler(config)
    asked = [request(f"r{i}", prompt, n=2) for i, prompt in enumerate(prompts)]
    served = serve(model, config, asked, depth=1, apart=1, scheduler=scheduler)
    for i, expected in enumerate(alone):
        assert served.ids[f"r{i}", 0] == served.ids[f"r{i}", 1] == expected
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.prefix_hit_tokens > 0


def test_adapters_over_packed_weights(tmp_path: Path) -> None:
    theirs = packers.save(tmp_path / "model", CASES["awq"])
    model, _ = stored(tmp_path / "model")
    folder = save_adapter(theirs, tmp_path / "adapter", rank=4)
    merged = deepcopy(theirs)
    merge(merged, folder)
    adapter = load_adapter(model, folder)
    plain, adapted = forward(model, [(IDS[:12], None), (IDS[:12], adapter)])
    base, exact = logits(theirs)[:12], logits(merged)[:12]
    assert divergence(base, exact) > 0.01
    assert divergence(base, plain) < 2e-3
    assert divergence(exact, adapted) < 0.1 * divergence(base, exact)


EXPERTS = {
    "qwen3-moe": packers.gptq(4, 32, shuffled=True),
    "deepseek_v3": packers.fp8("block", ".weight_scale_inv", BLOCKS),
}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_and_latents_are_stored_like_other_matrices(family: str, tmp_path: Path) -> None:
    """Packed experts, routers and latents equal the model with weights dequantised by packers.py."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    case, packing = FAMILIES[family], EXPERTS[family]
    write_tiny(Case(case.config, case.settings | {"moe_intermediate_size": 96}), plain)
    write_tiny(case, packed)
    (packed / "config.json").write_text((plain / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    codes: dict[str, Tensor] = {}
    rng = np.random.default_rng(0)
    for tensor in SafetensorsCheckpoint(plain).tensors({}):
        weights[tensor.name] = torch.empty(tensor.shape)
        tensor.copy_to(weights[tensor.name])
        module = tensor.name.removesuffix(".weight")
        if not module.endswith(("_proj", "_with_mqa", "mlp.gate")):
            codes[tensor.name] = weights[tensor.name]
            continue
        stored_parts, weight = packing.pack(rng, *tensor.shape)
        codes |= {module + ending: part for ending, part in stored_parts.items()}
        weights[tensor.name] = torch.from_numpy(weight.copy()).float()
    save_file(weights, plain / "model.safetensors")
    save_file(codes, packed / "model.safetensors")
    values = json.loads((plain / "config.json").read_text()) | {"quantization_config": packing.config}
    (packed / "config.json").write_text(json.dumps(values))
    exact = logits_of(stored(plain, quantization="none")[0], IDS, [len(IDS)])
    found = logits_of(stored(packed, quantization="none")[0], IDS, [len(IDS)])
    torch.testing.assert_close(found.log_softmax(-1), exact.log_softmax(-1), atol=1e-4, rtol=0)
    model, line = stored(packed)
    assert ("in 8 bits" if family == "deepseek_v3" else "dequantised") in line
    assert divergence(exact, logits_of(model, IDS, [len(IDS)])) < 2e-2
