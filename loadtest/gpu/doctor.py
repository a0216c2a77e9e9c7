"""Checks everything that only a GPU can refuse, each in a separate process.

They run side by side, so that one look at the table tells what a card refuses, with the error's own text, before minutes
go into measuring. The engines are of two layers, but as wide as the models that are measured: what they compile, those
find compiled. One alone: `python -m loadtest.gpu.doctor CHECK`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from loadtest.gpu.figures import Figure
from loadtest.gpu.task import Task

_PATIENCE_S = 90.0  # for those that run side by side, each with kernels to compile
_NUM_LINES = 25  # of a check's log


def run(task: Task) -> None:
    """All of them, or in a rehearsal one that a CPU can pass."""
    if task.is_rehearsal:
        examine(task, ["engine in float32"])
        return
    examine(task, [name for name in CHECKS if name != _ALONE])
    examine(task, [_ALONE])


def examine(task: Task, names: Sequence[str]) -> None:
    """Run some checks side by side and tell which failed, and how."""
    begun, processes = time.monotonic(), []
    for name in names:
        log = task.scratch / f"doctor-{name.replace(' ', '-').replace('/', '-')}.log"
        command = [sys.executable, "-m", "loadtest.gpu.doctor", name, *(["tiny"] if task.is_rehearsal else [])]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)  # noqa: S603 - our own
        processes.append((name, process, log))
    try:
        for name, process, log in processes:
            status = _wait(process, begun + _PATIENCE_S)
            told = task.log_tail(log, _NUM_LINES)
            task.notebook.figure(Figure(f"check: {name}", int(status == 0), "passed"))
            if status == 0:
                task.notebook.detail(name, told.splitlines())
                continue
            outcome = "out of time" if status is None else f"status {status}"
            last = told.rpartition("\n")[2]  # of a traceback, the error
            task.notebook.fail(f"{name}: {outcome}: {last}\n{told}")
    finally:
        for _, process, _ in processes:
            if process.poll() is None:
                process.kill()


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


# -- the checks: each raises, or prints what is worth knowing ----------------------------------------------------------


def _versions() -> None:
    import torch
    import triton

    free, total = torch.cuda.mem_get_info()
    card = torch.cuda.get_device_properties(0)
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}, {card}")
    print(f"{free / (1 << 30):.2f} of {total / (1 << 30):.2f} GiB free; {' '.join(torch.cuda.get_arch_list())}")


def _pinned() -> None:
    """Copies that nobody waits for, there and back, from memory that is written to again at once."""
    import torch

    hosts = [torch.full((1 << 20,), value, pin_memory=True) for value in (1, 2)]
    there = [host.to("cuda", non_blocking=True) for host in hosts]
    back = torch.empty(1 << 20, dtype=torch.int64, pin_memory=True)
    back.copy_(there[0] + there[1], non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    assert bool((back == 3).all()), back[:8]


def _graph() -> None:
    """What a decode step is of beside our kernels, recorded on a stream of its own and replayed on other numbers."""
    import torch

    from engine.runtime.linear import Dense, Linear

    weight = torch.randn(4096, 1024, dtype=torch.bfloat16, device="cuda")
    x, table = (
        torch.randn(8, 1024, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(9, dtype=torch.int64, device="cuda"),
    )
    fields = torch.arange(8, device="cuda")
    head, logits = Linear(Dense(weight)), torch.empty((8, 4096), device="cuda")

    def compute() -> torch.Tensor:
        table.index_copy_(0, fields, torch.where(fields < 4, table.index_select(0, fields), fields))
        return head.in_float32(x, logits) + table[:8, None] + fields.view(torch.float64).float()[:, None]

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    with (
        torch.inference_mode(),
        torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), stream=stream, capture_error_mode="thread_local"),
    ):
        found = compute()
    x.normal_()
    graph.replay()
    torch.testing.assert_close(found, compute(), rtol=1e-2, atol=1e-2)
    exact = x.double() @ weight.double().t()
    print(f"logits are off by {float((head.in_float32(x) - exact).abs().max()):.1e}, float32 where that is below 1e-2")


def _fp8_product() -> None:
    """torch._scaled_mm as cuda/fp8_linear.py calls it: a scale a row, few rows and many, a bias, recorded."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - its usual name

    from engine.runtime.cuda.fp8_linear import Fp8Linear

    weight, bias = (torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((6144, 4096), (6144,)))

    def fill(rows: torch.Tensor) -> None:
        rows.copy_(weight)

    for added in (None, bias):
        linear = Fp8Linear(torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device="cuda"), added)
        linear.load(0, len(weight), fill)
        for num_rows in (1, 17, 256):
            x = torch.randn(num_rows, 4096, dtype=torch.bfloat16, device="cuda")
            exact = F.linear(x.float(), weight.float(), None if added is None else added.float())
            off = float((linear(x) - exact).norm() / exact.norm())
            print(f"{num_rows} rows, {'no' if added is None else 'a'} bias: off by {off:.3%}")
            assert off < 0.06
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(x)
    graph.replay()
    assert torch.equal(found, linear(x))


def _trace() -> None:
    """Whether the profiler sees the kernels of a graph that was recorded before it began."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    x, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.add_(1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = [(event.name, event.device_type) for event in profiler.events() or ()]
    assert sum(kind == DeviceType.CUDA for _, kind in events) >= 5, events


def _engine(shape_name: str, settings: dict[str, object]) -> None:
    """Two layers of a model: built, recorded, and asked by both rules that the measurements draw by."""
    from loadtest.gpu.drive import Drive
    from loadtest.gpu.models import write_model
    from loadtest.gpu.shapes import SHAPES, TINY_SHAPES, Shape

    is_tiny = sys.argv[2:] == ["tiny"]
    whole = (TINY_SHAPES if is_tiny else SHAPES)[shape_name]
    shape = Shape(whole.name, {**whole.config, "num_hidden_layers": 2})
    common = {"max_model_len": 256 if is_tiny else 16384, "max_num_seqs": 2 if is_tiny else 64}
    with tempfile.TemporaryDirectory() as folder:
        drive = Drive(write_model(shape, Path(folder)), **common | settings)
        for temperature in (0.0, 0.7):
            prompts = [[token] * (10 + token) for token in range(1, 5)]
            steps = list(drive.run(prompts, [8] * 4, temperature=temperature))
            assert sum(step.num_tokens for step in steps) == 32, steps
        assert drive.engine.stats.out_of_memory_steps == 0
        drive.stop()
    print(f"built in {drive.build_s:.1f} s")
    print("\n".join(_compiled()))


def _compiled() -> list[str]:
    """The kernels that were compiled, those of whose registers some lie in memory first."""
    from triton.runtime.jit import JITFunction

    kernels = {
        kernel
        for name, module in list(sys.modules.items())
        if name.startswith("engine.runtime.cuda.")
        for function in vars(module).values()
        if isinstance(function, JITFunction)
        for caches in function.device_caches.values()
        for kernel in caches[0].values()
    }
    in_order = sorted(kernels, key=lambda kernel: (-kernel.n_spills, kernel.name))
    return [
        f"{kernel.name}: {kernel.n_regs} registers, {kernel.n_spills} spilled, {kernel.metadata.shared} bytes shared"
        for kernel in in_order
    ]


_ALONE = "engine of a share of the card"  # which reads what others take of it
_SMALL_POOL = {"kv_cache_memory_bytes": 1 << 28, "dtype": "bfloat16"}
CHECKS: dict[str, Callable[[], None]] = {
    "versions": _versions,
    "copies of pinned memory": _pinned,
    "a CUDA graph": _graph,
    "products in fp8": _fp8_product,
    "a trace of a graph": _trace,
    _ALONE: partial(_engine, "qwen3-0.6b", {"gpu_memory_utilization": 0.3, "dtype": "bfloat16"}),
    "engine of Qwen3-0.6B": partial(_engine, "qwen3-0.6b", _SMALL_POOL),
    "engine of Qwen3-0.6B, without graphs": partial(_engine, "qwen3-0.6b", _SMALL_POOL | {"enforce_eager": True}),
    "engine of Llama-3.1-8B": partial(_engine, "llama-3.1-8b", _SMALL_POOL),
    "engine with K/V in fp8": partial(_engine, "qwen3-0.6b", _SMALL_POOL | {"kv_cache_dtype": "fp8"}),
    "engine with K/V in int8": partial(_engine, "qwen3-0.6b", _SMALL_POOL | {"kv_cache_dtype": "int8"}),
    "engine with weights in fp8": partial(_engine, "llama-3.1-8b", _SMALL_POOL | {"quantization": "fp8"}),
    "engine in float32": partial(
        _engine, "qwen3-0.6b", {"kv_cache_memory_bytes": 1 << 26, "dtype": "float32", "async_scheduling": False}
    ),
}


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
