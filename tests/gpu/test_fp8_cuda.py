"""fp8 on a CUDA device: K and V in it say what the reference says over the same numbers, and products keep their digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from tests.cpu.test_models_families import CASES, ON_A_GPU, write_tiny
from tests.gpu.test_engine_cuda import answers, build
from tests.reference_attention import reference_attention


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


pytestmark = pytest.mark.gpu
needs_kv = pytest.mark.skipif(capability() < (8, 9), reason="no CUDA device of compute capability 8.9 here")
needs_products = pytest.mark.skipif(capability() < (9, 0), reason="no CUDA device of compute capability 9.0 here")


@needs_kv
@pytest.mark.parametrize("depth", [False, True], ids=["depth0", "depth1"])
@pytest.mark.parametrize("name", [name for name in ON_A_GPU if name != "deepseek_v3"])  # latents are not stored in fp8
def test_fp8_kv_says_what_the_reference_says_over_it(name: str, depth: bool, tmp_path: Path) -> None:
    write_tiny(CASES[name], tmp_path)
    with reference_attention():
        expected = answers(build(tmp_path, "cuda", attention_backend="torch", kv_cache_dtype="fp8"))
    assert answers(build(tmp_path, "cuda", async_scheduling=depth, kv_cache_dtype="fp8")) == expected


@needs_kv
def test_preempted_requests_say_the_same_over_fp8_kv(tmp_path: Path) -> None:
    write_tiny(CASES["qwen3"], tmp_path)
    expected = answers(build(tmp_path, "cuda", kv_cache_dtype="fp8"))
    crowded = build(tmp_path, "cuda", kv_cache_dtype="fp8", block_size=4, kv_cache_memory_bytes=32 << 10)
    assert answers(crowded) == expected
    assert crowded.stats.preemptions > 0


@needs_kv
def test_fp8_kv_holds_more_blocks_in_the_same_memory(tmp_path: Path) -> None:
    write_tiny(CASES["qwen3"], tmp_path)
    auto, fp8 = (build(tmp_path, "cuda", kv_cache_dtype=kind).config.num_blocks for kind in ("auto", "fp8"))
    assert 2.5 < fp8 / auto < 4.0  # of float32


@needs_products
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 4096), (4096, 6144), (14_336, 4096)])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 256, 2048])
def test_products_of_a_real_size(num_rows: int, inputs: int, outputs: int) -> None:
    """Sums of thousands of terms in the tensor cores' fast way lose no more than the rounding to fp8 does."""
    from engine.runtime.cuda.fp8_linear import Fp8Linear

    weight = torch.randn(outputs, inputs, device="cuda").bfloat16() * 0.02
    x = torch.randn(num_rows, inputs, device="cuda").bfloat16() * torch.randn(num_rows, 1, device="cuda").exp()
    linear = Fp8Linear(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="cuda"), None)
    linear.load(0, outputs, lambda rows: rows.copy_(weight))
    exact = F.linear(x.double(), weight.double())
    assert ((linear(x).double() - exact).norm(dim=1) <= 0.05 * exact.norm(dim=1)).all()


@needs_products
def test_a_product_can_be_captured() -> None:
    from engine.runtime.cuda.fp8_linear import Fp8Linear

    linear = Fp8Linear(torch.empty(256, 128, dtype=torch.float8_e4m3fn, device="cuda"), None)
    linear.load(0, 256, lambda rows: rows.normal_())
    x = torch.randn(8, 128, device="cuda").bfloat16()
    linear(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x)
    x.normal_()
    graph.replay()
    assert torch.equal(y, linear(x))
