"""The library on processors that this machine is not, under qemu's or as other instructions for the same operations."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from engine.runtime.models.load import load_model
from engine.runtime.native import build, library
from engine.runtime.native.build import Isa
from engine.runtime.native.library import native
from engine.runtime.native.rows import StoredRows
from engine.settings.engine_config import EngineConfig
from tests.cpu.model_driver import make_runner, request, serve, settings, state_blocks
from tests.cpu.native_linears import int8, packed, quantised
from tests.cpu.recorded import DRIVER, Recording
from tests.cpu.test_models_families import CASES, write_tiny
from tests.cpu.test_quant import KINDS, random_rows

ARM = ("aarch64-linux-gnu-gcc", "qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")  # where Debian has its C library
X86 = ("cc", "qemu-x86_64")
PROCESSORS = [
    (ARM, "cortex-a53", Isa.PORTABLE),
    (ARM, "cortex-a72", Isa.PORTABLE),
    (ARM, "neoverse-n1", Isa.NEON_DOT),
    (ARM, "max", Isa.NEON_BF16),
    (X86, "Nehalem", Isa.PORTABLE),
    (X86, "max,-avx2", Isa.PORTABLE),
    (X86, "max,-fma", Isa.PORTABLE),
    (X86, "max,-f16c", Isa.PORTABLE),
    (X86, "max", Isa.AVX2),
    (X86, "Cooperlake", Isa.AVX2),  # qemu masks AVX-512, as a hypervisor may
]
# Of each kind of part: attention with windows and sinks, mixtures, latents, the three recurrences.
ATTENDING = ("gemma3n", "gpt-oss", "deepseek_v3")
MODELS = (*ATTENDING, "qwen3_5", "granitemoehybrid-mamba", "lfm2")
FLOATS = {torch.float32: 2e-4, torch.bfloat16: 0.06}
FUSED = "kernels_products.c"  # whose bits with integer formats are this machine's only if they are fused alike

Machine = list[tuple[list[str], str]]  # the driver with a library, and the instruction set of each


@contextmanager
def quick_flags(apart: str) -> Iterator[pytest.MonkeyPatch]:
    """Compile all but one file with -Og: in half the time, for sums that are not fused. All get registers by a quick rule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-Og", "-fira-algorithm=priority", "-fira-region=one"))
        patch.setattr(build, "_QUICK_FILES", (apart,))
        patch.setattr(build, "source_digest", build.source_digest.__wrapped__)
        yield patch


def programs(tools: Sequence[str], processor: str, folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Compile libraries for a processor, once; return the driver's command for each."""
    compiler, qemu = shutil.which(tools[0]), shutil.which(tools[1])
    if compiler is None or qemu is None:
        pytest.skip(f"needs {tools[0]} and {tools[1]} (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)")
    driver = folder / f"replay-{tools[0]}"
    machine = "aarch64" if tools is ARM else "x86_64"
    with quick_flags(FUSED) if tools is ARM else nullcontext():
        libraries = build.compile_libraries(compiler, names, machine=machine)
    build._run(compiler, "-o", str(driver), str(DRIVER))
    return [[qemu, *tools[2:], "-cpu", processor, str(driver), str(library)] for library in libraries]


def vnni_of_avx512(folder: Path) -> list[str]:
    """AVX-VNNI's kernels with AVX-512's form of the same instruction."""
    compiler = build.find_compiler()
    if compiler is None or Isa.AVX512VNNI not in build.machine_isas():
        pytest.skip("needs a compiler and a machine with AVX512-VNNI")
    if Isa.AVXVNNI in build.machine_isas():
        pytest.skip("this machine has AVX-VNNI itself, with which the other tests run")
    options = f"{build._AVX2} -mavx512vnni -mavx512vl -DREGISTER_BYTES=32"
    with quick_flags(FUSED) as patch:
        patch.setattr(build, "_OPTIONS", {"x86_64": {"avxvnni": options}})
        [library] = build.compile_libraries(compiler, ["avxvnni"])
    build._run(compiler, "-o", str(folder / "replay"), str(DRIVER))
    return [str(folder / "replay"), str(library)]


@pytest.fixture(scope="module", params=["arm", "avx2", "avxvnni"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine's commands. The second has no AVX-512, and would end the process there."""
    folder = tmp_path_factory.mktemp("machine")
    if request.param == "avxvnni":
        return [(vnni_of_avx512(folder), "avxvnni")]
    tools, names = (X86, ["avx2"]) if request.param == "avx2" else (ARM, ["portable", "neon_dot", "neon_bf16"])
    return list(zip(programs(tools, "max", folder, names), names, strict=True))


@pytest.fixture
def recording() -> Recording:
    """Records calls of this machine's library."""
    library = native()
    if library is None or library.isa == Isa.PORTABLE:
        pytest.skip("no native library here, or one whose products round twice")
    return Recording(library)


@pytest.fixture(scope="module")
def recorded() -> dict[tuple[torch.dtype, bool], Recording]:
    """What models compute here, by type: recorded for the first machine, and replayed on all."""
    return {}


@pytest.mark.parametrize(("tools", "processor", "best"), PROCESSORS)
def test_a_processor_gets_its_best(tools: Sequence[str], processor: str, best: Isa, tmp_path: Path) -> None:
    [command] = programs(tools, processor, tmp_path, [build.CHOOSER])
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout.split()[-1]) == best


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_integer_formats_have_the_same_bits(machine: Machine, dtype: torch.dtype, tmp_path: Path) -> None:
    """As without AMX, whose inputs have 16 bits."""
    torch.manual_seed(0)
    best = [isa for isa in build.machine_isas() if isa is not Isa.AMX][-1:]
    if best in ([], [Isa.PORTABLE]) or (ours := library._load(best[0])) is None:
        pytest.skip("no native library here, or one whose products round twice")
    linears = [quantised(ours, [StoredRows(int(kind), random_rows(70, 512, kind))], 512, dtype) for kind in KINDS]
    linears.append(int8(ours, torch.randn(70, 512).to(dtype)))
    recording = Recording(ours)
    with recording():
        for linear in linears:
            for num_rows in (1, 2, 3, 4, 11):
                linear(torch.randn(num_rows, 512).to(dtype), torch.float32)
    for command, isa in machine:
        found = recording.replay(command, tmp_path / "image")
        for expected, theirs in zip(recording.results, found, strict=True):
            assert torch.equal(expected, theirs), isa


@pytest.mark.parametrize("dtype", list(FLOATS))
def test_products_of_floats_differ_by_rounding(
    machine: Machine, recording: Recording, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    linear = packed(recording.library, torch.randn(70, 384).to(dtype) / 20)
    with recording():
        for num_rows in (1, 5, 30):
            linear(torch.randn(num_rows, 384).to(dtype), torch.float32)
    for command, _ in machine:
        found = recording.replay(command, tmp_path / "image")
        torch.testing.assert_close(found, recording.results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", list(FLOATS))
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
def test_models_differ_by_rounding(
    machine: Machine,
    recording: Recording,
    recorded: dict[tuple[torch.dtype, bool], Recording],
    dtype: torch.dtype,
    is_int8: bool,
    tmp_path: Path,
) -> None:
    """Steps with prompts, chunks and decoding, each from the pool that it had here.

    The portable kernels are one source on all machines: of them the plainest kind suffices, which takes half of the time.
    """
    if (dtype, is_int8) not in recorded:
        record_models(recording, dtype, tmp_path, is_int8=is_int8)
        recorded[dtype, is_int8] = recording
    known = recorded[dtype, is_int8]
    is_plainest = dtype is torch.float32 and not is_int8
    for command in (command for command, isa in machine if isa != "portable" or is_plainest):
        found = known.replay(command, tmp_path / "image")
        for ours, theirs in zip(known.results, found, strict=True):
            torch.testing.assert_close(theirs, ours, atol=FLOATS[dtype], rtol=FLOATS[dtype])


@pytest.fixture(scope="module")
def portable_bits(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What models compute here with --portable-bits."""
    isa = build.best_isa()
    if isa is None:
        pytest.skip("no native library here")
    path = portable_libraries([isa.name.lower(), *least_isas()])[0]  # what they share is compiled once
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(library._loaded, (isa, True), library.Library(str(path), isa, is_portable=True))
        library.choose_kernels("auto", is_portable=True)
        recording = Recording(native())
        folder = tmp_path_factory.mktemp("portable")
        record_models(recording, torch.float32, folder / "floats", is_int8=False)
        record_models(recording, torch.float32, folder / "codes", is_int8=True, quantization="int8")
        library.choose_kernels("auto")
    return recording


def least_isas() -> list[str]:
    return [isa.name.lower() for isa in build.machine_isas() if isa in (Isa.PORTABLE, Isa.AVX2, Isa.NEON_DOT)]


def portable_libraries(
    isas: Sequence[str], compiler: str | None = None, machine: str = platform.machine()
) -> list[Path]:
    with quick_flags("kernels_rows.c"):  # which take twice as long with -Og, in vectors wider than registers
        names = [isa + build.PORTABLE_BITS for isa in isas]
        return build.compile_libraries(compiler or build.find_compiler() or "cc", names, machine=machine)


@pytest.mark.parametrize("kind", ["here", "arm"])
def test_portable_bits_are_the_same_on_every_machine(portable_bits: Recording, kind: str, tmp_path: Path) -> None:
    """All kinds of layers, with floats, and with bytes over a pool of bytes: the least instruction set and a middle one, and NEON under qemu."""
    if kind == "here":
        prefix, tools, machine = [str(tmp_path / "replay")], "cc", platform.machine()
        isas = least_isas()
        build._run(build.find_compiler() or "cc", "-o", prefix[0], str(DRIVER))
    else:
        [[*prefix, _]] = programs(ARM, "max", tmp_path, [build.CHOOSER])
        tools, machine, isas = ARM[0], "aarch64", ["neon_bf16"]
    compiler = shutil.which(tools)
    for isa, path in zip(isas, portable_libraries(isas, compiler, machine), strict=True):
        found = portable_bits.replay([*prefix, str(path)], tmp_path / "image")
        for ours, theirs in zip(portable_bits.results, found, strict=True):
            assert torch.equal(ours, theirs), isa


def record_models(
    recording: Recording, dtype: torch.dtype, path: Path, *, is_int8: bool, quantization: str = "auto"
) -> None:
    for name in ATTENDING if is_int8 else MODELS:
        folder = path / name
        write_tiny(CASES[name], folder)
        model = load_model(
            EngineConfig(model=str(folder), quantization=quantization),
            torch.device("cpu"),
            dtype,
            lambda progress: None,
        )
        size = state_blocks(model, 16)
        config = settings(num_blocks=20 + 4 * size, max_num_batched_tokens=25, block_size=16, state_blocks=size)
        runner = make_runner(model, config, kv_dtype=torch.int8 if is_int8 else None)
        # With logprobs no step is plain: each is a forward pass and a head, which are recorded.
        asked = [request(f"r{num}", range(3, 3 + num), max_tokens=3, logprobs=1) for num in (30, 1, 17)]
        with recording(runner):
            serve(model, config, asked, apart=1, runner=runner)
