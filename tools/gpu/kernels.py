"""Measures each CUDA kernel alone, beside the copies and products of the GPU.

Each number that must be read or written counts once, so a share compares a kernel with a copy of the same data. Tests
check the results; here they must only be finite.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from tools.gpu.attention import (
    DECODES,
    LATENTS,
    PREFILLS,
    Decode,
    Latents,
    Prefill,
    time_decode,
    time_latents,
    time_prefill,
)
from tools.gpu.figures import Figure
from tools.gpu.mixtures import CODES, MIXTURES, TINY, TINY_CODES, time_codes, time_mixture
from tools.gpu.recurrences import RECURRENCES, TINY_RECURRENCES, time_recurrence
from tools.gpu.task import Task
from tools.gpu.timing import median_s, num_copies

_ROWS = (256, 8192)  # of a decode step and of a step of prompts


def run(task: Task) -> None:
    """Time all kernels; one that fails does not stop the others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # Triton's interpreter, corrected as in the tests of the kernels, before anything imports Triton.
        importlib.import_module("tests.conftest")
        importlib.import_module("tests.kernels.conftest")
    for call in _calls(task, device):
        try:
            with torch.inference_mode():
                call()
        except Exception as error:  # a kernel that does not compile, an interface that has changed
            arguments = " ".join(str(argument) for argument in call.args[2:])
            message = " ".join(str(error).split())[:300]
            task.notebook.fail(f"{call.func.__name__} {arguments}: {type(error).__name__}: {message}")
            if isinstance(error, torch.AcceleratorError):
                raise  # the device's context is lost, so everything after it would fail
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _calls(task: Task, device: torch.device) -> list[partial[None]]:
    decodes: Sequence[Decode] = DECODES
    prefills: Sequence[Prefill] = PREFILLS
    rows: Sequence[int] = _ROWS
    latents: Sequence[Latents] = LATENTS
    formats = (False, True) if device.type == "cuda" else (False,)
    if task.is_rehearsal:
        decodes = [Decode(4, 2, 40, kv) for kv in ("", "int8", "fp8")]
        prefills, rows, latents = (Prefill(4, 2, 24),), (3,), (Latents(4, 2, 40), Latents(4, 1, 24, is_prompt=True))
    return [
        *(partial(time_decode, task, device, case) for case in decodes),
        *(partial(time_prefill, task, device, case) for case in prefills),
        *(partial(time_latents, task, device, case) for case in latents),
        *(partial(time_mixture, task, device, case) for case in (TINY if task.is_rehearsal else MIXTURES)),
        *(partial(time_codes, task, device, case) for case in (TINY_CODES if task.is_rehearsal else CODES)),
        *(
            partial(time_recurrence, task, device, case)
            for case in (TINY_RECURRENCES if task.is_rehearsal else RECURRENCES)
        ),
        *(partial(kind, task, device, num) for kind in (_time_norm, _time_rotation, _time_activation) for num in rows),
        *(partial(_time_sampling, task, device, rows[0], is_ranking) for is_ranking in (False, True)),
        *(partial(_time_product, task, device, num, is_fp8) for is_fp8 in formats for num in (1, 32, 256)),
    ]


def _report(task: Task, name: str, num_bytes: int, make: Callable[[], Callable[[], Tensor]]) -> None:
    """Time calls that `make` returns, against a copy of the same bytes."""
    calls = _calls_of(num_bytes, make)
    seconds = median_s(calls)
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.detail(name, {"microseconds": seconds * 1e6, "bytes": num_bytes})
    task.notebook.figure(Figure(name, num_bytes / seconds / 1e9, "GB/s", limit))


def _calls_of(num_bytes: int, make: Callable[[], Callable[[], Tensor]]) -> list[Callable[[], Tensor]]:
    """Return calls whose data exceed the caches. Raises RuntimeError."""
    calls = [make() for _ in range(num_copies(num_bytes))]
    if not bool(calls[0]().isfinite().all()):
        raise RuntimeError("the result is not finite")
    return calls


def _time_norm(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.cuda.norm import add_rms_norm

    width = task.shape("llama-3.1-8b").hidden
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)

    def make() -> Callable[[], Tensor]:
        stream = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
        return partial(add_rms_norm, stream, torch.zeros_like(stream), weight, 1e-5)

    # It reads the stream and an addend, and writes the stream and the result.
    _report(task, f"residual and norm, {num_rows} rows", 4 * 2 * num_rows * width, make)


def _time_rotation(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.cuda.rope_store import rotate_and_store
    from engine.runtime.cuda.store import view_pool

    shape = task.shape("qwen3-0.6b")
    heads, dim, block_size = shape.heads + 2 * shape.kv_heads, shape.head_dim, 16
    random = partial(torch.randn, dtype=torch.bfloat16, device=device)
    norms = (torch.ones(dim, dtype=torch.bfloat16, device=device),) * 2
    angles = random(num_rows, dim), random(num_rows, dim)
    num_blocks = -(-num_rows // block_size)
    slots = torch.randperm(num_blocks * block_size)[:num_rows].to(device)

    def make() -> Callable[[], Tensor]:
        pool = view_pool(*(random(num_blocks, shape.kv_heads, block_size, dim) for _ in "kv"))
        return partial(rotate_and_store, random(num_rows, heads, dim), angles, norms, 1e-6, pool, slots)

    _report(task, f"head norms, rotation and store, {num_rows} rows", 2 * 2 * num_rows * heads * dim, make)


def _time_activation(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.activation import Activation
    from engine.runtime.cuda.activation import act_mul

    width = task.shape("llama-3.1-8b").ffn

    def make() -> Callable[[], Tensor]:
        return partial(act_mul, torch.randn(num_rows, 2 * width, dtype=torch.bfloat16, device=device), Activation.SILU)

    _report(task, f"gated activation, {num_rows} rows", 3 * 2 * num_rows * width, make)


def _time_sampling(task: Task, device: torch.device, num_rows: int, is_ranking: bool) -> None:
    from engine.runtime.cuda.sampling import sample
    from engine.runtime.cuda.sampling_row import Draws

    vocab = task.shape("qwen3-0.6b").vocab
    column = partial(torch.full, (num_rows,), device=device)
    draws = Draws(
        temperature=column(0.6, dtype=torch.float32),
        top_k=column(20 if is_ranking else 0, dtype=torch.int32),
        top_p=column(0.95 if is_ranking else 1.0, dtype=torch.float64),
        lowest=column(-float("inf"), dtype=torch.float32),
        seed=torch.arange(num_rows, device=device),
        position=column(7, dtype=torch.int64),
    )

    def draw(logits: Tensor) -> Tensor:
        return sample(logits, draws, is_ranking=is_ranking).ids

    kind = "top_k 20 and top_p 0.95" if is_ranking else "temperature alone"
    # Each logit is counted once; the kernels read them more than once.
    _report(
        task,
        f"sampling, {num_rows} rows, {kind}",
        4 * num_rows * vocab,
        lambda: partial(draw, torch.randn(num_rows, vocab, device=device)),
    )


def _time_product(task: Task, device: torch.device, num_rows: int, is_fp8: bool) -> None:
    """Time torch's product, of which a decode step mostly consists, or ours in fp8."""
    shape, rates = task.shape("llama-3.1-8b"), task.rates()
    size = (2 * shape.ffn, shape.hidden)
    num_bytes = (1 if is_fp8 else 2) * size[0] * size[1]
    x = torch.randn(num_rows, shape.hidden, dtype=torch.bfloat16, device=device)

    def make() -> Callable[[], Tensor]:
        if is_fp8:
            return partial(_fp8_linear(size, device), x)
        return partial(F.linear, x, torch.randn(size, dtype=torch.bfloat16, device=device))

    read_s = num_bytes / rates.copy_bytes_per_s
    multiply_s = 0.0 if is_fp8 else num_rows * num_bytes / rates.bf16_flops
    name = f"{'product in fp8' if is_fp8 else 'product of torch'}, {num_rows} rows, weights {size[0]} x {size[1]}"
    microseconds = 1e6 * median_s(_calls_of(num_bytes, make))
    task.notebook.figure(Figure(name, microseconds, "us", 1e6 * max(read_s, multiply_s), less_is_better=True))


def _fp8_linear(size: tuple[int, int], device: torch.device) -> Callable[[Tensor], Tensor]:
    from engine.runtime.cuda.fp8_linear import Fp8Linear

    def fill(rows: Tensor) -> None:
        rows.normal_()

    linear = Fp8Linear(torch.empty(size, dtype=torch.float8_e4m3fn, device=device), None)
    linear.load(0, size[0], fill)
    return linear
