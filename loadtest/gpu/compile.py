"""`python -m loadtest.gpu.compile`: compile every kernel for several GPUs, without one, and print what each takes.

Each kernel's host function is called as a device would see it, and its launches are compiled instead of run; Triton
brings the assembler and the disassembler. One line for each kernel that differs: registers a thread, bytes of registers
that spilled to memory, shared memory a block and, for the attention kernels, instructions a warp for 64 keys. The exit
status is 1 where a kernel spills or asks for more shared memory than its GPU has.

Attention, its pools and fp8 are compiled in the shapes of Qwen3-0.6B and Llama-3.1-8B, all else in a few more.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.core.plan import Sample, SequenceSlice
from engine.core.types import SamplingParams
from engine.runtime.attention.base import AttentionSpec, Batch
from engine.runtime.attention.pool import SCALE_BYTES
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.activation import gelu_mul, gelu_tanh_mul, silu_mul
from engine.runtime.cuda.attention_tuning import Cut, choose_tuning
from engine.runtime.cuda.fp8_linear import quantise_rows
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.sampling import Penalties, sample
from engine.runtime.cuda.sampling_edits import TokenCounts, add_to_tokens
from engine.runtime.cuda.sampling_row import Draws
from engine.runtime.cuda.store import PoolView, view_pool

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# Bytes of shared memory that a block of threads may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
_FIRST_WITH_FP8 = 89
_KEYS = 64  # instructions are counted for so many


class Kernel(NamedTuple):
    """One compiled kernel."""

    name: str
    shape: str
    registers: int  # a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    per_keys: float | None  # instructions a warp for 64 keys, in an attention kernel's longest loop


class _Target:
    """As much of a driver as the compiler asks."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles what is launched within `compiling`, for one compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.kernels: list[Kernel] = []
        self._shape = ""
        self._known: set[str] = set()

    def compile(self, cases: Sequence[tuple[str, Callable[[], object]]]) -> None:
        """Call each case's function, and add what it launches to `kernels`."""
        run = JITFunction.run
        triton.runtime.driver.set_active(_Target(self.capability))
        JITFunction.run = self._instead_of(run)
        try:
            for self._shape, call in cases:
                call()
        finally:
            JITFunction.run = run

    def _instead_of(self, run: Any) -> Any:
        def compile_instead(kernel: Any, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
            built = run(kernel, *args, grid=grid, warmup=True, **kwargs)
            if built.hash not in self._known:
                self._known.add(built.hash)
                self.kernels.append(self._describe(built, kwargs.get("BLOCK_N")))

        return compile_instead

    def _describe(self, built: Any, block_n: Any) -> Kernel:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            usage = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
            per_keys = None
            if block_n is not None and built.metadata.name in ("_decode_kernel", "_prefill_kernel"):
                per_keys = longest_loop(_run_tool("nvdisasm", "-c", file.name)) * _KEYS / block_n
        found = dict(re.findall(r"(REG|STACK):(\d+)", usage))
        return Kernel(
            built.metadata.name, self._shape, int(found["REG"]), int(found["STACK"]), built.metadata.shared, per_keys
        )


def _run_tool(name: str, *arguments: str) -> str:
    """What one of the assembler's companions prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout  # noqa: S603 - Triton's


def longest_loop(listing: str) -> int:
    """Instructions of the longest loop with a matrix product, in what nvdisasm prints."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    longest = 0
    for line in listing.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
            branch = re.search(r"BRA.*?`\((\.L_\w+)\)", line)
            if branch and branch[1] in labels:
                loop = instructions[labels[branch[1]] :]
                if any("MMA" in each for each in loop):
                    longest = max(longest, sum("NOP" not in each for each in loop))
    return longest
