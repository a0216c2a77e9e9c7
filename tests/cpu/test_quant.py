"""Quantised weights: products against float64 on every instruction set, and which weights are served so.

Most inputs here are chosen so that nothing is lost in quantising them (integers times powers of two, the largest of each
block 127): what is left is the kernel's own error, which is that of float32 sums.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.core.errors import ConfigError
from engine.files.gguf_kinds import Kind
from engine.runtime.models import load as load_module
from engine.runtime.models.load import load_model
from engine.runtime.native.build import Isa, machine_isas
from engine.runtime.native.library import Library, WeightFormat, choose_kernels, native
from engine.runtime.native.ops import dequantise, is_served_quantised
from engine.runtime.native.rows import StoredRows
from engine.settings.engine_config import EngineConfig
from tests.cpu.gguf_rows import floats_of, put_scales, random_rows, scale_places
from tests.cpu.native_linears import ISAS, int8, quantised
from tests.cpu.test_models_families import Case, load, logits_of, save_tiny
from tests.cpu.test_weights_gguf import ARCHITECTURES, convert, tiny, write

FORMATS = {  # the row format of each type, and its bytes for 32 weights
    Kind.Q4_0: (WeightFormat.Q4, 18),
    Kind.Q4_1: (WeightFormat.Q4_MIN, 20),
    Kind.Q5_0: (WeightFormat.Q5, 22),
    Kind.Q5_1: (WeightFormat.Q5_MIN, 24),
    Kind.Q8_0: (WeightFormat.Q8, 34),
    Kind.Q2_K: (WeightFormat.Q2_HALF_MIN, 16),
    Kind.Q3_K: (WeightFormat.Q3_HALF, 16),
    Kind.Q4_K: (WeightFormat.Q4_SUPER, 18.5),
    Kind.Q5_K: (WeightFormat.Q5_SUPER, 22.5),
    Kind.Q6_K: (WeightFormat.Q6_HALF, 28),
    Kind.IQ4_NL: (WeightFormat.IQ4, 18),
    Kind.IQ4_XS: (WeightFormat.IQ4, 18),
    Kind.IQ3_XXS: (WeightFormat.IQ3_XXS, 18),
    Kind.IQ3_S: (WeightFormat.IQ3_S, 18),
    Kind.IQ2_XXS: (WeightFormat.IQ2, 14.25),
    Kind.IQ2_XS: (WeightFormat.IQ2, 14.25),
    Kind.IQ2_S: (WeightFormat.IQ2, 14.25),
    Kind.IQ1_S: (WeightFormat.IQ1_S, 10.5),
    Kind.IQ1_M: (WeightFormat.IQ1_M, 14.25),
    Kind.TQ1_0: (WeightFormat.Q2, 10),
    Kind.TQ2_0: (WeightFormat.Q2, 10),
    Kind.MXFP4: (WeightFormat.MXFP4, 17),
    Kind.NVFP4: (WeightFormat.NVFP4, 20),
    Kind.Q1_0: (WeightFormat.Q1, 6),
    Kind.Q2_0: (WeightFormat.Q2, 10),
}
KINDS = list(FORMATS)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8 * 1.01}
IDS = torch.arange(3, 33)


def dequantised(rows: np.ndarray, kind: Kind) -> Tensor:
    return floats_of(rows, kind).double()


def exact_bytes(num_rows: int, num_inputs: int) -> Tensor:
    """Rows that survive quantising: integers up to 127, which each block has, times a power of two."""
    integers = torch.randint(-127, 128, (num_rows, -(-num_inputs // 32), 32))
    integers[..., 5] = 127
    powers = 2.0 ** torch.randint(-3, 3, integers.shape[:2])
    return (integers * powers[..., None]).flatten(1)[:, :num_inputs].contiguous()


@pytest.mark.parametrize(
    "library", list(dict.fromkeys((Isa.PORTABLE, ISAS[-2:][0]))), indirect=True, ids=lambda isa: isa.name
)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type_of_a_gguf_file(library: Library, kind: Kind, dtype: torch.dtype) -> None:
    """The instruction sets that are left out have the bits of the second one here, as the next test shows."""
    torch.manual_seed(0)
    rows, bias = random_rows(75, 512, kind), torch.randn(75).to(dtype)
    linear = quantised(library, [StoredRows(int(kind), rows)], 512, dtype, bias)
    name, size = FORMATS[kind]
    assert (linear.args.format, linear._packed.nbytes) == (name, 96 * 512 // 32 * size)
    for num_rows in (1, 2, 3, 4, 5, 6, 7, 29):
        x = exact_bytes(num_rows, 512).to(dtype)
        expected = F.linear(x.double(), dequantised(rows, kind), bias.double())
        error = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(linear(x).double(), expected, rtol=ROUNDING[dtype], atol=error)
        torch.testing.assert_close(linear(x, torch.float32).double(), expected, rtol=1e-6, atol=error)


@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: "int8" if kind is None else kind.name)
def test_instruction_sets_agree_to_the_bit(library: Library, kind: Kind | None) -> None:
    """Each rounds once where it multiplies and adds. test_other_machines.py has those that this machine lacks."""
    if library.isa is Isa.PORTABLE:
        pytest.skip("on x86 this rounds products, too")
    if library.isa is Isa.AMX:
        pytest.skip("its inputs have 16 bits: test_tiles.py")
    torch.manual_seed(4)
    x, weight, bias = torch.randn(29, 768), torch.randn(75, 768), torch.randn(75)
    parts = [] if kind is None else [StoredRows(int(kind), random_rows(75, 768, kind, scale=0.0123))]
    choose_kernels([isa for isa in machine_isas() if isa is not Isa.AMX][-1].name.lower())
    for dtype in ROUNDING:
        both = [
            quantised(kernels, parts, 768, dtype, bias.to(dtype)) if parts else int8(kernels, weight.to(dtype))
            for kernels in (library, native())
        ]
        for num_rows in (1, 2, 3, 4, 5, 6, 7, 29):
            for to in (dtype, torch.float32):
                assert torch.equal(*(linear(x[:num_rows].to(dtype), to) for linear in both))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(75, 512), (1, 32), (33, 50), (64, 7)])
def test_int8(library: Library, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randint(-127, 128, shape).float()
    weight[:, 3] = -127
    weight = (weight * 2.0 ** torch.randint(-3, 3, (shape[0], 1))).to(dtype)
    linear = int8(library, weight, None)
    assert linear.args.format == WeightFormat.INT8
    for num_rows in (1, 6, 13):
        x = exact_bytes(num_rows, shape[1]).to(dtype)
        expected = F.linear(x.double(), weight.double())
        error = 2e-6 * expected.abs().max().item()
        torch.testing.assert_close(linear(x, torch.float32).double(), expected, rtol=1e-6, atol=error)


@pytest.mark.parametrize("width", [16, 75])
@pytest.mark.parametrize("kinds", [(Kind.Q4_1, Kind.Q6_K), (Kind.Q4_0, Kind.Q4_0), None], ids=str)
def test_gates_and_ups(library: Library, kinds: tuple[Kind, Kind] | None, width: int) -> None:
    torch.manual_seed(3)
    bias, weight = torch.randn(2 * width), torch.randn(2 * width, 512)
    rows = [StoredRows(int(kind), random_rows(width, 512, kind)) for kind in kinds or ()]
    plain, gated = (
        quantised(library, rows, 512, torch.float32, bias, code) if rows else int8(library, weight, bias, code)
        for code in (0, 1)
    )
    for num_rows in (1, 7):
        x = torch.randn(num_rows, 512) / 512
        gates, ups = plain(x).double().chunk(2, dim=1)
        torch.testing.assert_close(gated(x).double(), F.silu(gates) * ups, rtol=1e-5, atol=1e-6)


def test_what_quantising_costs(library: Library) -> None:
    """On normal numbers, where it does cost: an error of some thousandths, and scales of K types rounded to float16."""
    torch.manual_seed(2)
    x, weight = torch.randn(9, 768), torch.randn(70, 768)
    costs = {"int8": (int8(library, weight, None)(x), weight.double())}
    for kind in (Kind.Q8_0, Kind.Q4_K, Kind.Q6_K):
        rows = random_rows(70, 768, kind, scale=0.0123)
        linear = quantised(library, [StoredRows(int(kind), rows)], 768, torch.float32, None)
        costs[kind.name] = (linear(x), dequantised(rows, kind))
    for name, (y, reference) in costs.items():
        expected, is_paired = x.double() @ reference.T, library.isa is Isa.AMX and name != "int8"
        assert (y - expected).norm() < (0.003 if is_paired else 0.012) * expected.norm(), name


def test_parts_of_several_types_make_one_matrix(library: Library) -> None:
    """As Q4_K_M files have them: values in more bits than queries and keys; panels do not end where parts do."""
    torch.manual_seed(3)
    kinds = (Kind.Q4_K, Kind.Q4_0, Kind.Q6_K, Kind.Q8_0, Kind.IQ4_XS, Kind.Q3_K, Kind.Q5_0, Kind.IQ4_NL, Kind.Q2_K)
    sizes = (40, 13, 22, 50, 33, 17, 3, 20, 9)
    parts = [random_rows(num, 256, kind) for kind, num in zip(kinds, sizes, strict=True)]
    x = exact_bytes(7, 256)
    for used in ((0, 1), (1, 3), (2, 3), (0, 1, 2, 3), (0, 2), (4, 7), (4, 2), (5, 1), (1, 6), (5, 8), tuple(range(9))):
        rows = [StoredRows(int(kinds[i]), parts[i]) for i in used]
        linear = quantised(library, rows, 256, torch.float32, None)
        expected = x.double() @ torch.cat([dequantised(parts[i], kinds[i]) for i in used]).T
        if library.isa is Isa.AMX:  # weights are rounded to bfloat16
            assert (linear(x) - expected).norm() < 4e-3 * expected.norm()
            continue
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-6, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind.name if kind else "int8")
def test_a_row_is_one_result(library: Library, kind: Kind | None) -> None:
    """Alone, in a crowd, on one thread or several: the same bits."""
    torch.manual_seed(4)
    x = torch.randn(67, 512).bfloat16()
    if kind is None:
        linear = int8(library, torch.randn(600, 512).bfloat16(), None)
    else:
        rows = [StoredRows(int(kind), random_rows(600, 512, kind))]
        linear = quantised(library, rows, 512, torch.bfloat16, None)
    whole = linear(x)
    for start, stop in ((0, 1), (66, 67), (3, 5), (10, 27), (0, 64)):
        library.use_threads(1 + start % 2)
        assert torch.equal(linear(x[start:stop]), whole[start:stop])


def test_what_is_not_a_number_stays_in_its_row(library: Library) -> None:
    x = torch.randn(5, 96)
    x[1, 40], x[3, 95], x[4] = torch.nan, -torch.inf, 0.0
    weight = torch.randn(40, 96)
    weight[7, 11], weight[8] = torch.nan, 0.0
    y = int8(library, weight, None)(x)
    assert y[:, 7].isnan().all()
    assert not y[[1, 3]].isfinite().any()
    rest = torch.arange(40) != 7
    assert y[[0, 2]][:, rest].isfinite().all()
    assert (y[4, rest] == 0).all()
    assert (y[[0, 2], 8] == 0).all()


def test_the_types_are_the_files() -> None:
    assert {kind for kind in Kind if is_served_quantised([kind])} == set(KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantising_is_ggufs_to_the_bit(kind: Kind, dtype: torch.dtype) -> None:
    """Any bytes are a block, but for scales that are no numbers; MXFP4's 255 is none."""
    library = native()
    if library is None:
        pytest.skip("no native library and no C compiler")
    generator = np.random.default_rng(7)
    rows = random_rows(41, 1024, kind)
    blocks = rows.reshape(41, -1, kind.num_bytes)
    for place in scale_places(kind):
        scales = generator.standard_normal(blocks.shape[:2]) * 10.0 ** generator.integers(-8, 3, blocks.shape[:2])
        put_scales(blocks, kind, place, scales)
    if kind is Kind.MXFP4:
        blocks[..., 0] = generator.integers(0, 251, blocks.shape[:2])  # gguf overflows above
    found = torch.full((41, 1024), torch.nan, dtype=dtype)
    dequantise(library, StoredRows(int(kind), rows), found)
    expected = floats_of(rows, kind).to(dtype)
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(found.view(bits), expected.view(bits))


@pytest.mark.parametrize(
    ("kind", "block", "sixteenths"),
    [
        (
            Kind.Q1_0,
            "00acb8abeeab14cef599cc05",
            "33311131113131313111311111313131331313333111331113131111133113313311331113133333",
        ),
        (
            Kind.Q2_0,
            "00acec83760457a17c472a49ed10c2fa0a67",
            "3010033112023233022223113002023211132132201033231330110011330212",
        ),
    ],
)
def test_types_that_gguf_lacks_are_ggmls(kind: Kind, block: str, sixteenths: str) -> None:
    """What ggml's library (0.25.3) makes of a block, plus two: its scale is -1 / 16."""
    rows = np.zeros((1, kind.num_bytes), np.uint8)
    found = bytes.fromhex(block)
    rows[0, : len(found)] = np.frombuffer(found, np.uint8)
    values = floats_of(rows, kind)[0, : len(sixteenths)] * 16 + 2
    assert "".join(str(round(value)) for value in values.tolist()) == sixteenths


def quantise(tensors: dict[str, tuple[np.ndarray, Kind]], **kinds: Kind) -> dict[str, tuple[np.ndarray, Kind]]:
    """All matrices as Q8_0, but for roles that are named."""
    return {
        name: (values, kinds.get(name.split(".")[-2], Kind.Q8_0) if values.ndim == 2 else kind)
        for name, (values, kind) in tensors.items()
    }


def formats_of(model: Any) -> list[int]:
    attention, mlp = model._layers[0]._mixer, model._layers[0]._feed_forward
    return [linear.args.format for linear in (attention._qkv, attention._o, mlp._gate_up, mlp._down, model._head)]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_file_is_served_as_it_is(is_tied: bool, tmp_path: Path) -> None:
    loaded = native()
    if loaded is None or loaded.isa is Isa.PORTABLE:
        pytest.skip("no native library, or none that is faster with bytes")
    theirs, tensors = tiny(tmp_path / "hf", tie_word_embeddings=is_tied)
    kinds = {"attn_v": Kind.Q5_1, "attn_output": Kind.Q4_0, "ffn_gate": Kind.Q4_1, "ffn_up": Kind.F16}
    path = write(tmp_path / "model.gguf", "llama", theirs.config, quantise(tensors, **kinds))
    plain = load(path, quantization="none")
    assert set(formats_of(plain)) == {WeightFormat.F32}
    expected = logits_of(plain, IDS, [30])
    for settings in ({"dtype": "auto"}, {"quantization": "gguf"}):
        model = load(path, **settings)
        # The values' type needs minimums, which joins queries and keys to it; half of gate and up is not quantised.
        assert formats_of(model) == [
            WeightFormat.Q8_HALF_MIN, WeightFormat.Q4, WeightFormat.F32, WeightFormat.Q8, WeightFormat.Q8,
        ]  # fmt: skip
        found = logits_of(model, IDS, [30])
        assert (found - expected).norm() < 0.05 * expected.norm()
    int8 = load(path, quantization="int8")
    assert set(formats_of(int8)) == {WeightFormat.INT8}
    assert (logits_of(int8, IDS, [30]) - expected).norm() < 0.05 * expected.norm()


# The types of a file, by roles where they differ, as llama-quantize chooses them for IQ2_XS.
MIXED = {"attn_v": Kind.Q4_K, "attn_output": Kind.IQ3_S, "ffn_down": Kind.Q2_K, "token_embd": Kind.Q5_K}


@pytest.mark.parametrize(
    "kind", [*KINDS[KINDS.index(Kind.IQ2_XXS) :], None], ids=lambda kind: kind.name if kind else "mixed"
)
def test_a_file_of_each_type_is_served(kind: Kind | None, tmp_path: Path) -> None:
    loaded = native()
    if loaded is None or loaded.isa is Isa.PORTABLE:
        pytest.skip("no native library, or none that is faster with bytes")
    theirs, tensors = tiny(tmp_path / "hf", hidden_size=256, intermediate_size=256, head_dim=64)
    roles = {name.split(".")[-2]: kind or Kind.IQ2_XS for name in tensors} | ({} if kind else MIXED)
    path = write(tmp_path / "model.gguf", "llama", theirs.config, quantise(tensors, **roles))
    expected = logits_of(load(path, quantization="none"), IDS, [30])
    model = load(path, dtype="auto")
    if kind:
        assert set(formats_of(model)) == {FORMATS[kind][0]}
    assert (logits_of(model, IDS, [30]) - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("kind", [Kind.MXFP4, Kind.Q4_0])
def test_experts_are_served_as_they_are(kind: Kind, tmp_path: Path) -> None:
    """As gpt-oss files have them: stacks in one type, attention in another, biases beside."""
    loaded = native()
    if loaded is None or loaded.isa is Isa.PORTABLE:
        pytest.skip("no native library, or none that is faster with bytes")
    case, names, extra = ARCHITECTURES["gpt-oss"]
    theirs = save_tiny(Case(case.config, case.settings | {"intermediate_size": 32}), tmp_path / "hf")
    tensors = convert(theirs, "gpt-oss", names)
    for name, (values, _) in tensors.items():
        if values.ndim > 1 and not name.endswith("bias") and "gate_inp" not in name:
            tensors[name] = (values, kind if values.ndim == 3 else Kind.Q8_0)
    path = write(tmp_path / "model.gguf", "gpt-oss", theirs.config, tensors, **extra)
    expected = logits_of(load(path, quantization="none"), IDS, [30])
    model = load(path, dtype="auto")
    experts = model._layers[1]._feed_forward
    wanted, _ = FORMATS[kind]
    assert {linear.product.args.format for linear in (*experts.gate_up, *experts.down)} == {wanted}
    found = logits_of(model, IDS, [7, 23])
    # An expert that is nearly as good as another may be chosen instead: most tokens count, not all.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.quantile(0.5) < 0.05


def test_a_named_dtype_or_no_fast_kernels_dequantise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = native()
    if loaded is None or loaded.isa is Isa.PORTABLE:
        pytest.skip("no native library, or none that is faster with bytes")
    theirs, tensors = tiny(tmp_path / "hf")
    path = write(tmp_path / "model.gguf", "llama", theirs.config, quantise(tensors))
    assert set(formats_of(load(path, dtype="float32"))) == {WeightFormat.F32}
    assert WeightFormat.F32 not in formats_of(load(path, dtype="auto"))
    for library in (None, SimpleNamespace(prefers_codes=False)):
        monkeypatch.setattr(load_module, "native", lambda library=library: library)
        assert set(formats_of(load(path, dtype="auto"))) == {WeightFormat.F32}


@pytest.mark.parametrize(
    ("settings", "device", "has_library", "reason"),
    [
        ({"quantization": "gguf", "load_format": "dummy"}, "cpu", True, "do not come from a GGUF file; int8 quantises"),
        ({"quantization": "int8"}, "meta", True, "for a CPU, and the device is meta"),
        ({"quantization": "gguf"}, "cpu", False, "there are no native kernels: --cpu-kernels is off"),
        ({"quantization": "int8", "model_impl": "transformers"}, "cpu", True, "transformers' code runs this model"),
    ],
)
def test_what_cannot_be_quantised_is_said(
    settings: dict[str, str],
    device: str,
    has_library: bool,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs, tensors = tiny(tmp_path / "hf")
    path = write(tmp_path / "model.gguf", "llama", theirs.config, tensors)
    if "model_impl" in settings:
        path = tmp_path / "hf"  # transformers' code reads no GGUF files
    monkeypatch.setattr(load_module, "native", lambda: object() if has_library else None)
    config = EngineConfig(model=str(path), **settings)  # type: ignore[arg-type]  # mixed value types
    with pytest.raises(ConfigError, match=rf"--quantization is '{settings['quantization']}', but .*{reason}"):
        load_model(config, torch.device(device), torch.float32, lambda progress: None)
