"""What kernel_resources.py compiles: calls of each kernel's host function, in the shapes of models.

A case is its words and a call, whose tensors say only which types and sizes are launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.core.rows import SequenceSlice
from engine.core.step import Sample
from engine.core.types import SamplingParams
from engine.runtime.activation import Activation, Clamp
from engine.runtime.attention.backend import Batch
from engine.runtime.attention.triton_paged import TritonPagedAttention
from engine.runtime.cuda.activation import NAMES, act_mul
from engine.runtime.cuda.attention_tuning import Cut, choose_latent_tuning, choose_tuning
from engine.runtime.cuda.fp8_linear import quantise_rows
from engine.runtime.cuda.mask import mask_rows
from engine.runtime.cuda.norm import add_rms_norm
from engine.runtime.cuda.packed import Rows
from engine.runtime.cuda.packed_linear import PackedProduct, decode
from engine.runtime.cuda.recurrence import Weights, advance, gated_norm
from engine.runtime.cuda.recurrence_state import Sizes
from engine.runtime.cuda.rope_store import rotate_and_store
from engine.runtime.cuda.routing import route
from engine.runtime.cuda.sampling import Penalties, sample
from engine.runtime.cuda.sampling_row import Draws
from engine.runtime.cuda.short_conv import convolve
from engine.runtime.cuda.store import PoolView, view_pool
from engine.runtime.cuda.token_counts import TokenCounts
from engine.runtime.kv_layout import SCALE_BYTES, AttentionSpec, DeviceState, Pieces, RecurrentSpec, StepStates
from engine.runtime.layers.mixture_cuda import CudaExperts
from engine.runtime.layers.recurrence import tail_pieces
from engine.runtime.pool.states import StatePool
from engine.runtime.routing import RouterConfig

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
_FIRST_WITH_FP8 = 89

Case = tuple[str, Callable[[], object]]


def brief_cases(capability: int) -> Iterator[Case]:
    """Yield each kernel once, and attention over each type of pool."""
    narrow = (INT8, FP8) if capability >= _FIRST_WITH_FP8 else (INT8,)
    spec = AttentionSpec(32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    for kv_dtype in (BF16, *narrow):
        for query_len, context in ((1, 100_000), (64, 4096)):
            yield from _attend(spec, query_len, context, BF16, kv_dtype, capability)
    yield from latent_cases(capability, (128,))
    yield "bf16, width 4096", partial(_norm, BF16, 4096)
    yield "bf16, silu", partial(act_mul, torch.zeros(3, 2 * 1536, dtype=BF16), Activation.SILU)
    for kv_dtype in (BF16, *narrow):
        yield f"bf16, K/V {_name(kv_dtype)}, heads of 128", partial(_rotate, BF16, kv_dtype, 128, 128, has_norm=True)
    if FP8 in narrow:
        yield (
            "width 4096",
            partial(quantise_rows, torch.zeros(3, 4096, dtype=BF16), torch.zeros(3, 4096).to(FP8), torch.zeros(3)),
        )
    recurrences = list(recurrence_cases((BF16,)))
    yield from (*recurrences[1:3], recurrences[-1], *convolution_cases((BF16,)))
    yield "64 rows of 151936", partial(_sample, 64, 151_936)
    yield from _mixtures(("gpt-oss-20b",), (1,), BF16, "mxfp4")
    yield from _mixtures(("Qwen3-30B-A3B",), (1,), BF16, "bf16")
    yield "4096 x 4096 in int4, decoded", partial(decode, _rows("int4", 4096, 4096), BF16)


def all_cases(capability: int) -> Iterator[Case]:
    """Yield each kernel in all shapes."""
    yield from attention_cases(capability)
    yield from latent_cases(capability)
    yield from layer_cases(capability)
    yield from mixture_cases(capability)
    yield from packed_cases(capability)
    yield from recurrence_cases()
    yield from convolution_cases()
    yield from sampling_cases()


def attention_cases(capability: int) -> Iterator[Case]:
    """Yield decodes, chunks of prompts and short turns, over each type of pool."""
    narrow = (INT8, FP8) if capability >= _FIRST_WITH_FP8 else (INT8,)
    for num_heads in (16, 32):
        spec = AttentionSpec(num_heads, num_kv_heads=8, head_dim=128, scale=128**-0.5)
        for kv_dtype in (BF16, *narrow) if num_heads == 32 else (BF16,):
            for query_len, context in ((1, 4096), (1, 100_000), (4, 4096), (64, 4096)):
                yield from _attend(spec, query_len, context, BF16, kv_dtype, capability)
    for kv_dtype in (BF16, *narrow):
        yield from _attend(AttentionSpec(32, 8, 256, 0.1), 1, 100_000, BF16, kv_dtype, capability)
        for query_len in (1, 64):
            yield from _attend(AttentionSpec(32, 4, 512, 1.0), query_len, 100_000, BF16, kv_dtype, capability)
    for query_len in (4, 64):
        yield from _attend(AttentionSpec(32, 8, 256, 0.1), query_len, 4096, BF16, BF16, capability, Cut(64, 32, 64))
    for head_dim in (64, 128, 256):
        for query_len in (1, 64):
            yield from _attend(AttentionSpec(16, 8, head_dim, 0.1), query_len, 100_000, F32, F32, capability)


def _attend(
    spec: AttentionSpec,
    query_len: int,
    context: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    capability: int,
    prompt_cut: Cut | None = None,
) -> Iterator[Case]:
    """Yield a step of two slices, which stores and attends."""
    tuning = choose_tuning(
        spec.head_dim, dtype.itemsize, divmod(capability, 10), has_narrow_pool=kv_dtype.itemsize == 1
    )
    if prompt_cut is not None:
        tuning = tuning._replace(prompt_cut=prompt_cut)

    def call() -> None:
        pool = _empty_pool(spec.num_kv_heads, spec.head_dim, kv_dtype)
        backend = TritonPagedAttention(tuning)
        backend.prepare(_two_slices(query_len, context))
        q = torch.zeros(2 * query_len, spec.num_heads, spec.head_dim, dtype=dtype)
        k = q[:, : spec.num_kv_heads]
        backend.attend(spec, q, k, k, pool.k, pool.v)

    heads = f"{spec.num_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
    types = f"{_name(dtype)}, K/V {_name(kv_dtype)}"
    yield f"{heads}, {types}, {query_len} of {context}", call


def latent_cases(capability: int, heads: Sequence[int] = (16, 128)) -> Iterator[Case]:
    """Yield decodes and chunks of prompts over latents, of models with these heads."""

    def attend(spec: AttentionSpec, query_len: int) -> None:
        pool = torch.zeros(2, 1, 64, spec.head_dim, dtype=BF16)
        q = torch.zeros(2 * query_len, spec.num_heads, spec.head_dim, dtype=BF16)
        tuning = choose_latent_tuning(spec.num_heads, 2, divmod(capability, 10))
        backend = TritonPagedAttention(latent_tuning=tuning)
        backend.prepare(_two_slices(query_len, 100_000))
        backend.attend(spec, q, q[:, :1], q[:, :1], pool, pool)

    for num_heads in heads:
        for query_len in (1, 64):
            spec = AttentionSpec(num_heads, 1, 576, 576**-0.5, value_dim=512)
            yield f"{num_heads} heads over latents, bf16, {query_len} of 100000", partial(attend, spec, query_len)


def _two_slices(query_len: int, context: int) -> Batch:
    rows, numbers = torch.arange(2 * query_len), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(2, 8, dtype=torch.int32)
    starts = torch.tensor([0, query_len, 2 * query_len], dtype=torch.int32)
    lens = [query_len] * 2, [context] * 2
    return Batch(rows, rows, rows, table, starts, numbers, rows, *lens, block_tables_host=[()] * 2)


def _empty_pool(num_kv_heads: int, dim: int, dtype: torch.dtype) -> PoolView:
    """Return a pool of two blocks of 16."""
    width = dim + SCALE_BYTES * (dtype.itemsize == 1)
    k, v = (torch.zeros(2, num_kv_heads, 16, width).to(dtype) for _ in "kv")
    return view_pool(k, v)


def layer_cases(capability: int) -> Iterator[Case]:
    """Yield the kernels between the products of a layer."""
    narrow = (INT8, FP8) if capability >= _FIRST_WITH_FP8 else (INT8,)
    for dtype in (BF16, F16, F32):
        for width in (576, 4096):
            yield f"{_name(dtype)}, width {width}", partial(_norm, dtype, width)
        for act, name in NAMES.items():
            yield f"{_name(dtype)}, {name}", partial(act_mul, torch.zeros(3, 2 * 1536, dtype=dtype), act)
        for dim, rope_dim, has_norm in (
            (64, 64, False),
            (128, 128, True),
            (80, 32, False),
            (256, 0, True),
            (512, 128, True),
        ):
            for kv_dtype in (dtype, *narrow) if dtype == BF16 else (dtype,):
                shape = f"{_name(dtype)}, K/V {_name(kv_dtype)}, heads of {dim}"
                yield shape, partial(_rotate, dtype, kv_dtype, dim, rope_dim, has_norm=has_norm)
    for width in (1024, 2048, 3072, 4096, 14_336) if FP8 in narrow else ():  # of the input of a linear layer
        x = torch.zeros(3, width)
        yield f"width {width}", partial(quantise_rows, x.to(BF16), x.to(FP8), torch.zeros(3))


def _norm(dtype: torch.dtype, width: int) -> None:
    x = torch.zeros(3, width, dtype=dtype)
    add_rms_norm(x, x, torch.ones(width, dtype=dtype), 1e-5)
    add_rms_norm(x, None, torch.ones(width), 1e-5)


def _rotate(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, rope_dim: int, *, has_norm: bool) -> None:
    angles, weight = torch.zeros(3, rope_dim, dtype=dtype), torch.ones(dim, dtype=dtype)
    qkv = torch.zeros(3, 10, dim, dtype=dtype)
    norms = (weight, weight) if has_norm else None
    turns = (angles, angles) if rope_dim else None
    rotate_and_store(qkv, turns, norms, 1e-6, _empty_pool(2, dim, kv_dtype), torch.zeros(3).long())


class Mixture(NamedTuple):
    """The sizes of a model's mixtures."""

    num_experts: int
    num_chosen: int
    hidden: int
    width: int
    activation: Activation | Clamp = Activation.SILU


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "Nemotron-3-Nano": Mixture(128, 6, 2688, 1856, Activation.RELU2),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, Clamp(1.702, 7.0)),
    "DeepSeek-V2-Lite": Mixture(64, 6, 2048, 1408),
}


def mixture_cases(capability: int) -> Iterator[Case]:
    """Yield the experts of decodes, of a batch of them, and of prompts."""
    yield from _mixtures(("Qwen3-30B-A3B",), (1, 64, 512, 4096), BF16, "bf16")
    yield from _mixtures(("DeepSeek-V2-Lite",), (1,), F32, "f32")
    yield from _mixtures(("gpt-oss-20b",), (1, 4096), BF16, "mxfp4")
    yield from _mixtures(("Qwen3-30B-A3B",), (1,), BF16, "int4")
    yield from _mixtures(("Nemotron-3-Nano",), (1, 4096), BF16, "bf16")
    if capability >= _FIRST_WITH_FP8:
        yield from _mixtures(("Qwen3-30B-A3B",), (1, 4096), BF16, "fp8")


def _mixtures(names: Sequence[str], steps: Sequence[int], dtype: torch.dtype, stored: str) -> Iterator[Case]:
    for name in names:
        for num_tokens in steps:
            shape = f"{name}, {_name(dtype)}, experts {stored}, {num_tokens} tokens"
            yield shape, partial(_mix, MIXTURES[name], num_tokens, dtype, stored)


def _mix(sizes: Mixture, num_tokens: int, dtype: torch.dtype, stored: str) -> None:
    """Route some tokens, and compute their experts, whose matrices have no memory."""

    def stack(num_outputs: int, num_inputs: int) -> Rows:
        rows = _rows(stored, num_outputs, num_inputs, (sizes.num_experts,))
        return rows._replace(bias=torch.zeros(sizes.num_experts, num_outputs, dtype=dtype))

    router = RouterConfig(num_experts=sizes.num_experts, num_chosen=sizes.num_chosen, is_normalised=True)
    weights, chosen = route(torch.zeros(num_tokens, sizes.num_experts), None, router)
    first = stack((1 + sizes.activation.is_gated) * sizes.width, sizes.hidden)
    experts = CudaExperts(first, stack(sizes.hidden, sizes.width), sizes.activation)
    experts(torch.zeros(num_tokens, sizes.hidden, dtype=dtype), weights, chosen)


def _rows(kind: str, num_outputs: int, num_inputs: int, experts: tuple[int, ...] = ()) -> Rows:
    """Return rows without memory: floats, FP8 with a scale a row, or codes in groups of 128 or MXFP4's 32."""
    if kind in ("bf16", "f32"):
        dtype = BF16 if kind == "bf16" else F32
        return Rows(torch.empty((*experts, num_outputs, num_inputs), dtype=dtype, device="meta"))
    group = {"fp8": num_inputs, "mxfp4": 32}.get(kind, 128)
    width = num_inputs // 2 if kind in ("int4", "mxfp4") else num_inputs
    numbers = torch.empty((*experts, num_outputs, width), dtype=FP8 if kind == "fp8" else torch.uint8, device="meta")
    dtype = {"fp8": F32, "mxfp4": torch.uint8}.get(kind, F16)
    scales = torch.empty((*experts, num_outputs, num_inputs // group), dtype=dtype, device="meta")
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device="meta") if kind == "int4" else None
    return Rows(numbers, None, kind, scales, zeros, group, 128 if kind == "int8" else 0)


_RECURRENCES = (  # Qwen 3.5, a small one, Granite 4, and one with the largest states
    (Sizes(16, 32, 128, 128, 4, 2), 32),
    (Sizes(4, 8, 64, 40, 4, 2), 8),
    (Sizes(1, 48, 128, 64, 4, 48, inputs=3072, is_delta=False), 32),
    (Sizes(8, 128, 256, 64, 4, 16, inputs=8192, is_delta=False), 32),
)


def recurrence_cases(dtypes: Sequence[torch.dtype] = (BF16, F32)) -> Iterator[Case]:
    """Yield decodes with drafts, and a prompt, of layers with a matrix for each head; states are of the other type."""
    for sizes, columns in _RECURRENCES:
        rule = "delta" if sizes.is_delta else "Mamba-2"
        for dtype in dtypes:
            states = F32 if dtype == BF16 else BF16
            for query_len, max_drafts in ((1, 0), (1, 4), (64, 0)):
                shape = (
                    f"{rule}, {sizes.num_v_heads} heads of {sizes.k_dim} x {sizes.v_dim} in {_name(states)}, {_name(dtype)}, "
                    f"{query_len} and {max_drafts} drafts"
                )
                yield shape, partial(_advance, sizes, columns, dtype, states, query_len, max_drafts)


def _advance(
    sizes: Sizes, columns: int, dtype: torch.dtype, states: torch.dtype, query_len: int, max_drafts: int
) -> None:
    """Compute a slice of a layer."""
    width = sizes.num_v_heads * sizes.v_dim
    matrices = Pieces(width // columns, (sizes.k_dim, columns), states)
    row = sizes.channels + width + (1 + sizes.is_delta) * sizes.num_v_heads
    spec = RecurrentSpec((matrices, tail_pieces(sizes.channels, sizes.kernel, dtype)), row, dtype)
    heads = torch.zeros(sizes.num_v_heads)
    weights = Weights(torch.zeros(sizes.channels, 1, sizes.kernel), heads, heads)
    if not sizes.is_delta:
        weights = weights._replace(conv_bias=torch.zeros(sizes.channels), skip=heads)
    rows, state = torch.zeros(query_len, row, dtype=dtype), _state_of(spec, query_len, max_drafts)
    out = advance(rows, state, sizes, weights)
    first = sizes.channels if sizes.is_delta else 0
    gated_norm(out, rows[:, first : first + width], torch.zeros(width), sizes, 1e-6)


def convolution_cases(dtypes: Sequence[torch.dtype] = (BF16, F32)) -> Iterator[Case]:
    """Yield decodes with drafts, and a prompt, of a layer of LFM2."""
    for dtype in dtypes:
        for query_len, max_drafts in ((1, 4), (64, 0)):
            shape = f"2048 channels, {_name(dtype)}, {query_len} and {max_drafts} drafts"
            yield shape, partial(_convolve, dtype, query_len, max_drafts)


def _convolve(dtype: torch.dtype, query_len: int, max_drafts: int) -> None:
    state = _state_of(RecurrentSpec((tail_pieces(2048, 3, dtype),), 2048, dtype), query_len, max_drafts)
    rows, gate = torch.zeros(query_len, 2048, dtype=dtype), torch.zeros(query_len, 6144, dtype=dtype)[:, :2048]
    convolve(rows, gate, state, torch.zeros(2048, 1, 3), None)


def _state_of(spec: RecurrentSpec, query_len: int, max_drafts: int) -> DeviceState:
    """Return the state of a layer in a step of one slice."""
    pool = StatePool([spec], torch.zeros(200, 1 << 16, dtype=torch.uint8), 1, max_drafts)
    numbers = np.array([query_len], np.int32)
    slots = np.arange(pool.places.num_blocks, dtype=np.int32)[None]
    nothing = 0 * numbers
    step = StepStates(slots, slots, np.array([0, query_len], np.int32), numbers, nothing, nothing, slots, nothing)
    pool.prepare(replace(_two_slices(query_len, query_len), states=step))
    return pool.of_layer[0].on_device


def packed_cases(capability: int) -> Iterator[Case]:
    """Yield products with codes, of one row and of some, and the decoding of a matrix for many rows."""

    def multiply(kind: str, num_rows: int) -> None:
        PackedProduct(_rows(kind, 4096, 4096))(torch.zeros(num_rows, 4096, dtype=BF16))

    kinds = ("int4", "int8", "mxfp4", "fp8") if capability >= _FIRST_WITH_FP8 else ("int4", "int8", "mxfp4")
    for kind in kinds:
        for num_rows in (1, 64) if kind == "int4" else (1,):
            yield f"4096 x 4096 in {kind}, {num_rows} rows", partial(multiply, kind, num_rows)
    yield "4096 x 4096 in int4, decoded", partial(decode, _rows("int4", 4096, 4096), BF16)


def sampling_cases() -> Iterator[Case]:
    """Yield the kernels from logits to ids."""
    for num_rows, vocab_size in ((1, 49_152), (2, 1000), (64, 151_936)):
        yield f"{num_rows} rows of {vocab_size}", partial(_sample, num_rows, vocab_size)


def _sample(num_rows: int, vocab_size: int) -> None:
    logits, column = torch.zeros(num_rows, vocab_size), torch.zeros(num_rows)
    draws = Draws(column, column.int(), column.double(), column, column.long(), column.long())
    penalties = Penalties(torch.zeros(2, vocab_size, dtype=torch.int32), column.int(), column, column, column)
    for is_drawing, is_ranking in ((False, False), (True, False), (True, True)):
        sample(logits, draws, None, is_drawing=is_drawing, is_ranking=is_ranking)
        sample(logits, draws, penalties, is_drawing=is_drawing, is_ranking=is_ranking)
    mask_rows(logits, torch.zeros(1).long(), torch.zeros((1, -(-vocab_size // 32)), dtype=torch.int32))
    counted = SequenceSlice(0, 0, 1, SamplingParams(max_tokens=1), [1, 2, 2], (Sample(0, 0),), 2, 1)
    TokenCounts(2, vocab_size, logits.device).penalties([(0, counted)], num_rows, torch.zeros(2).long())


def _name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "f16", F32: "f32", INT8: "int8", FP8: "fp8"}[dtype]
