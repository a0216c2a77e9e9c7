"""Measures the rates of the GPU, to which all other figures are compared."""

from __future__ import annotations

import platform
from functools import partial

import torch

from engine.core.errors import ConfigError
from engine.runtime.cuda.toolchain import TOOLS, find_driver
from tools.gpu.figures import Figure, PartError
from tools.gpu.task import BF16_RATE, COPY_BANDWIDTH, Task
from tools.gpu.timing import median_s

_COPY_BYTES = 4 << 30
_MATRIX_ROWS = 8192


def run(task: Task) -> None:
    """Name the machine, try the compiler of kernels, copy memory, multiply matrices."""
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not task.is_rehearsal:
        raise PartError("there is no GPU to measure")
    for tool, find in TOOLS.items():
        if has_gpu or find is not find_driver:
            try:
                task.notebook.detail(tool, find())
            except ConfigError as error:
                task.notebook.fail(str(error))
    device = torch.device("cuda" if has_gpu else "cpu")
    task.notebook.detail("gpu", _describe(device))
    num_bytes, rows = (_COPY_BYTES, _MATRIX_ROWS) if has_gpu else (1 << 24, 256)

    source, target = (torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device) for _ in range(2))
    copy_s = median_s([partial(target.copy_, source)])
    task.notebook.figure(Figure(COPY_BANDWIDTH, 2 * num_bytes / copy_s / 1e9, "GB/s"))
    del source, target

    # Random numbers: a GPU at its power limit multiplies zeros faster.
    left, right = (torch.randn(rows, rows, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_s = median_s([partial(torch.mm, left, right)])
    task.notebook.figure(Figure(BF16_RATE, 2 * rows**3 / product_s / 1e12, "TFLOP/s"))


def _describe(device: torch.device) -> dict[str, object]:
    described: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    try:
        import triton
    except ImportError:
        return described
    return described | {"triton": triton.__version__}
