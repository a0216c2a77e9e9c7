"""Products on tiles of AMX: the order of their sums, and hardware beside the model that stands in for it (tile_model.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from platform import machine as machine_kind

import pytest
import torch
from test_attention import empty_pools, make_batch, make_tables
from torch import Tensor

from engine.core.errors import ConfigError
from engine.runtime.attention.cpu_native import CpuNativeAttention
from engine.runtime.execution.device import load_kernels
from engine.runtime.kv_layout import AttentionSpec
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_model
from engine.runtime.native import build, library, tiles
from engine.runtime.native.build import Isa, best_isa, machine_isas
from engine.runtime.native.library import DTYPES, GemmArgs, Library, LinearArgs, WeightFormat, choose_kernels, native
from engine.runtime.native.ops import FLOAT_FORMATS, NativeLinear
from engine.runtime.native.tiles import sum_as_tiles
from engine.settings.engine_config import EngineConfig
from engine.system.host_limits import processor_name
from tests.cpu import test_models_families as families
from tests.cpu.native_linears import int8, packed
from tests.cpu.test_native_decoder import run
from tests.cpu.tile_model import tile_model, tiles_in_use, trapped_tiles

LEAST = 2.0**-126  # the least normal float32; what is smaller is 0 on tiles
UNPACKED = [each for each in WeightFormat if each not in (*FLOAT_FORMATS.values(), WeightFormat.INT8)]


def random_weights(
    kernels: Library, weight_format: WeightFormat, num_outputs: int, num_inputs: int
) -> tuple[Tensor, Tensor]:
    """Return packed codes whose scales are finite, and the scales of rows."""
    random, num_bytes = torch.Generator().manual_seed(0), kernels.quant_bytes(weight_format, num_outputs, num_inputs)
    packed = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=random) & 0x3B
    return packed, torch.ones(num_outputs)


def product(kernels: Library, weight_format: WeightFormat, x: Tensor, num_outputs: int) -> Tensor:
    """Return x times random weights of a format."""
    weights, scales = random_weights(kernels, weight_format, num_outputs, x.shape[1])
    if weight_format is WeightFormat.BF16:
        weights = torch.randn(len(weights), generator=torch.Generator().manual_seed(1)).bfloat16()
    addresses, y = (weights.data_ptr(), scales.data_ptr(), None), torch.empty(len(x), num_outputs)
    linear = LinearArgs(*addresses, num_outputs, x.shape[1], weight_format, DTYPES[x.dtype], 0)
    kernels.gemm(GemmArgs(linear, x.data_ptr(), None, y.data_ptr(), *x.shape, num_outputs))
    return y


@pytest.mark.parametrize("num_inputs", [2, 30, 32, 64, 70, 1408])
def test_sums_have_the_documented_order(num_inputs: int) -> None:
    torch.manual_seed(num_inputs)
    x, weight = torch.randn(40, num_inputs).bfloat16(), torch.randn(70, num_inputs).bfloat16()
    x[3, :2], weight[5, 1] = LEAST / 8, LEAST / 2
    expected = sum_as_tiles(x, weight)
    linear = packed(tile_model(), weight)
    assert torch.equal(linear(x, torch.float32), expected)
    for num_rows in (1, 15, 16, 17, 33):
        assert torch.equal(linear(x[:num_rows], torch.float32), expected[:num_rows])


@pytest.mark.parametrize("num_inputs", [2, 32, 70, 2720])
def test_inputs_of_int8_have_16_bits(num_inputs: int) -> None:
    """Of the largest in their row, which other formats divide into blocks of 8 bits; and a row is the same bits alone."""
    torch.manual_seed(num_inputs)
    linear, x = int8(tile_model(), torch.randn(70, num_inputs)), torch.randn(49, num_inputs)
    x[3, 1] = 1_000
    codes = linear(torch.eye(num_inputs)).T.double()
    found = linear(x)
    step = x.abs().amax(1, keepdim=True).double() / (127 << 8)
    most = step / 2 * codes.abs().sum(1) + 1e-6 * (x.double().abs() @ codes.T.abs())
    assert ((found - x.double() @ codes.T).abs() <= most).all()
    for num_rows in (1, 2, 8, 9, 16, 17, 33):
        assert torch.equal(linear(x[:num_rows]), found[:num_rows])


def test_sums_of_int8_stay_within_32_bits() -> None:
    weight = torch.ones(40, 1 << 16) * torch.tensor([1, -1, 0.5, 1])[torch.arange(40) % 4, None]
    x = torch.ones(3, 1 << 16) * torch.tensor([1, -1, 1])[:, None]
    expected = (x[:, :1] @ weight[:, :1].T * (1 << 16)).double()
    for rows in (x, x[:1]):
        found = int8(tile_model(), weight)(rows)
        assert ((found - expected[: len(rows)]).abs() <= 0.005 * 65536).all()


@pytest.mark.parametrize("linear_of", [packed, int8])
def test_what_is_not_finite_stays_in_its_row(linear_of: Callable[[Library, Tensor], NativeLinear]) -> None:
    torch.manual_seed(0)
    linear, x = linear_of(tile_model(), torch.randn(70, 96).bfloat16()), torch.randn(20, 96).bfloat16()
    expected = linear(x)
    x[4, 7], x[11, 90] = torch.nan, torch.inf
    found = linear(x)
    others = [row for row in range(20) if row not in (4, 11)]
    assert not found[[4, 11]].isfinite().any()
    assert torch.equal(found[others], expected[others])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """The code that a machine with tiles runs: on one, or with a handler of the traps that its instructions are elsewhere."""
    if Isa.AMX in machine_isas():
        with tiles_in_use() as found:
            yield found
    else:
        found, traps = trapped_tiles(tmp_path_factory.mktemp("traps"))
        yield found
        assert traps.num_threads_with_tiles() == 0  # each call gives back what it took


@pytest.fixture
def both(machine: Library) -> tuple[Library, Library]:
    """The same beside the model."""
    return machine, tile_model()


@pytest.mark.parametrize("num_rows", [1, 16, 33])
def test_the_machine_multiplies_as_the_model_does(both: tuple[Library, Library], num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight = torch.randn(70, 700).bfloat16()
    x = (torch.randn(num_rows, 700) * 10.0 ** torch.randint(-39, 30, (1, 700))).bfloat16()
    real, model = (packed(each, weight)(x, torch.float32) for each in both)
    assert real.isfinite().all()
    assert torch.equal(real, model)
    for kernels in both:  # a row alone goes by vectors
        assert torch.equal(packed(kernels, weight)(x[-1:], torch.float32), real[-1:])


@pytest.mark.parametrize("weight_format", UNPACKED, ids=lambda each: each.name)
def test_the_machine_multiplies_each_format_as_the_model_does(
    both: tuple[Library, Library], weight_format: WeightFormat
) -> None:
    """For a panel, a tile of rows and SUPER blocks, and a little more of each; and as tiles sum the weights that codes stand for."""
    x = torch.randn(17, 272, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, model = (product(kernels, weight_format, x, 40) for kernels in both)
    assert found.isfinite().all()
    assert torch.equal(found, model)
    weights = product(tile_model(), weight_format, torch.eye(272).bfloat16(), 40).T
    assert torch.equal(found, sum_as_tiles(x, weights))


@pytest.mark.parametrize("weight_format", UNPACKED, ids=lambda each: each.name)
def test_codes_are_unpacked_to_bfloat16(weight_format: WeightFormat) -> None:
    """To one of the two nearest numbers, with no error on average; and to the number itself where that is one of bfloat16."""
    model, exact = tile_model(), library._load(Isa.AVX512)
    assert exact is not None
    found, expected = (product(each, weight_format, torch.eye(544).bfloat16(), 70) for each in (model, exact))
    assert torch.equal(found, found.bfloat16().float())
    largest = expected.abs().unflatten(0, (34, 16)).amax(1).repeat_interleave(16, 0)  # of the inputs that share a scale
    assert ((found - expected).abs() <= expected.abs() * 2**-7.6 + largest * 2**-14 + LEAST).all()
    is_plain = expected.abs() > (largest / 32).clamp(LEAST)
    same = expected == expected.bfloat16().float()
    assert torch.equal(found[same & is_plain], expected[same & is_plain])
    error = (found / expected - 1)[is_plain & ~same]
    assert len(error) == 0 or error.mean().abs() <= 1.5e-3  # it would be -2.8e-3 without the 1 / 355


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inputs_of_other_types_are_rounded(dtype: torch.dtype) -> None:
    x = torch.randn(5, 272, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = (product(tile_model(), WeightFormat.Q4_SUPER, rows, 40) for rows in (x, x.bfloat16()))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("num_rows", "num_inputs"), [(300, 2720), (530, 288)])
@pytest.mark.parametrize("weight_format", [WeightFormat.BF16, WeightFormat.INT8, WeightFormat.Q4_SUPER])
def test_rows_have_the_same_bits_in_any_block(weight_format: WeightFormat, num_rows: int, num_inputs: int) -> None:
    """Of more rows than the second cache keeps, slices of several panels follow each other; 530 rows are two blocks."""
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = product(tile_model(), weight_format, x, 330)
    assert whole.isfinite().all()
    for row in (0, 17, 264, 265, num_rows - 1):  # alone they are whole panels
        assert torch.equal(product(tile_model(), weight_format, x[row : row + 1], 330)[0], whole[row])
    for num in (2, 40):
        assert torch.equal(product(tile_model(), weight_format, x[:num], 330), whole[:num])


@pytest.mark.parametrize("head_dim", [64, 72, 80, 112])
def test_the_machine_attends_as_the_model_does(both: tuple[Library, Library], head_dim: int) -> None:
    """Prompts and decode steps, on several threads, each of which shapes its tiles."""
    torch.manual_seed(head_dim)
    spec, steps = AttentionSpec(6, 2, head_dim, 0.2), [(0, 19), (0, 70), (0, 1)]
    tables, total = make_tables(steps, 16, is_scattered=True), sum(num for _, num in steps)
    q, k, v = (torch.randn(total, heads, head_dim).bfloat16() for heads in (6, 2, 2))
    outputs = []
    for kernels in both:
        kernels.use_threads(3)
        backend = CpuNativeAttention()
        backend._library = kernels
        pools = empty_pools(backend, spec, 96, 16, torch.bfloat16)
        backend.prepare(make_batch(steps, tables, 16))
        outputs.append(backend.attend(spec, q, k, v, *pools))
        kernels.use_threads(1)
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["llama", "gemma3n", "deepseek_v3", "gpt-oss", "qwen2-moe"])
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_the_machine_steps_as_the_model_does(
    both: tuple[Library, Library], name: str, quantization: str, tmp_path: Path
) -> None:
    """Whole steps of prompts and decoding on several threads, what they leave in the pool, and the head."""
    families.write_tiny(families.CASES[name], tmp_path)
    config, results = EngineConfig(model=str(tmp_path), quantization=quantization), []
    for kernels in both:
        with tiles_in_use(kernels):
            kernels.use_threads(3)
            model = load_model(config, torch.device("cpu"), torch.bfloat16, lambda _: None)
            assert isinstance(model, Decoder)
            assert model._native is not None
            steps = run(model, in_one_call=True, rows=None)
            results.append([*steps, model.logits(steps[0])])
            kernels.use_threads(1)
    assert results[0][-1].isfinite().all()
    assert all(map(torch.equal, *results))


@pytest.fixture
def with_tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Library]:
    """A machine whose tiles are the model's, and nothing is known about them."""
    isas = (*(isa for isa in machine_isas() if isa is not Isa.AMX), Isa.AMX)
    if native() is None:
        pytest.skip("no native library and no C compiler")
    for module in (build, library, tiles):
        monkeypatch.setattr(module, "machine_isas", lambda: isas)
    monkeypatch.setitem(library._loaded, (Isa.AMX, False), tile_model())
    monkeypatch.setattr(tiles, "tile_file", lambda: tmp_path / "tiles.json")
    monkeypatch.setitem(build.tile_facts(), processor_name(), [])
    del build.tile_facts()[processor_name()]
    choose_kernels("auto")
    fast = native()
    assert fast is not None
    yield fast
    monkeypatch.undo()
    choose_kernels("auto")


def test_tiles_that_sum_in_another_order_are_left_alone(
    with_tiles: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiles, "sum_as_tiles", lambda x, weight: x.float() @ weight.float().T)
    load_kernels("auto", lambda _: None)
    assert native() is with_tiles
    assert not caplog.text
    for _ in range(2):  # also where it is known
        caplog.clear()
        load_kernels("amx", lambda _: None)
        assert native() is tile_model()
        assert "AMX is of no use here" in caplog.text
    assert json.loads((tmp_path / "tiles.json").read_text()) == {processor_name(): False}


def test_tiles_that_sum_as_expected_are_taken(with_tiles: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_isa() is not Isa.AMX  # which no start has proved
    load_kernels("auto", lambda _: None)
    assert native() is tile_model()
    monkeypatch.setattr(tiles, "has_order", lambda _: pytest.fail("it is known"))
    load_kernels("amx", lambda _: None)


def test_an_order_of_sums_that_is_not_expected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs are summed in another one, so what names K/V has the instruction set in it."""
    assert tiles.has_order(tile_model())
    if (other := native()) is not None and other.isa is not Isa.AMX:
        assert not tiles.has_order(other)


@pytest.mark.parametrize("compiler", build._COMPILERS)
def test_each_compiler_knows_that_there_are_tiles(compiler: str) -> None:
    if shutil.which(compiler) is None or machine_kind() != "x86_64":
        pytest.skip(f"needs {compiler} for x86")
    options = build._OPTIONS["x86_64"]["amx"].split()
    command = (compiler, *options, "-dM", "-E", str(build._HERE / "vec.h"))
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "#define TILES " in macros


def test_tiles_are_refused_where_there_are_none() -> None:
    if Isa.AMX in machine_isas():
        pytest.skip("needs a machine without AMX")
    with pytest.raises(ConfigError, match=r"has no AMX|there are no native kernels"):
        choose_kernels("amx")
