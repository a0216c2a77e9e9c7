"""Measures every CUDA kernel alone, beside the GPU's own copies and products.

Bytes are counted once for each number that must be read or written, so a share says how far a kernel is from a copy of
the same data. Tests say that results are right; here they are only seen to be finite.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from loadtest.gpu.attention import DECODES, PREFILLS, Decode, Prefill, time_decode, time_prefill
from loadtest.gpu.figures import Figure
from loadtest.gpu.task import Task
from loadtest.gpu.timing import median_s, num_copies

_ROWS = (256, 8192)  # of a decode step and of a step of prompts


def run(task: Task) -> None:
    """All of them; one that fails does not stop the others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        # Triton's interpreter, mended as the kernels' own tests need it; before anything imports Triton.
        importlib.import_module("tests.conftest")
        importlib.import_module("tests.kernels.conftest")
    for call in _calls(task, device):
        try:
            with torch.inference_mode():
                call()
        except Exception as error:  # a kernel that does not compile, an interface that has changed
            arguments = " ".join(str(argument) for argument in call.args[2:])
            told = " ".join(str(error).split())[:300]
            task.notebook.fail(f"{call.func.__name__} {arguments}: {type(error).__name__}: {told}")
            if isinstance(error, torch.AcceleratorError):
                raise  # the device's context is lost, and all that follows would fail with it
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _calls(task: Task, device: torch.device) -> list[partial[None]]:
    decodes: Sequence[Decode] = DECODES
    prefills: Sequence[Prefill] = PREFILLS
    rows: Sequence[int] = _ROWS
    if task.is_rehearsal:
        decodes = [Decode(4, 2, 40, kv) for kv in ("", "int8", "fp8")]
        prefills, rows = (Prefill(4, 2, 24),), (3,)
    return [
        *(partial(time_decode, task, device, case) for case in decodes),
        *(partial(time_prefill, task, device, case) for case in prefills),
        *(partial(kind, task, device, num) for kind in (_time_norm, _time_rotation, _time_activation) for num in rows),
        *(partial(_time_sampling, task, device, rows[0], is_ranking) for is_ranking in (False, True)),
        *(partial(_time_product, task, device, num) for num in (1, 32, 256)),
        *(partial(_time_fp8_product, task, device, num) for num in (1, 32, 256) if device.type == "cuda"),
    ]


def _report(task: Task, name: str, num_bytes: int, calls: list[Callable[[], Tensor]]) -> None:
    if not bool(calls[0]().isfinite().all()):
        raise RuntimeError("the result is not finite")
    seconds = median_s(calls)
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.detail(name, {"microseconds": seconds * 1e6, "bytes": num_bytes})
    task.notebook.figure(Figure(name, num_bytes / seconds / 1e9, "GB/s", limit))


def _time_norm(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.cuda.norm import add_rms_norm

    width = task.shape("llama-3.1-8b").hidden
    num_bytes = 4 * 2 * num_rows * width  # the stream and what is added to it, both read; the stream and the result
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(num_copies(num_bytes)):
        stream = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
        calls.append(partial(add_rms_norm, stream, torch.zeros_like(stream), weight, 1e-5))
    _report(task, f"residual and norm, {num_rows} rows", num_bytes, calls)


def _time_rotation(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.cuda.rope_store import rotate_and_store
    from engine.runtime.cuda.store import view_pool

    shape = task.shape("qwen3-0.6b")
    heads, dim, block_size = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, 16
    num_bytes = 2 * 2 * num_rows * heads * dim
    make = partial(torch.randn, dtype=torch.bfloat16, device=device)
    norms = (torch.ones(dim, dtype=torch.bfloat16, device=device),) * 2
    angles = make(num_rows, dim), make(num_rows, dim)
    num_blocks = -(-num_rows // block_size)
    slots = torch.randperm(num_blocks * block_size)[:num_rows].to(device)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(num_copies(num_bytes)):
        pool = view_pool(*(make(num_blocks, shape.num_kv_heads, block_size, dim) for _ in "kv"))
        qkv = make(num_rows, heads, dim)
        calls.append(partial(rotate_and_store, qkv, angles, norms, 1e-6, pool, slots))
    _report(task, f"head norms, rotation and store, {num_rows} rows", num_bytes, calls)


def _time_activation(task: Task, device: torch.device, num_rows: int) -> None:
    from engine.runtime.cuda.activation import silu_mul

    width = task.shape("llama-3.1-8b").ffn
    num_bytes = 3 * 2 * num_rows * width
    make = partial(torch.randn, num_rows, 2 * width, dtype=torch.bfloat16, device=device)
    _report(
        task,
        f"gated activation, {num_rows} rows",
        num_bytes,
        [partial(silu_mul, make()) for _ in range(num_copies(num_bytes))],
    )


def _time_sampling(task: Task, device: torch.device, num_rows: int, is_ranking: bool) -> None:
    from engine.runtime.cuda.sampling import sample
    from engine.runtime.cuda.sampling_row import Draws

    vocab = task.shape("qwen3-0.6b").vocab
    num_bytes = 4 * num_rows * vocab  # every logit once; the kernels read them more than once
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

    logits = [torch.randn(num_rows, vocab, device=device) for _ in range(num_copies(num_bytes))]
    kind = "top_k 20 and top_p 0.95" if is_ranking else "temperature alone"
    _report(task, f"sampling, {num_rows} rows, {kind}", num_bytes, [partial(draw, some) for some in logits])


def _time_product(task: Task, device: torch.device, num_rows: int) -> None:
    """Not ours but torch's: a decode step is mostly these, and can be no better than they are."""
    shape = task.shape("llama-3.1-8b")
    size = (2 * shape.ffn, shape.hidden)
    num_bytes = 2 * size[0] * size[1]
    make = partial(torch.randn, dtype=torch.bfloat16, device=device)
    x = make(num_rows, shape.hidden)
    seconds = median_s([partial(F.linear, x, make(*size)) for _ in range(num_copies(num_bytes))])
    rates = task.rates()
    limit = 1e6 * max(num_bytes / rates.copy_bytes_per_s, num_rows * num_bytes / rates.bf16_flops)
    name = f"torch's product, {num_rows} rows, weights {size[0]} x {size[1]}"
    task.notebook.figure(Figure(name, seconds * 1e6, "us", limit, less_is_better=True))


def _fill(rows: Tensor) -> None:
    rows.normal_()


def _time_fp8_product(task: Task, device: torch.device, num_rows: int) -> None:
    """The same in fp8, the quantising of x included; its limit is that of reading the weights."""
    from engine.runtime.cuda.fp8_linear import Fp8Linear

    shape = task.shape("llama-3.1-8b")
    size = (2 * shape.ffn, shape.hidden)
    x = torch.randn(num_rows, shape.hidden, dtype=torch.bfloat16, device=device)
    calls: list[Callable[[], Tensor]] = []
    for _ in range(num_copies(size[0] * size[1])):
        linear = Fp8Linear(torch.empty(size, dtype=torch.float8_e4m3fn, device=device), None)
        linear.load(0, size[0], _fill)
        calls.append(partial(linear, x))
    if not bool(calls[0]().isfinite().all()):
        raise RuntimeError("the result is not finite")
    limit = 1e6 * size[0] * size[1] / task.rates().copy_bytes_per_s
    name = f"product in fp8, {num_rows} rows, weights {size[0]} x {size[1]}"
    task.notebook.figure(Figure(name, median_s(calls) * 1e6, "us", limit, less_is_better=True))
