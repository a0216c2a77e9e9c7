"""Times the experts of mixtures, and linears of codes, against a copy of the matrices that they read.

Experts are chosen at random, as many as a step of so many tokens chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tools.gpu.figures import Figure
from tools.gpu.task import Task
from tools.gpu.timing import median_s, num_copies


class Mixture(NamedTuple):
    """A layer's experts, and a step of tokens; `kind` is that of the matrices."""

    model: str
    num_experts: int
    num_chosen: int
    hidden: int
    width: int
    kind: str
    num_tokens: int


class Codes(NamedTuple):
    """A matrix of codes, and the rows that it multiplies."""

    outputs: int
    inputs: int
    kind: str
    num_rows: int


_QWEN, _GPT_OSS = ("Qwen3-30B-A3B", 128, 8, 2048, 768), ("gpt-oss-20b", 32, 4, 2880, 2880)
MIXTURES: Sequence[Mixture] = (
    *(Mixture(*_QWEN, "float", num) for num in (1, 8, 64, 256, 8192)),
    *(Mixture(*_QWEN, kind, num) for kind in ("fp8", "int4") for num in (1, 64)),
    *(Mixture(*_GPT_OSS, "mxfp4", num) for num in (1, 8, 64, 256, 8192)),
)
CODES: Sequence[Codes] = (
    *(Codes(28_672, 4096, kind, num) for kind in ("int4", "int8", "fp8", "mxfp4") for num in (1, 32)),
    *(Codes(28_672, 4096, "int4", num) for num in (128, 129, 1024)),
    Codes(4096, 4096, "int4", 1),
)
TINY = (Mixture("tiny", 4, 2, 64, 32, "mxfp4", 3), Mixture("tiny", 4, 2, 64, 32, "float", 1))
TINY_CODES = (Codes(32, 64, "int4", 2),)


def time_mixture(task: Task, device: torch.device, case: Mixture) -> None:
    """Measure routing, sorting, both products and the sum."""
    from engine.runtime.activation import Activation
    from engine.runtime.cuda.routing import route
    from engine.runtime.layers.mixture_cuda import CudaExperts
    from engine.runtime.routing import RouterConfig

    config = RouterConfig(num_experts=case.num_experts, num_chosen=case.num_chosen, is_normalised=True)
    shapes = ((2 * case.width, case.hidden), (case.hidden, case.width))
    x = torch.randn(case.num_tokens, case.hidden, dtype=torch.bfloat16, device=device)
    logits = torch.randn(case.num_tokens, case.num_experts, device=device)
    num_read = len(set(route(logits, None, config)[1].flatten().tolist()))
    size = sum(_bytes(case.kind, outputs, inputs) for outputs, inputs in shapes)
    copies = min(4, num_copies(size * num_read))
    gate_up, down = ([_rows(case.kind, *shape, device, case.num_experts) for _ in range(copies)] for shape in shapes)
    layers = [CudaExperts(first, second, Activation.SILU) for first, second in zip(gate_up, down, strict=True)]

    def call(layer: CudaExperts) -> Tensor:
        return layer(x, *route(logits, None, config))

    name = f"experts, {case.model} in {case.kind}, {case.num_tokens} tokens"
    _report(task, name, size * num_read, median_s([partial(call, layer) for layer in layers]), call(layers[0]))


def time_codes(task: Task, device: torch.device, case: Codes) -> None:
    """Measure a product; above 128 rows the matrix is decoded to memory before."""
    from engine.runtime.cuda.packed_linear import PackedProduct

    size = _bytes(case.kind, case.outputs, case.inputs)
    x = torch.randn(case.num_rows, case.inputs, dtype=torch.bfloat16, device=device)
    made = [PackedProduct(_rows(case.kind, case.outputs, case.inputs, device)) for _ in range(num_copies(size))]
    name = f"linear {case.outputs} x {case.inputs} in {case.kind}, {case.num_rows} rows"
    _report(task, name, size, median_s([partial(product, x) for product in made]), made[0](x))


def _report(task: Task, name: str, num_bytes: int, seconds: float, out: Tensor) -> None:
    if not bool(out.isfinite().all()):
        raise RuntimeError("the result is not finite")
    task.notebook.detail(name, {"microseconds": seconds * 1e6, "bytes": num_bytes})
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.figure(Figure(name, num_bytes / seconds / 1e9, "GB/s", limit))


def _bytes(kind: str, outputs: int, inputs: int) -> int:
    """Return the bytes of a matrix with its scales and zeros."""
    scales = {"float": 0, "fp8": 4 * outputs, "mxfp4": outputs * inputs // 32}.get(kind, 3 * outputs * inputs // 32)
    return int(outputs * inputs * {"float": 2, "int4": 0.5, "mxfp4": 0.5}.get(kind, 1)) + scales


def _rows(kind: str, outputs: int, inputs: int, device: torch.device, *experts: int):  # type: ignore[no-untyped-def]  # Rows imports Triton
    """Return random rows; codes have groups of 32 inputs, and FP8 a scale a row."""
    from engine.runtime.cuda.packed import Rows

    shape = (*experts, outputs)
    if kind == "float":
        return Rows(torch.randn(*shape, inputs, dtype=torch.bfloat16, device=device) / 32)
    width, group = inputs // 2 if kind in ("int4", "mxfp4") else inputs, inputs if kind == "fp8" else 32
    numbers = torch.randint(0, 120, (*shape, width), dtype=torch.uint8, device=device)  # no NaN of FP8
    scales = torch.full((*shape, inputs // group), 1 / 256, dtype=torch.float32, device=device)
    if kind == "fp8":
        return Rows(numbers.view(torch.float8_e4m3fn), None, kind, scales, None, group)
    if kind == "mxfp4":
        return Rows(numbers, None, kind, torch.full_like(scales, 120, dtype=torch.uint8), None, group)
    return Rows(numbers, None, kind, scales.half(), torch.full_like(scales, 8, dtype=torch.uint8), group)
