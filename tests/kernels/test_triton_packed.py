"""Matrices of codes: every stored format against its independent dequantisation, as a linear and as experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import save_file
from torch import Tensor

from engine.runtime.activation import Activation
from engine.runtime.cuda.packed import Rows, pack_rows
from engine.runtime.cuda.packed_linear import MOST_ROWS, PackedProduct, decode
from engine.runtime.layers.mixture_cuda import CudaExperts
from engine.runtime.schemes import stored as stored_scheme
from engine.runtime.schemes.linear import Bundle, Matrix
from engine.runtime.schemes.stored import StoredScheme
from engine.runtime.weights.safetensors import SafetensorsCheckpoint
from engine.runtime.weights.stored.packed import Codes, Microscaled
from engine.runtime.weights.stored.storage import Storage
from tests.cpu import packers
from tests.cpu.packers import Packing
from tests.cpu.test_stored import CASES, found, log_probabilities

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and infinities, from NumPy
NUM_ROWS, NUM_INPUTS = 40, 256
# Kinds of rows by name of a case; others are dequantised at load.
SERVED = {
    "w4a16": "int4",
    "w4a16-asym": "int4",
    "w4a16-channel": "int4",
    "w3a16": "int4",
    "w5a16": "int8",
    "w8a16": "int8",
    "w8a16-asym": "int8",
    "w8a8": "int8",
    "w8a8-asym": "int8",
    "fp8-tensor": "fp8",
    "fp8-channel": "fp8",
    "fp8-block": "fp8",
    "awq": "int4",
    "awq-symmetric": "int4",
    "gptq-4": "int4",
    "gptq-4-asym": "int4",
    "gptq-4-v2": "int4",
    "gptq-8": "int8",
    "mxfp4": "mxfp4",
    "bnb-int8": "int8",
}
NOT_SERVED = ("w4a16-actorder", "gptq-4-actorder")


def in_memory(codes: Tensor) -> Codes:
    return Codes((len(codes), codes.shape[1]), lambda: codes)


def stored_matrix(packing: Packing, folder: Path, parts: int = 2) -> tuple[StoredScheme, Matrix, Tensor]:
    """A matrix merged of parts as a checkpoint stores them, and its weight in float64."""
    rng, tensors, weights = np.random.default_rng(3), {}, []
    for part in range(parts):
        packed, weight = packing.pack(rng, NUM_ROWS, NUM_INPUTS)
        tensors |= {f"part{part}{ending}": tensor for ending, tensor in packed.items()}
        weights.append(torch.from_numpy(weight).double())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": packing.config}))
    checkpoint = SafetensorsCheckpoint(folder)
    scheme = StoredScheme(Storage(checkpoint.quantization, checkpoint.headers()))
    found = {tensor.name: tensor for tensor in checkpoint.tensors({})}
    bundles = []
    for part in range(parts):
        endings = scheme.shapes(f"part{part}", NUM_ROWS, NUM_INPUTS)
        held = {end: found[f"part{part}{end}"] for end in endings}
        bundles.append(Bundle(f"part{part}", NUM_ROWS * part, NUM_ROWS, held))
    matrix = Matrix(
        bundles=bundles,
        shape=(NUM_ROWS * parts, NUM_INPUTS),
        dtype=torch.bfloat16,
        device=DEVICE,
        bias=torch.linspace(-1, 1, NUM_ROWS * parts, device=DEVICE).bfloat16(),
        activation=None,
        is_head=False,
        dense=None,
    )
    return scheme, matrix, torch.cat(weights).to(DEVICE)


@pytest.mark.parametrize("name", SERVED)
def test_codes_are_multiplied_as_they_are_stored(name: str, tmp_path: Path) -> None:
    scheme, matrix, weight = stored_matrix(CASES[name], tmp_path)
    product = scheme._packed(matrix)
    assert isinstance(product, PackedProduct)
    assert product.rows.kind == SERVED[name]
    bits = 4 if product.rows.kind in ("int4", "mxfp4") else 8
    assert scheme.summary().endswith(f"matrices as stored: 2 in {bits} bits")
    torch.testing.assert_close(decode(product.rows, torch.float32).double(), weight, atol=1e-7, rtol=1e-6)
    x = torch.randn(3, NUM_INPUTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = F.linear(x.double(), weight)
    wide = PackedProduct(product.rows._replace(bias=None))
    assert (wide(x).double() - exact).abs().max() <= 1e-5 * exact.abs().max()
    half, bias = x.bfloat16(), matrix.bias
    assert bias is not None
    exact = F.linear(half.double(), weight, bias.double())
    # The weight is rounded to bfloat16, unless a row has one scale, and the result is.
    assert (product(half).double() - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.parametrize("name", NOT_SERVED)
def test_an_order_of_inputs_is_dequantised(name: str, tmp_path: Path) -> None:
    scheme, matrix, _ = stored_matrix(CASES[name], tmp_path)
    assert scheme._packed(matrix) is None


def test_many_rows_are_multiplied_by_the_decoded_matrix(tmp_path: Path) -> None:
    scheme, matrix, weight = stored_matrix(CASES["awq"], tmp_path)
    product = scheme._packed(matrix)
    assert product is not None
    x = torch.randn(MOST_ROWS + 1, NUM_INPUTS).to(DEVICE, torch.bfloat16)
    expected = F.linear(x, weight.bfloat16(), matrix.bias)
    torch.testing.assert_close(product(x), expected, atol=2**-7 * float(expected.abs().max()), rtol=2**-7)


def test_a_head_is_dequantised_and_the_start_says_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without Triton, and on a GPU that cannot read FP8."""
    scheme, matrix, _ = stored_matrix(CASES["fp8-block"], tmp_path)
    monkeypatch.setattr(stored_scheme, "has_fp8", lambda _: False)
    assert scheme._packed(matrix) is None
    scheme, matrix, _ = stored_matrix(CASES["awq"], tmp_path)
    monkeypatch.setattr(stored_scheme, "has_triton", lambda _: False)
    assert scheme._packed(matrix) is None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a model on a CPU needs Triton's interpreter; tests/gpu serves AWQ")
def test_a_model_of_codes_equals_the_dequantised_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged parts are in their places."""
    monkeypatch.setattr(StoredScheme, "_native", StoredScheme._packed)  # which a CPU would take
    expected = log_probabilities(packers.save(tmp_path, packers.awq(32), hidden=64, inner=96))
    torch.testing.assert_close(found(tmp_path, quantization="stored"), expected, atol=1e-4, rtol=0)


def test_every_code_and_exponent_of_mxfp4() -> None:
    """Those of zero and of the smallest power of two, which no float32 has an exponent for, and the NaN."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 4)
    exponents = torch.tensor([[0, 1], [127, 128], [200, 240], [255, 126]], dtype=torch.uint8)
    part = Microscaled(in_memory(codes), exponents)
    rows = pack_rows([part])
    assert rows is not None
    assert torch.equal(decode(rows.on(DEVICE), torch.float32).cpu().nan_to_num(7), part.dequantise().nan_to_num(7))


def test_experts_of_codes_equal_experts_of_floats() -> None:
    """gpt-oss's way to store them, and one with zeros."""
    numbers, num_experts, hidden, width = torch.Generator().manual_seed(8), 3, 64, 96

    def draw(num_rows: int, num_inputs: int, kind: str) -> Rows:
        made = []
        for _ in range(num_experts):
            if kind == "mxfp4":
                codes = torch.randint(0, 16, (num_rows, num_inputs), generator=numbers, dtype=torch.uint8)
                exponents = torch.randint(122, 126, (num_rows, num_inputs // 32), generator=numbers, dtype=torch.uint8)
                made.append(pack_rows([Microscaled(in_memory(codes), exponents)]))
                continue
            shape = (num_rows, num_inputs // 32)
            codes = torch.randint(0, 256, (num_rows, num_inputs // 2), generator=numbers, dtype=torch.uint8)
            zeros = torch.randint(4, 12, shape, generator=numbers, dtype=torch.uint8)
            scales = (torch.rand(shape, generator=numbers) / 32).half()
            made.append(Rows(codes, None, "int4", scales, zeros, 32))
        held = [each for each in made if each is not None]
        tensors = (torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*held, strict=True))
        return Rows._make(tensors).on(DEVICE)

    for kind in ("mxfp4", "int4"):
        gate_up, down = draw(2 * width, hidden, kind), draw(hidden, width, kind)
        floats = [
            Rows(torch.stack([decode(part_of(rows, i), torch.float32) for i in range(num_experts)]))
            for rows in (gate_up, down)
        ]
        x = torch.randn(5, hidden, generator=numbers).to(DEVICE)
        weights = torch.rand(5, 2, generator=numbers).to(DEVICE)
        chosen = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2]], dtype=torch.int32, device=DEVICE)
        found = CudaExperts(gate_up, down, Activation.SILU)(x, weights, chosen)
        expected = CudaExperts(*floats, Activation.SILU)(x, weights, chosen)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def part_of(rows: Rows, expert: int) -> Rows:
    return Rows._make(x[expert] if isinstance(x, Tensor) else x for x in rows)
