"""Run by test_triton_compiles.py: calls each kernel's host function as a device would see it, and compiles what it
launches for an H100 or H200. No device is needed: Triton brings the assembler, and nothing is launched.

Attention, its pools and fp8 are compiled in the shapes of Qwen3-0.6B and Llama-3.1-8B, all else in a few more.
"""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.core.plan import Sample, SequenceSlice
from engine.core.types import SamplingParams
from engine.runtime.attention.base import AttentionSpec, Batch
from engine.runtime.attention.pool import SCALE_BYTES
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.activation import gelu_mul, gelu_tanh_mul, silu_mul
from engine.runtime.cuda.attention_tuning import Cut, Tuning, choose_tuning
from engine.runtime.cuda.fp8_linear import quantise_rows
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.sampling import Penalties, sample
from engine.runtime.cuda.sampling_edits import TokenCounts, add_to_tokens, ban_tokens
from engine.runtime.cuda.sampling_row import Draws
from engine.runtime.cuda.store import PoolView, view_pool
from engine.runtime.sampling.bans import Ban

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
SHARED_BYTES = 227 << 10  # that a block of threads may have
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
    assert built.metadata.shared <= SHARED_BYTES
    # Registers that did not fit would be kept in memory of the thread's own.
    assert ".local " not in built.asm["ptx"]
    compiled.add(kernel.fn.__name__)


def empty_pool(num_kv_heads: int, dim: int, dtype: torch.dtype) -> PoolView:
    """Two blocks of 16, as a backend of this type has them."""
    width = dim + SCALE_BYTES * (dtype.itemsize == 1)
    return view_pool(*(torch.zeros(2, num_kv_heads, 16, width).to(dtype) for _ in "kv"))


def attend(spec: AttentionSpec, query_len: int, context: int, pool: PoolView, tuning: Tuning | None = None) -> None:
    """A step of two slices, which stores and attends."""
    rows, numbers = torch.arange(2 * query_len), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32)
    starts = torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32)
    lens = [query_len] * 2, [context] * 2
    backend = TritonPagedAttention(tuning)
    backend.prepare(Batch(rows, rows, rows, table, starts, numbers, rows, *lens, block_tables_host=[()] * 2))
    q = torch.zeros(2 * query_len, spec.num_heads, spec.head_dim, dtype=BF16)
    k = q[:, : spec.num_kv_heads]
    backend.attend(spec, q, k, k, pool.k, pool.v)


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
        qkv = torch.zeros(3, 10, dim, dtype=dtype)
        norms = (weight, weight) if has_norm else None
        turns = (angles, angles) if rope_dim else None
        for kv_dtype in (dtype, INT8, FP8) if dtype == BF16 else (dtype,):
            rotate_and_store(qkv, turns, norms, 1e-6, empty_pool(2, dim, kv_dtype), torch.zeros(3).long())

for width in (1024, 2048, 3072, 4096, 14_336):  # of what goes into a linear
    quantise_rows(torch.zeros(3, width, dtype=BF16), torch.zeros(3, width).to(FP8), torch.zeros(3))

for num_heads in (16, 32):
    spec = AttentionSpec(num_heads, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    for kv_dtype in (BF16, INT8, FP8):
        for query_len, context in ((1, 4096), (1, 100_000), (64, 4096)):  # one program a context, several, and a chunk
            attend(spec, query_len, context, empty_pool(8, 128, kv_dtype))

# What the table has for this card alone; and a few tokens behind a context, which are cut.
tuning = choose_tuning(256, 2, (9, 0))._replace(prompt_cut=Cut(64, 32, 64))
for query_len in (4, 64):
    attend(AttentionSpec(32, 8, 256, 0.1), query_len, 4096, empty_pool(8, 256, BF16), tuning)

for num_rows, vocab_size in ((1, 49_152), (2, 1000), (64, 151_936)):
    logits, column = torch.zeros(num_rows, vocab_size), torch.zeros(num_rows)
    draws = Draws(column, column.int(), column.double(), column, column.long(), column.long())
    penalties = Penalties(torch.zeros(2, vocab_size, dtype=torch.int32), column.int(), column, column, column)
    for is_drawing, is_ranking in ((False, False), (True, False), (True, True)):
        sample(logits, draws, None, is_drawing=is_drawing, is_ranking=is_ranking)
        sample(logits, draws, penalties, is_drawing=is_drawing, is_ranking=is_ranking)
    add_to_tokens(logits, {(0, 3): 1.0})
    ban_tokens(logits, [Ban(0, 3)], torch.zeros(2).long())
    counted = SequenceSlice(0, [1, 2, 2], 1, 2, 1, [0], (Sample(0, 0),), SamplingParams(max_tokens=1), -1, 0)
    TokenCounts(2, vocab_size, logits.device).penalties([(0, counted)], num_rows, torch.zeros(2).long())

print(*sorted(compiled))
