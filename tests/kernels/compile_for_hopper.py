"""Run by test_triton_compiles.py: calls each kernel's host function as a device would see it, and compiles what it
launches for an H100 or H200. No device is needed: Triton brings the assembler, and nothing is launched."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.runtime.cuda.activation import gelu_mul, gelu_tanh_mul, silu_mul
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.sampling import Penalties, sample
from engine.runtime.cuda.sampling_row import Draws

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
compiled: set[str] = set()


class Hopper:
    """As much of a driver as the compiler asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(kernel: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
    built = run(kernel, *args, grid=grid, warmup=True, **kwargs)
    assert built.asm["cubin"]
    # Registers that did not fit would be kept in memory of the thread's own.
    assert ".local " not in built.asm["ptx"]
    compiled.add(kernel.fn.__name__)


run, JITFunction.run = JITFunction.run, compile_instead
triton.runtime.driver.set_active(Hopper())

for dtype in (BF16, F16, F32):
    for width in (576, 4096):
        x = torch.zeros(3, width, dtype=dtype)
        add_rms_norm(x, x, torch.ones(width, dtype=dtype), 1e-5)
        add_rms_norm(x, None, torch.ones(width), 1e-5)
    for act in (silu_mul, gelu_mul, gelu_tanh_mul):
        act(torch.zeros(3, 2 * 1536, dtype=dtype))
    for dim, rope_dim, has_norm in ((64, 64, False), (128, 128, True), (80, 32, False), (256, 0, True)):
        angles, weight = torch.zeros(3, rope_dim, dtype=dtype), torch.ones(dim, dtype=dtype)
        pool = torch.zeros(4, 8, 2, dim, dtype=dtype)
        qkv = torch.zeros(3, 10, dim, dtype=dtype)
        norms = (weight, weight) if has_norm else None
        turns, slots = (angles, angles) if rope_dim else None, torch.zeros(3).long()
        rotate_and_store(qkv, turns, norms, 1e-6, pool, pool, slots)
        scales, pool = torch.zeros(4, 8, 2), pool.to(torch.int8)
        rotate_and_store(qkv, turns, norms, 1e-6, pool, pool, slots, (scales, scales))

for num_rows, vocab_size in ((1, 49_152), (2, 1000), (64, 151_936)):
    logits, column = torch.zeros(num_rows, vocab_size), torch.zeros(num_rows)
    draws = Draws(column, column.int(), column.double(), column, column.long(), column.long())
    penalties = Penalties(torch.zeros(2, vocab_size, dtype=torch.int32), column.int(), column, column, column)
    for is_drawing, is_ranking in ((False, False), (True, False), (True, True)):
        sample(logits, draws, None, is_drawing=is_drawing, is_ranking=is_ranking)
        sample(logits, draws, penalties, is_drawing=is_drawing, is_ranking=is_ranking)

print(*sorted(compiled))
