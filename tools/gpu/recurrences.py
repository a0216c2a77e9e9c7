"""Times what hybrids compute between two products: Gated DeltaNet, Mamba-2, and the convolution of LFM2.

A decode reads and writes the state of each sequence, and is compared with a copy of these bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.runtime.attention.backend import Batch
from engine.runtime.kv_layout import Pieces, RecurrentSpec, StepStates
from engine.runtime.layers.recurrence import tail_pieces
from engine.runtime.pool.states import LayerState, StatePool, place_states
from tools.gpu.figures import Figure
from tools.gpu.task import Task
from tools.gpu.timing import median_s, num_copies

_COLUMNS, _BLOCK_BYTES, _BF16 = 32, 1 << 16, torch.bfloat16


class Layer(NamedTuple):
    """A layer's heads, or without any the channels of a convolution alone."""

    model: str
    kernel: int
    num_k_heads: int = 0
    num_v_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    is_delta: bool = True
    channels: int = 0

    @property
    def width(self) -> int:
        """Return that of the result."""
        return self.channels or self.num_v_heads * self.v_dim


class Recurrence(NamedTuple):
    """A step of sequences with so many tokens each."""

    layer: Layer
    num_seqs: int
    num_tokens: int = 1


_QWEN = Layer("Qwen3.5", 4, 16, 32, 128, 128)
_GRANITE = Layer("Granite 4", 4, 1, 48, 128, 64, is_delta=False)
_LFM2 = Layer("LFM2", 3, channels=2048)
RECURRENCES: Sequence[Recurrence] = tuple(
    Recurrence(layer, *step)
    for layer in (_QWEN, _GRANITE, _LFM2)
    for step in ((1,), (32,), (256,), (1, 8192), (8, 1024))
)
_SMALL = (
    Layer("tiny", 4, 1, 2, 16, 16),
    Layer("tiny Mamba-2", 4, 1, 2, 16, 16, is_delta=False),
    Layer("tiny convolution", 3, channels=16),
)
TINY_RECURRENCES = tuple(Recurrence(layer, *step) for layer in _SMALL for step in ((2,), (1, 20)))


def time_recurrence(task: Task, device: torch.device, case: Recurrence) -> None:
    """Measure the layer from its projected rows to its normed, gated result."""
    make = _convolution if case.layer.channels else _matrices
    call, state_bytes = make(case, device)
    num_bytes = 2 * state_bytes * case.num_seqs
    calls = [call, *(make(case, device)[0] for _ in range(min(8, num_copies(num_bytes)) - 1))]
    if not bool(call().isfinite().all()):
        raise RuntimeError("the result is not finite")
    seconds, name = median_s(calls), f"{case.layer.model}, {case.num_seqs} x {case.num_tokens} tokens"
    task.notebook.detail(name, {"microseconds": seconds * 1e6, "bytes": num_bytes})
    if case.num_tokens > 1:
        task.notebook.figure(Figure(name, seconds * 1e6, "us", less_is_better=True))
        return
    limit = task.rates().copy_bytes_per_s / 1e9
    task.notebook.figure(Figure(name, num_bytes / seconds / 1e9, "GB/s", limit))


def _matrices(case: Recurrence, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a call of a layer with a matrix for each head, and the bytes of a sequence's state."""
    from engine.runtime.cuda.recurrence import Weights, advance, gated_norm
    from engine.runtime.cuda.recurrence_state import Sizes

    layer, width = case.layer, case.layer.width
    heads = (layer.num_k_heads, layer.num_v_heads, layer.k_dim, layer.v_dim)
    inputs, shared = 0 if layer.is_delta else width, layer.num_v_heads // layer.num_k_heads
    sizes = Sizes(*heads, layer.kernel, shared, inputs, layer.is_delta)
    row, columns = sizes.channels + width + (1 + layer.is_delta) * layer.num_v_heads, min(_COLUMNS, layer.v_dim)
    matrices = Pieces(width // columns, (layer.k_dim, columns), torch.float32)
    spec = RecurrentSpec((matrices, tail_pieces(sizes.channels, layer.kernel, _BF16)), row, _BF16)
    state = _state(spec, case, device)
    random = partial(torch.randn, device=device)
    weights = Weights(
        random(sizes.channels, 1, layer.kernel), -random(layer.num_v_heads).exp(), random(layer.num_v_heads)
    )
    if not layer.is_delta:
        weights = weights._replace(conv_bias=random(sizes.channels), skip=random(layer.num_v_heads))
    x, first = random(case.num_seqs * case.num_tokens, row).to(_BF16), sizes.channels if layer.is_delta else 0
    norm = random(layer.v_dim if layer.is_delta else width)

    def call() -> Tensor:
        return gated_norm(advance(x, state.on_device, sizes, weights), x[:, first : first + width], norm, sizes, 1e-6)

    return call, sum(kind.num * kind.num_bytes for kind in spec.pieces)


def _convolution(case: Recurrence, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a call of a convolution with its gate, and the bytes of a sequence's state."""
    from engine.runtime.cuda.short_conv import convolve

    channels, num_rows = case.layer.channels, case.num_seqs * case.num_tokens
    spec = RecurrentSpec((tail_pieces(channels, case.layer.kernel, _BF16),), channels, _BF16)
    state, random = _state(spec, case, device), partial(torch.randn, device=device)
    x, gate = random(num_rows, channels).to(_BF16), random(num_rows, 3 * channels).to(_BF16)[:, :channels]
    weight = random(channels, 1, case.layer.kernel)
    return lambda: convolve(x, gate, state.on_device, weight, None), spec.pieces[0].num * spec.pieces[0].num_bytes


def _state(spec: RecurrentSpec, case: Recurrence, device: torch.device) -> LayerState:
    """Return the state of a layer in a step, in slots in random order."""
    num, num_seqs = place_states([spec], _BLOCK_BYTES).num_blocks, case.num_seqs
    pool = StatePool([spec], torch.zeros(num * num_seqs, _BLOCK_BYTES, dtype=torch.uint8, device=device), num_seqs, 0)
    slots = np.random.default_rng(1).permutation(num * num_seqs).astype(np.int32).reshape(num_seqs, num)
    nothing, starts = np.zeros(num_seqs, np.int32), np.arange(num_seqs + 1, dtype=np.int32) * case.num_tokens
    kept, rows = nothing + case.num_tokens, np.arange(num_seqs, dtype=np.int32)
    step = StepStates(slots, slots, starts, kept, nothing, rows, slots, nothing)
    none, lens = torch.zeros(0, dtype=torch.int64), [case.num_tokens] * num_seqs
    pool.prepare(Batch(none, none, none, none, none, none, none, lens, lens, [()] * num_seqs, states=step))
    return pool.of_layer[0]
