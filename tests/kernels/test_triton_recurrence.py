"""Recurrent layers' kernels against their rules in float64: chunks of any length, slots anywhere, drafts, replays, padding."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.runtime.cuda.recurrence import Weights, advance, gated_norm
from engine.runtime.cuda.recurrence_state import Sizes
from engine.runtime.cuda.short_conv import convolve
from engine.runtime.kv_layout import CHUNK, DeviceState, Pieces, RecurrentSpec, StateTensors, StepStates
from engine.runtime.layers.recurrence import tail_pieces
from engine.runtime.pool.states import LayerState, StatePool
from tests.kernels.test_triton_attention import far_apart

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS, MAX_DRAFTS, BLOCK_BYTES = 1e-6, 3, 1600
# key heads, value heads, their sizes, taps, value heads that share a key head; and the columns of a piece.
NEIGHBOURS, TILED = (Sizes(1, 2, 16, 24, 4, 2), 8), (Sizes(2, 4, 12, 32, 3, 1), 32)
GROUPS = Sizes(2, 6, 20, 16, 4, 3, inputs=96, is_delta=False), 16
ONE_GROUP = Sizes(1, 3, 16, 24, 3, 3, inputs=72, is_delta=False), 8


class Piece(NamedTuple):
    """A slice of a step: positions before it, its rows, and what a step with drafts leaves to the next."""

    before: int
    num: int
    drafts: int = 0
    replays: int = 0
    moves: bool = True  # writes another slot than it reads


class Model:
    """A layer's numbers, and the rule in float64."""

    def __init__(
        self, sizes: Sizes, columns: int, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self.sizes, self.dtype, self.state_dtype = sizes, dtype, state_dtype
        heads, width = sizes.num_v_heads, sizes.num_v_heads * sizes.v_dim
        gates = (heads, heads) if sizes.is_delta else (heads,)
        self.widths = (sizes.channels, width, *gates) if sizes.is_delta else (width, sizes.channels, *gates)
        self.inputs = sizes.inputs
        self.norm = 1 + torch.randn(sizes.v_dim if sizes.is_delta else width) / 4
        conv, decay = torch.randn(sizes.channels, 1, sizes.kernel) / 2, -torch.rand(heads) * 4
        self.weights = Weights(conv, decay, torch.randn(heads) - 2)
        if not sizes.is_delta:
            has_bias = sizes.kernel > 3
            self.weights = self.weights._replace(
                conv_bias=torch.randn(sizes.channels) if has_bias else None,
                skip=torch.randn(heads),
                step_limit=(0.0, math.inf) if has_bias else (0.1, 0.6),
            )
        matrices = Pieces(width // columns, (sizes.k_dim, columns), state_dtype)
        tails = tail_pieces(sizes.channels, sizes.kernel, dtype)
        self.spec = RecurrentSpec((matrices, tails), sum(self.widths), dtype)

    def tokens(self, num: int) -> Tensor:
        """Projected rows, of which some neighbours are equal, as where a text repeats a token."""
        rows = torch.randn(num, sum(self.widths))
        rows[torch.arange(num) % 80 < 40] = rows[0].clone()
        return rows.to(self.dtype)

    def exact(self, rows: Tensor, rounds: set[int]) -> tuple[list[Tensor], Tensor]:
        """The matrices [heads, k_dim, v_dim] before each row and after the last, and the outputs.

        Matrices are rounded to their type after so many rows.
        """
        parts = rows.double().split(self.widths, 1)
        return self.by_delta(rounds, *parts) if self.sizes.is_delta else self.by_mamba(rounds, *parts)

    def by_delta(self, rounds: set[int], qkv: Tensor, z: Tensor, b: Tensor, a: Tensor) -> tuple[list[Tensor], Tensor]:
        sizes, (_, decay, bias, *_) = self.sizes, self.weights
        width = sizes.num_k_heads * sizes.k_dim
        q, k, v = self.mixed(qkv).split((width, width, self.widths[1]), 1)
        q, k = (x.unflatten(1, (-1, sizes.k_dim)) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        heads = [head // sizes.shared % sizes.num_k_heads for head in range(sizes.num_v_heads)]
        q, k, v = q[:, heads] / math.sqrt(sizes.k_dim), k[:, heads], v.unflatten(1, (-1, sizes.v_dim))
        states, out = [v.new_zeros(sizes.num_v_heads, sizes.k_dim, sizes.v_dim)], torch.empty_like(v)
        for t in range(len(v)):
            s = states[-1] * (decay.double() * torch.nn.functional.softplus(a[t] + bias)).exp()[:, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * b[t].sigmoid()[:, None]
            s = s + k[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", s, q[t])
            states.append(self.rounded(s) if t + 1 in rounds else s)
        out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * self.norm
        return states, out.flatten(1) * torch.nn.functional.silu(z)

    def by_mamba(self, rounds: set[int], z: Tensor, xbc: Tensor, dt: Tensor) -> tuple[list[Tensor], Tensor]:
        sizes, (_, decay, bias, _, skip, limit) = self.sizes, self.weights
        assert skip is not None
        groups = sizes.num_k_heads * sizes.k_dim
        x, b, c = self.mixed(xbc).split((self.widths[0], groups, groups), 1)
        x = x.unflatten(1, (-1, sizes.v_dim))
        b, c = (each.unflatten(1, (-1, sizes.k_dim)).repeat_interleave(sizes.shared, 1) for each in (b, c))
        dt = torch.nn.functional.softplus(dt + bias).clamp(*limit)
        states, out = [x.new_zeros(sizes.num_v_heads, sizes.k_dim, sizes.v_dim)], torch.empty_like(x)
        for t in range(len(x)):
            s = states[-1] * (decay * dt[t]).exp()[:, None, None] + torch.einsum("hk,hv,h->hkv", b[t], x[t], dt[t])
            out[t] = torch.einsum("hkv,hk->hv", s, c[t]) + skip[:, None] * x[t]
            states.append(self.rounded(s) if t + 1 in rounds else s)
        gated = (out.flatten(1) * torch.nn.functional.silu(z)).unflatten(1, (sizes.num_k_heads, -1))
        gated *= torch.rsqrt(gated.square().mean(-1, keepdim=True) + EPS)
        return states, gated.flatten(1) * self.norm

    def mixed(self, inputs: Tensor) -> Tensor:
        """The convolution and SiLU of inputs [T, channels]."""
        padded = torch.cat((inputs.new_zeros(self.sizes.kernel - 1, self.sizes.channels), inputs))
        sums = (padded.unfold(0, self.sizes.kernel, 1) * self.weights.conv[:, 0].double()).sum(2)
        bias = self.weights.conv_bias
        return torch.nn.functional.silu(sums if bias is None else sums + bias)

    def rounded(self, state: Tensor) -> Tensor:
        """A state as its type has it, if that is narrow."""
        return state if self.state_dtype == torch.float32 else state.to(self.state_dtype).double()

    def pieces(self, state: Tensor, rows: Tensor) -> list[Tensor]:
        """A state as it lies in its slot, after some rows."""
        cut = state.unflatten(2, (-1, self.spec.pieces[0].shape[1])).transpose(1, 2).flatten(0, 1)
        return [cut, tail_of(self.spec, rows[:, self.inputs :])]

    def compute(self, rows: Tensor, state: DeviceState) -> Tensor:
        weights = Weights._make(each.to(DEVICE) if isinstance(each, Tensor) else each for each in self.weights)
        out = advance(rows, state, self.sizes, weights)
        z = rows.split(self.widths, 1)[1 if self.sizes.is_delta else 0]
        return gated_norm(out, z, self.norm.to(DEVICE), self.sizes, EPS)


class Convolution:
    """The same of a short convolution, whose rows are inputs and gates; its state is the inputs alone."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype) -> None:
        self.dtype, self.state_dtype, self.channels, self.inputs = dtype, torch.float32, channels, 0
        self.weight, self.bias = torch.randn(channels, 1, kernel), torch.randn(channels) if kernel > 3 else None
        self.spec = RecurrentSpec((tail_pieces(channels, kernel, dtype),), channels, dtype)

    def tokens(self, num: int) -> Tensor:
        return torch.randn(num, 2 * self.channels).to(self.dtype)

    def exact(self, rows: Tensor, rounds: set[int]) -> tuple[list[None], Tensor]:
        x, gate = rows.double().chunk(2, 1)
        padded = torch.cat((x.new_zeros(self.weight.shape[2] - 1, self.channels), x))
        sums = (padded.unfold(0, self.weight.shape[2], 1) * self.weight[:, 0].double()).sum(2)
        return [None] * (len(rows) + 1), gate * (sums if self.bias is None else sums + self.bias.double())

    def pieces(self, state: None, rows: Tensor) -> list[Tensor]:
        return [tail_of(self.spec, rows)]

    def compute(self, rows: Tensor, state: DeviceState) -> Tensor:
        x, gate = rows.chunk(2, 1)
        bias = None if self.bias is None else self.bias.to(DEVICE)
        return convolve(x.contiguous(), gate, state, self.weight.to(DEVICE), bias)


def tail_of(spec: RecurrentSpec, rows: Tensor) -> Tensor:
    """The tail of a convolution as it lies in a slot, after some rows."""
    num, (num_before, segment), _ = spec.pieces[-1]
    before = rows.new_zeros(num_before, num * segment)
    tail = torch.cat((before, rows[:, : num * segment]))[-num_before:]
    return tail.unflatten(1, (-1, segment)).transpose(0, 1)


class World:
    """A pool of one layer's slots anywhere in it, and sequences that are computed step by step."""

    def __init__(
        self, model: Model | Convolution, num_sequences: int, place: Callable[[Tensor], Tensor] = lambda blocks: blocks
    ) -> None:
        """`place` may put the blocks elsewhere."""
        self.model = model
        # A norm enlarges the errors of a small row; of a narrow state one number may be rounded to the other side.
        self.slack = 1e-4 if model.state_dtype == torch.float32 else 2.0**-7
        blocks = torch.full((40 * num_sequences, BLOCK_BYTES), 0x7F, dtype=torch.uint8, device=DEVICE)  # large numbers
        self.states = StatePool([model.spec], place(blocks), num_sequences + 1, MAX_DRAFTS)
        self.width = self.states.places.num_blocks
        self.free = random.sample(range(len(blocks)), len(blocks))

    @property
    def layer(self) -> LayerState:
        return self.states.of_layer[0]

    def slot(self) -> list[int]:
        return [self.free.pop() for _ in range(self.width)]

    def step(self, pieces: list[Piece], slots: list[tuple[list[int], list[int]]]) -> StepStates:
        array = lambda values: np.array(values, np.int32)  # noqa: E731
        nums = [piece.num for piece in pieces]
        return StepStates(
            array([read for read, _ in slots]),
            array([written for _, written in slots]),
            array(np.cumsum([0, *nums])),
            array([piece.num - piece.drafts for piece in pieces]),
            array([piece.replays for piece in pieces]),
            array(range(len(pieces), 0, -1)),
            array([read for read, _ in slots]),
            array([piece.replays for piece in pieces]),
        )

    def prepare(self, step: StepStates, contexts: list[int], tensors: StateTensors | None = None) -> None:
        batch: Any = SimpleNamespace(states=step, state_tensors=tensors, context_lens_host=contexts)
        self.states.prepare(batch)

    def compute(self, x: Tensor) -> Tensor:
        wide = torch.full((len(x), x.shape[1] + 5), torch.nan, dtype=x.dtype, device=DEVICE)
        rows = wide[:, : x.shape[1]].copy_(x)
        return self.model.compute(rows, self.layer.on_device).cpu()

    def check(self, pieces: list[Piece]) -> None:
        """Compute a step, and compare outputs, slots, drafts, and the rest of the pool."""
        model, rows = self.model, [self.model.tokens(piece.before + piece.num) for piece in pieces]
        exact = [model.exact(each, rounds_of(piece)) for piece, each in zip(pieces, rows, strict=True)]
        slots = []
        for piece in pieces:
            # Replays are of before, and not yet in the state.
            read = self.slot() if piece.before - piece.replays else [-1, *self.slot()[1:]]
            slots.append((read, self.slot() if piece.moves or read[0] < 0 else read))
        step, contexts = self.step(pieces, slots), [piece.before + piece.num for piece in pieces]
        self.prepare(step, contexts)
        for index, (piece, each, (states, _)) in enumerate(zip(pieces, rows, exact, strict=True)):
            at = piece.before - piece.replays
            if at:
                held = zip(model.spec.pieces, model.pieces(states[at], each[:at]), strict=True)
                self.layer.write(index, [values.to(DEVICE, kind.dtype) for kind, values in held], midway=True)
            self.layer.drafts(index)[: piece.replays] = each[at : piece.before, : model.spec.row].to(DEVICE)
        before = self.states.pool.clone()
        found = self.compute(torch.cat([each[piece.before :] for piece, each in zip(pieces, rows, strict=True)]))
        changed = (self.states.pool != before).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {
            block
            for piece, slot in zip(pieces, slots, strict=True)
            for block in (*slot[1], *(slot[0] if piece.replays else ()))
        }
        for index, (piece, each, (states, outputs)) in enumerate(zip(pieces, rows, exact, strict=True)):
            out = found[step.starts[index] : step.starts[index + 1]]
            close(out, outputs[piece.before :], self.slack)
            kept = piece.before + piece.num - piece.drafts
            drafts = self.layer.kept[step.rows[index], : piece.drafts].cpu()
            assert torch.equal(drafts[:, model.inputs :], each[kept:, model.inputs : model.spec.row])
            self.compare(slots[index][1], model.pieces(states[kept], each[:kept]))
            if piece.replays and slots[index][0][0] >= 0 and piece.moves:
                self.compare(slots[index][0], model.pieces(states[piece.before], each[: piece.before]))

    def read(self, slot: list[int]) -> list[Tensor]:
        self.prepare(self.step([Piece(1, 1)], [(slot, slot)]), [2])
        return [each.cpu() for each in self.layer.read(0)]

    def compare(self, slot: list[int], expected: list[Tensor]) -> None:
        *matrices, tails = self.read(slot)
        for found, exact in zip(matrices, expected, strict=False):
            close(found, exact, self.slack)
        assert torch.equal(tails, expected[-1].to(tails.dtype))


def rounds_of(piece: Piece) -> set[int]:
    """After how many rows a state is rounded: after each, but in chunks."""
    end = piece.before + piece.num
    is_chunked = piece.num > 16 and not piece.drafts and not piece.replays
    return {*range(piece.before + 1 if is_chunked else end), *range(0, end, CHUNK), end}


def close(found: Tensor, exact: Tensor, slack: float = 2e-5) -> None:
    error = (found.double() - exact).abs()
    allowed = torch.finfo(found.dtype).eps * exact.abs() + slack * (1 + exact.abs())
    assert bool((error <= allowed).all()), f"off by {error.max().item():.2e}"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other random numbers every time, printed for a failure; memory that is handed out holds NaN."""
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(math.nan))


KINDS = {
    "neighbours": (Model, *NEIGHBOURS, torch.float32),
    "tiled": (Model, *TILED, torch.bfloat16),
    "tiled, narrow states": (Model, *TILED, torch.bfloat16, torch.bfloat16),
    "groups": (Model, *GROUPS, torch.bfloat16),
    "one group": (Model, *ONE_GROUP, torch.float32),
    "one group, narrow states": (Model, *ONE_GROUP, torch.bfloat16, torch.bfloat16),
    "convolution": (Convolution, 96, 3, torch.bfloat16),
    "long convolution": (Convolution, 160, 7, torch.float32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(0, 1), Piece(1, 1, moves=False), Piece(20, 1), Piece(1, 2)],
        [Piece(0, 63), Piece(1, 64, moves=False), Piece(63, 65)],
        [Piece(9, 4, drafts=3), Piece(7, 3, drafts=1, replays=2, moves=False), Piece(0, 17), Piece(8, 1, replays=3)],
        [Piece(2, 1, replays=2), Piece(5, 3, drafts=2, replays=1)],
    ],
    ids=["decodes", "chunks", "drafts", "replays"],
)
def test_the_kernels_compute_the_rule(pieces: list[Piece], kind: str) -> None:
    make, *settings = KINDS[kind]
    World(make(*settings), len(pieces)).check(pieces)


@pytest.mark.parametrize("kind", ["tiled", "one group, narrow states", "convolution"])
def test_slots_may_lie_beyond_what_32_bits_count(kind: str) -> None:
    make, *settings = KINDS[kind]
    for piece in (Piece(3, 2, drafts=1, replays=1), Piece(60, 20)):
        World(make(*settings), 1, far_apart).check([piece])


@pytest.mark.parametrize("kind", ["neighbours", "groups", "long convolution"])
def test_padding_rows_leave_no_trace(kind: str) -> None:
    """Two rows of a graph, one of them nobody's."""
    make, *settings = KINDS[kind]
    model = make(*settings)
    world = World(model, 2)
    rows, slot = model.tokens(1), world.slot()
    slots = torch.tensor([slot, [-1] * world.width], dtype=torch.int32, device=DEVICE)
    none, ones, starts = slots[:0, 0], torch.ones_like(slots[:, 0]), torch.arange(3, dtype=torch.int32, device=DEVICE)
    step = StateTensors(
        slots.clone().fill_(-1), slots, starts, ones, ones - 1, starts[:2], starts, starts[:2], starts[:2], none, none
    )
    world.prepare(None, [], step)  # type: ignore[arg-type]
    before = world.states.pool.clone()
    found = world.compute(torch.cat((rows, rows)))
    assert {*(world.states.pool != before).any(1).nonzero().flatten().tolist()} <= {*slot}
    states, outputs = model.exact(rows, {1})
    close(found[:1], outputs)
    world.compare(slot, model.pieces(states[1], rows))


@pytest.mark.parametrize("kind", ["tiled, narrow states", "groups", "one group, narrow states"])
def test_rows_in_one_slice_leave_the_bits_of_rows_one_by_one(kind: str) -> None:
    """So drafts that are right change nothing, and narrow states do not depend on how a step is cut."""
    make, *settings = KINDS[kind]
    model = make(*settings)
    world, rows = World(model, 2), model.tokens(5)
    once, slot = world.slot(), world.slot()
    found = []
    for cuts, to in (((5,), once), ((1, 1, 2, 1), slot)):
        parts, before = [], 0
        for num, part in zip(cuts, rows.split(cuts), strict=True):
            world.prepare(
                world.step([Piece(before, num)], [(to if before else [-1] * world.width, to)]), [before + num]
            )
            parts.append(world.compute(part))
            before += num
        found.append((torch.cat(parts), *world.read(to)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
