"""Linears in fp8: rows as they are quantised against torch's own rounding, and their products against float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import save_file
from torch import Tensor

from engine.core.errors import ConfigError
from engine.core.types import Progress
from engine.runtime.activation import Activation
from engine.runtime.cuda.fp8_linear import Fp8Linear, quantise_rows
from engine.runtime.models import load
from engine.runtime.models.decoder import Decoder
from engine.runtime.schemes import stored
from engine.runtime.schemes.linear import Bundle, Circumstances, Linear, Matrix, Scheme
from engine.runtime.schemes.stored import FIRST_CAPABILITY, MULTIPLE, Fp8Scheme, StoredScheme
from engine.runtime.weights.checkpoint import StoredTensor, open_checkpoint
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.runtime.weights.stored.storage import Storage
from engine.settings.engine_config import EngineConfig
from tests.cpu import packers
from tests.cpu.test_models_families import CASES, logits_of, write_tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
pytestmark = [
    # The interpreter computes with NumPy, which speaks up where infinities and NaN are meant.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(
        DEVICE.type == "cuda" and torch.cuda.get_device_capability() < FIRST_CAPABILITY,
        reason="this card has no product of fp8 rows: it needs compute capability 9.0",
    ),
]
ROUNDING = 2.0**-4  # of a number of e4m3, relative, at most


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's is a device's; here the same sum in float32, and what a device would refuse refused."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    **kwargs: bool,
) -> Tensor:
    assert a.dtype == b.dtype == FP8
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert a.shape[1] % MULTIPLE == b.shape[1] % MULTIPLE == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    assert out_dtype == BF16
    assert bias is None or bias.dtype == BF16
    assert kwargs == {"use_fast_accum": True}
    y = (a.float() @ b.float()) * scale_a * scale_b
    return (y if bias is None else y + bias.float()).to(out_dtype)


def random(*shape: int, spread: int = 0) -> Tensor:
    x = torch.randn(shape) * 10.0 ** torch.randint(-spread, spread + 1, (*shape[:-1], 1))
    return x.to(DEVICE, BF16)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    numbers = torch.full(x.shape, torch.nan, device=DEVICE).to(FP8)
    scales = torch.full((x.shape[0], 1), torch.nan, device=DEVICE)
    quantise_rows(x, numbers, scales)
    return numbers, scales


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16), (5, 576), (3, 1536), (2, 5000)])
def test_rows_are_rounded_as_torch_rounds(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(*shape, spread=3).to(dtype)
    numbers, scales = quantised(x)
    peaks = x.float().abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scales, peaks / 448, rtol=1e-6, atol=0)
    expected = (x.float() * (448 / peaks)).to(FP8)
    off = (numbers.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
    assert off.max() <= 1  # where the factor's last digit met a tie, of which numbers of few digits have many
    assert off.float().mean() < 0.1
    assert (numbers.float().abs().amax(-1) == 448).all()  # nothing is wasted, and nothing cut off
    error = (numbers.double() * scales.double() - x.double()).abs()
    assert bool((error <= (ROUNDING * 1.0001) * x.double().abs() + 2.0**-10 * 1.0001 * scales.double()).all())


def test_rows_that_lie_apart_and_rows_that_are_broken() -> None:
    x = random(6, 96)
    x[1], x[2, 5], x[3, 7], x[4] = 0, torch.nan, torch.inf, 1e-35
    numbers, scales = quantised(torch.cat((x, random(6, 32)), 1)[:, :96])
    again = numbers.float() * scales
    assert torch.equal(again[1], torch.zeros(96, device=DEVICE))
    assert scales[1] == 0
    assert again[2].isnan().sum() == 1
    assert again[3].isnan().all()
    for row in (0, 4, 5):
        torch.testing.assert_close(again[row], x[row].float(), rtol=0.07, atol=float(x[row].abs().max()) * 2**-9 / 448)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "inputs", "outputs"), [(1, 64, 48), (7, 576, 192), (33, 256, 32)])
def test_products_are_near_to_those_in_float64(num_rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    weight, bias = random(outputs, inputs, spread=2), random(outputs) if has_bias else None
    x = random(num_rows, inputs, spread=2)
    linear = Fp8Linear(torch.empty(outputs, inputs, device=DEVICE).to(FP8), bias)
    for first, end in ((0, 16), (16, outputs)):
        linear.load(first, end - first, lambda rows, part=weight[first:end]: rows.copy_(part))
    y = linear(x)
    assert (y.dtype, y.shape) == (BF16, (num_rows, outputs))
    exact = F.linear(x.double(), weight.double())
    y = y.double() - (0 if bias is None else bias.double())
    # A factor is off by 1/16 of its size at most, by 1/38 as a mean; a term by 1.4 times that, and the terms' signs differ.
    sizes = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1) * inputs**-0.5
    if bias is not None:
        sizes += bias.double().abs() / 8  # whose rounding is the result's
    assert ((y - exact) / sizes).square().mean().sqrt() <= 0.05
    # What was really rounded is multiplied without further loss, but for the result's own rounding.
    numbers, scales = quantised(x)
    rounded_weight, weight_scales = quantised(weight)
    exact = F.linear(numbers.double() * scales.double(), rounded_weight.double() * weight_scales.double())
    sizes = (numbers.double() * scales.double()).abs() @ (rounded_weight.double() * weight_scales.double()).abs().t()
    sizes = 2**-10 * sizes + 2**-8 * (exact.abs() + (0 if bias is None else bias.double().abs()))
    assert bool(((y - exact).abs() <= sizes).all())


@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_a_linear_is_filled_part_by_part(activation: Activation | None) -> None:
    """As a checkpoint holds gates and ups, in any order."""
    parts = [random(32, 64), random(32, 64)]
    stored = [StoredTensor("part", (32, 64), 0, "file", lambda rows, i=i: rows.copy_(parts[i])) for i in range(2)]
    matrix = Matrix(
        bundles=[Bundle("part", 32 * i, 32, {".weight": stored[i]}) for i in (1, 0)],
        shape=(64, 64),
        dtype=BF16,
        device=DEVICE,
        bias=None,
        activation=activation,
        is_head=False,
        dense=None,
    )
    linear = Linear(Fp8Scheme().product(matrix), activation)
    assert isinstance(linear.product, Fp8Linear)
    assert linear.args is None
    x = random(5, 64)
    exact = F.linear(x.double(), torch.cat(parts).double())
    if activation is not None:
        gates, ups = exact.chunk(2, 1)
        exact = F.silu(gates) * ups
    assert (linear(x).double() - exact).norm() <= 0.1 * exact.norm()
    assert linear.in_float32(x).dtype == torch.float32


def matrices(model: Decoder) -> list[Linear]:
    return [
        linear
        for layer in model._layers
        for linear in (layer._mixer._qkv, layer._mixer._o, layer._feed_forward._gate_up, layer._feed_forward._down)
    ]


@pytest.mark.parametrize(("name", "load_format"), [("llama-llama3", "auto"), ("gemma2", "dummy")])
def test_a_model_is_loaded_into_fp8(name: str, load_format: str, tmp_path: Path) -> None:
    """All but the embedding, the head and the norms; its hidden states stay near to those in bfloat16."""
    write_tiny(CASES[name], tmp_path)
    config = EngineConfig(model=str(tmp_path), load_format=load_format, quantization="fp8")
    told: list[Progress] = []
    plain, fp8 = (decoder(config, tmp_path, scheme, told) for scheme in (Scheme(), Fp8Scheme()))
    assert {type(linear.product) for linear in matrices(fp8)} == {Fp8Linear}
    assert not isinstance(fp8._head.product, Fp8Linear)
    assert [line.detail for line in told if line.stage == "quantization"] == ["fp8: 21 matrices"]
    ids = torch.arange(3, 8, device=DEVICE)
    found, expected = (run(model, ids) for model in (fp8, plain))
    # A product is 4 % off. Through 21 of them, and the sharp attention of random weights, it is a quarter.
    assert (found - expected).norm() <= 0.4 * expected.norm()
    assert (found - expected).norm() > 0


def test_matrices_of_odd_sides_stay_as_they_are(tmp_path: Path) -> None:
    write_tiny(CASES["llama-llama3"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", quantization="fp8")
    told: list[Progress] = []
    model = decoder(config, tmp_path, Fp8Scheme(), told)
    assert [isinstance(linear.product, Fp8Linear) for linear in matrices(model)][:4] == [True, True, False, False]
    detail = next(line.detail for line in told if line.stage == "quantization")
    assert detail == "fp8: 12 matrices; 9, of sides that are no multiples of 16, stay as they are"
    assert run(model, torch.arange(3, 8, device=DEVICE)).isfinite().all()


def decoder(config: EngineConfig, path: Path, scheme: Scheme, told: list[Progress]) -> Decoder:
    checkpoint = open_checkpoint(config.load_format, path, config.seed)
    return load.load_decoder(config, checkpoint, DEVICE, BF16, scheme, told.append)


def run(model: Decoder, ids: Tensor) -> Tensor:
    with DEVICE:
        return logits_of(model, ids, [len(ids)])


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ((8, 9), BF16, r"needs compute capability 9\.0 or newer, and A card has 8\.9; leave it out"),
        ((9, 0), torch.float16, r"--dtype is 'float16'; set it to bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(
    capability: tuple[int, int], dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A card")
    here = Circumstances(
        has_gguf_rows=False,
        is_dtype_named=False,
        device=torch.device("cuda"),
        dtype=dtype,
        is_own=True,
        library=None,
    )
    monkeypatch.setattr(stored, "has_triton", lambda device: True)
    with pytest.raises(ConfigError, match=rf"--quantization is 'fp8', .*{reason}"):
        load.choose_scheme("fp8", here)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    write_tiny(CASES["llama-llama3"], tmp_path)
    config = EngineConfig(model=str(tmp_path), quantization="fp8")
    with pytest.raises(ConfigError, match="fp8 weights are for a CUDA device, and the device is cpu; choose int8"):
        load.load_model(config, torch.device("cpu"), BF16, lambda progress: None)


def stored_matrix(folder: Path, dtype: torch.dtype, *names: str) -> tuple[StoredScheme, Matrix, Tensor]:
    """A matrix merged of parts that are stored in fp8, and its weight in float64."""
    packings = {"row": ".weight_scale", "all": ".weight_scale", "block": ".weight_scale_inv"}
    rng, tensors, weights = np.random.default_rng(0), {}, []
    for i, name in enumerate(names):
        packed, weight = packers.fp8(name, packings[name], {}).pack(rng, 144, 160)
        tensors |= {f"part{i}{ending}": tensor for ending, tensor in packed.items()}
        weights.append(torch.from_numpy(weight))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    checkpoint = SafetensorsCheckpoint(folder)
    scheme = StoredScheme(Storage(checkpoint.quantization, checkpoint.headers()))
    stored = {tensor.name: tensor for tensor in checkpoint.tensors({})}
    matrix = Matrix(
        bundles=[
            Bundle(
                f"part{i}", 144 * i, 144, {end: stored[f"part{i}{end}"] for end in scheme.shapes(f"part{i}", 144, 160)}
            )
            for i in range(len(names))
        ],
        shape=(144 * len(names), 160),
        dtype=dtype,
        device=DEVICE,
        bias=None,
        activation=None,
        is_head=False,
        dense=None,
    )
    return scheme, matrix, torch.cat(weights)


def test_stored_fp8_is_multiplied_with_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts with a scale for each row, and one for all: the weight is not rounded again."""
    monkeypatch.setattr(Fp8Scheme, "serves", lambda device: True)
    scheme, matrix, weight = stored_matrix(tmp_path, BF16, "row", "all")
    product = scheme._fp8(matrix)
    assert isinstance(product, Fp8Linear)
    assert scheme.summary() == "fp8: matrices as stored: 2 in fp8"
    x = random(5, 160)
    numbers, scales = torch.empty(x.shape, dtype=FP8, device=DEVICE), torch.empty(5, 1, device=DEVICE)
    quantise_rows(x, numbers, scales)
    exact = F.linear(numbers.double() * scales.double(), weight.to(DEVICE))
    torch.testing.assert_close(product(x).double(), exact, rtol=2**-7, atol=2**-8 * exact.abs().max().item())


def test_stored_fp8_without_such_a_product_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, in another type than bfloat16, or on an older device."""
    monkeypatch.setattr(Fp8Scheme, "serves", lambda device: True)
    for dtype, names in ((BF16, ("row", "block")), (torch.float16, ("row",))):
        scheme, matrix, weight = stored_matrix(tmp_path, dtype, *names)
        assert scheme._fp8(matrix) is None
        torch.testing.assert_close(scheme.dense(matrix).double(), weight.to(DEVICE), rtol=2**-8, atol=1e-7)
    monkeypatch.undo()
    assert not Fp8Scheme.serves(torch.device("cpu"))
