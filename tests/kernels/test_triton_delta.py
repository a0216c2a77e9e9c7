"""Recurrent layers' kernels against their rules in float64: chunks of any length, slots anywhere, drafts, replays, padding."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.runtime.cuda.delta import DeltaWeights, gated_delta
from engine.runtime.cuda.delta_state import DeltaSizes
from engine.runtime.cuda.short_conv import convolve
from engine.runtime.kv_layout import DeviceState, Pieces, RecurrentSpec, StateTensors, StepStates
from engine.runtime.layers.convolution import tail_pieces
from engine.runtime.pool.states import LayerState, StatePool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS, MAX_DRAFTS, BLOCK_BYTES = 1e-6, 3, 1600
# key heads, value heads, their sizes, taps, value heads that share a key head; and the columns of a piece.
NEIGHBOURS, TILED = (DeltaSizes(1, 2, 16, 24, 4, 2), 8), (DeltaSizes(2, 4, 12, 32, 3, 1), 32)


class Piece(NamedTuple):
    """A slice of a step: positions before it, its rows, and what a step with drafts leaves to the next."""

    before: int
    num: int
    drafts: int = 0
    replays: int = 0
    moves: bool = True  # writes another slot than it reads


class Model:
    """A layer's numbers, and the rule in float64."""

    def __init__(self, sizes: DeltaSizes, columns: int, dtype: torch.dtype) -> None:
        self.sizes, self.dtype = sizes, dtype
        heads, width = sizes.num_v_heads, sizes.num_v_heads * sizes.v_dim
        self.widths = (sizes.channels, width, heads, heads)
        norm = 1 + torch.randn(sizes.v_dim) / 4
        self.weights = DeltaWeights(
            torch.randn(sizes.channels, 1, sizes.kernel) / 2, -torch.rand(heads) * 4, torch.randn(heads) - 2, norm
        )
        matrices = Pieces(width // columns, (sizes.k_dim, columns), torch.float32)
        tails = tail_pieces(sizes.channels, sizes.kernel, dtype)
        self.spec = RecurrentSpec((matrices, tails), sum(self.widths), dtype)

    def tokens(self, num: int) -> Tensor:
        """Projected rows, of which some neighbours are equal, as where a text repeats a token."""
        rows = torch.randn(num, sum(self.widths))
        rows[torch.arange(num) % 80 < 40] = rows[0].clone()
        return rows.to(self.dtype)

    def exact(self, rows: Tensor) -> tuple[list[Tensor], Tensor]:
        """The matrices [heads, k_dim, v_dim] before each row and after the last, and the outputs."""
        sizes, (conv, decay, bias, norm) = self.sizes, (weight.double() for weight in self.weights)
        qkv, z, b, a = rows.double().split(self.widths, 1)
        padded = torch.cat((qkv.new_zeros(sizes.kernel - 1, sizes.channels), qkv))
        mixed = torch.stack([(padded[t : t + sizes.kernel].T * conv[:, 0]).sum(1) for t in range(len(rows))])
        q, k, v = torch.nn.functional.silu(mixed).split(
            (width := sizes.num_k_heads * sizes.k_dim, width, self.widths[1]), 1
        )
        q, k = (x.unflatten(1, (-1, sizes.k_dim)) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        heads = [head // sizes.shared % sizes.num_k_heads for head in range(sizes.num_v_heads)]
        q, k, v = q[:, heads] / math.sqrt(sizes.k_dim), k[:, heads], v.unflatten(1, (-1, sizes.v_dim))
        states, out = [v.new_zeros(sizes.num_v_heads, sizes.k_dim, sizes.v_dim)], torch.empty_like(v)
        for t in range(len(rows)):
            s = states[-1] * (decay * torch.nn.functional.softplus(a[t] + bias)).exp()[:, None, None]
            change = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * b[t].sigmoid()[:, None]
            states.append(s + k[t, :, :, None] * change[:, None])
            out[t] = torch.einsum("hkv,hk->hv", states[-1], q[t])
        out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * norm
        return states, out.flatten(1) * torch.nn.functional.silu(z)

    def pieces(self, state: Tensor, rows: Tensor) -> list[Tensor]:
        """A state as it lies in its slot, after some rows."""
        cut = state.unflatten(2, (-1, self.spec.pieces[0].shape[1])).transpose(1, 2).flatten(0, 1)
        return [cut, tail_of(self.spec, rows)]

    def compute(self, rows: Tensor, state: DeviceState) -> Tensor:
        weights = DeltaWeights(*(weight.to(DEVICE) for weight in self.weights))
        return gated_delta(rows, state, self.sizes, weights, EPS)


class Convolution:
    """The same of a short convolution, whose rows are inputs and gates; its state is the inputs alone."""

    def __init__(self, channels: int, kernel: int, dtype: torch.dtype) -> None:
        self.dtype, self.channels = dtype, channels
        self.weight, self.bias = torch.randn(channels, 1, kernel), torch.randn(channels) if kernel > 3 else None
        self.spec = RecurrentSpec((tail_pieces(channels, kernel, dtype),), channels, dtype)

    def tokens(self, num: int) -> Tensor:
        return torch.randn(num, 2 * self.channels).to(self.dtype)

    def exact(self, rows: Tensor) -> tuple[list[None], Tensor]:
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

    def __init__(self, model: Model | Convolution, num_sequences: int) -> None:
        self.model = model
        blocks = torch.full((40 * num_sequences, BLOCK_BYTES), 0x7F, dtype=torch.uint8, device=DEVICE)  # large numbers
        self.states = StatePool([model.spec], blocks, num_sequences + 1, MAX_DRAFTS)
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
        exact = [model.exact(each) for each in rows]
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
                self.layer.write(index, [values.to(DEVICE, kind.dtype) for kind, values in held], brings_up=True)
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
            close(out, outputs[piece.before :])
            kept = piece.before + piece.num - piece.drafts
            assert torch.equal(self.layer.kept[step.rows[index], : piece.drafts].cpu(), each[kept:, : model.spec.row])
            self.compare(slots[index][1], model.pieces(states[kept], each[:kept]))
            if piece.replays and slots[index][0][0] >= 0 and piece.moves:
                self.compare(slots[index][0], model.pieces(states[piece.before], each[: piece.before]))

    def compare(self, slot: list[int], expected: list[Tensor]) -> None:
        self.prepare(self.step([Piece(1, 1)], [(slot, slot)]), [2])
        *matrices, tails = (each.cpu() for each in self.layer.read(0))
        for found, exact in zip(matrices, expected, strict=False):
            close(found, exact)
        assert torch.equal(tails, expected[-1].to(tails.dtype))


def close(found: Tensor, exact: Tensor) -> None:
    error = (found.double() - exact).abs()
    allowed = torch.finfo(found.dtype).eps * exact.abs() + 2e-5 * (1 + exact.abs())
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


@pytest.mark.parametrize("kind", ["neighbours", "long convolution"])
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
    states, outputs = model.exact(rows)
    close(found[:1], outputs)
    world.compare(slot, model.pieces(states[1], rows))
