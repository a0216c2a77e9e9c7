"""Mixtures of experts in the native library against a definition in float64, on every instruction set.

The definition below says what quantised products do: inputs are rounded to bytes in blocks of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from engine.files.gguf_kinds import Kind
from engine.runtime.native.build import Isa
from engine.runtime.native.library import Library, LinearArgs, RouterArgs
from engine.runtime.native.mixture import Mixture
from engine.runtime.native.ops import NativeLinear
from engine.runtime.native.rows import StoredRows
from tests.cpu.gguf_rows import floats_of, random_rows
from tests.cpu.native_linears import int8, packed, quantised

HIDDEN, WIDTH, SHARED_WIDTH, NUM_EXPERTS, NUM_CHOSEN = 256, 256, 512, 8, 3
SOFTMAX, SIGMOID, MAX, TOP2 = 0, 1, 0, 1
ROUTINGS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "mixtral": {"is_normalised": True},
    "deepseek2": {"num_groups": 4, "num_chosen_groups": 2, "scale": 1.5},
    "deepseek3": {
        "scoring": SIGMOID, "is_normalised": True, "num_groups": 4, "num_chosen_groups": 2, "group_scoring": TOP2,
        "scale": 2.5,
    },
    "glm4": {"scoring": SIGMOID},
}  # fmt: skip
KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_1, Kind.Q4_K, Kind.Q6_K, Kind.IQ2_XS, Kind.IQ1_S]
FORMATS = ["float32", "bfloat16", "int8", *(kind.name for kind in KINDS)]
ERRORS = {"float32": 5e-6, "bfloat16": 4e-3}  # of quantised formats: QUANTISED, where a byte may round the other way
QUANTISED = 3e-3
BFLOAT16 = 2.1e-3  # of weights


class Weight(NamedTuple):
    """A packed matrix, its values, and how its inputs are rounded."""

    packed: NativeLinear
    values: Tensor
    bias: Tensor | None
    rounded: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product in float64."""
        return F.linear(self.rounded(x).double(), self.values.double(), self.bias)


def to_bytes(x: Tensor) -> Tensor:
    """Round each block of 32 inputs to integers up to 127 times a scale."""
    blocks = x.float().unflatten(1, (-1, 32))
    peak = blocks.abs().amax(-1, keepdim=True)
    return ((blocks * (127 / peak)).round().double() * (peak / 127)).flatten(1)


def make(library: Library, shape: tuple[int, int], name: str, *, activation: int = 0, has_bias: bool = False) -> Weight:
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    values = (torch.randn(shape) / 16).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    wide = None if bias is None else bias.double()
    if name in ("float32", "bfloat16"):
        return Weight(packed(library, values, bias, activation), values, wide, Tensor.double)
    if name == "int8":
        scale = values.float().abs().amax(1, keepdim=True) / 127
        rounded = int8(library, values, bias, activation)
        # AMX rounds inputs to 16 bits, which the errors below do not see.
        inputs = Tensor.double if library.isa is Isa.AMX else to_bytes
        return Weight(rounded, (values / scale).round() * scale, wide, inputs)
    kind = Kind[name]
    rows = random_rows(shape[0], shape[1], kind, scale=2**-9)
    rows = rows[torch.randperm(shape[0]).numpy()]  # each matrix of the test is another one
    stored = quantised(library, [StoredRows(int(kind), rows)], shape[1], dtype, bias, activation)
    if library.isa is not Isa.AMX:
        return Weight(stored, floats_of(rows, kind), wide, to_bytes)
    unpacked = quantised(library, [StoredRows(int(kind), rows)], shape[1], dtype)(torch.eye(shape[1], dtype=dtype)).T
    assert ((unpacked - floats_of(rows, kind)).norm() / unpacked.norm()) < BFLOAT16
    return Weight(stored, unpacked, wide, Tensor.bfloat16)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Model(NamedTuple):
    mixture: Mixture
    expected: Callable[[Tensor], tuple[Tensor, list[list[int]]]]


def choose(logits: Tensor, correction: Tensor, routing: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Choose one row's experts by sorting, in float64."""
    is_sigmoid = routing.get("scoring") == SIGMOID
    scores = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, 0)
    choice = (scores + correction).tolist()
    size = NUM_EXPERTS // routing.get("num_groups", 1)
    groups = [choice[i : i + size] for i in range(0, NUM_EXPERTS, size)]
    best = [sum(sorted(group)[-(2 if routing.get("group_scoring") == TOP2 else 1) :]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: (-best[g], g))[: routing.get("num_chosen_groups", 1)]
    order = sorted(range(NUM_EXPERTS), key=lambda e: (e // size not in kept, -choice[e], e))[:NUM_CHOSEN]
    weights = scores[order]
    if routing.get("is_normalised"):
        weights = weights / weights.sum()
    return order, (weights * routing.get("scale", 1.0)).tolist()


@cache
def make_model(
    library: Library,
    name: str,
    routing_name: str,
    *,
    has_shared: bool = False,
    is_clamped: bool = False,
    has_bias: bool = False,
    down_name: str | None = None,
) -> Model:
    """Return a mixture, packed once for all instruction sets."""
    routing = ROUTINGS[routing_name]
    torch.manual_seed(7)
    code, gate_up, down = 0 if is_clamped else 1, [], []
    for _ in range(NUM_EXPERTS):
        gate_up.append(make(library, (2 * WIDTH, HIDDEN), name, activation=code, has_bias=has_bias))
        down.append(make(library, (HIDDEN, WIDTH), down_name or name, has_bias=has_bias))
    gate = make(library, (NUM_EXPERTS, HIDDEN), "float32", has_bias=has_bias)
    correction = torch.randn(NUM_EXPERTS) / 4 if routing.get("scoring") == SIGMOID else None
    shared, shared_gate = [], None
    if has_shared:
        shared = [
            make(library, (2 * SHARED_WIDTH, HIDDEN), name, activation=code, has_bias=has_bias),
            make(library, (HIDDEN, SHARED_WIDTH), name, has_bias=has_bias),
        ]
        shared_gate = make(library, (1, HIDDEN), "float32")
    router = RouterArgs(gate.packed.args, None, NUM_EXPERTS, NUM_CHOSEN, 1, 1, scale=1.0)
    for field, value in routing.items():
        setattr(router, field, value)
    mixture = Mixture(
        library,
        router,
        [weight.packed.args for weight in (*gate_up, *shared[:1])],
        [weight.packed.args for weight in (*down, *shared[1:])],
        correction=correction,
        shared_gate=None if shared_gate is None else shared_gate.packed.args,
        clamp=(1.702, 7.0) if is_clamped else None,
    )

    def mlp(x: Tensor, first: Weight, second: Weight) -> Tensor:
        inner = (clamped if is_clamped else lambda gate, up: F.silu(gate) * up)(*first(x).chunk(2, 1))
        return second(inner.to(x.dtype))

    def expected(x: Tensor) -> tuple[Tensor, list[list[int]]]:
        results = torch.stack([mlp(x, *pair) for pair in zip(gate_up, down, strict=True)])
        choices = [choose(row, torch.zeros(()) if correction is None else correction, routing) for row in gate(x)]
        y = torch.stack([
            sum((w * results[e, row] for e, w in zip(*choice, strict=True)), torch.zeros(HIDDEN).double())
            for row, choice in enumerate(choices)
        ])  # fmt: skip
        if shared:
            y += torch.sigmoid(shared_gate(x)) * mlp(x, *shared)
        return y, [chosen for chosen, _ in choices]

    return Model(mixture, expected)


@cache
def expected_of(model: Model, name: str, factor: float) -> tuple[Tensor, list[list[int]]]:
    return model.expected(rows(name) * factor)


def check(library: Library, model: Model, name: str, *, factor: float = 1.0) -> None:
    expected, choices = expected_of(model, name, factor)
    x, error = rows(name) * factor, ERRORS.get(name, QUANTISED)
    y, chosen, _ = model.mixture.explain(x)
    assert chosen[:, :NUM_CHOSEN].tolist() == choices
    assert ((y - expected).norm(dim=1) / expected.norm(dim=1)).max() < error
    for begin, end in ((0, 1), (63, 64), (5, 12), (1, 64)):
        library.use_threads(1 + begin % 3)
        assert torch.equal(model.mixture(x[begin:end]), y[begin:end])


def rows(name: str, num_rows: int = 64) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(num_rows, HIDDEN).to(torch.bfloat16 if name == "bfloat16" else torch.float32)


@pytest.mark.in_turns
@pytest.mark.parametrize("name", FORMATS)
def test_every_row_format_with_a_shared_expert(library: Library, name: str) -> None:
    model = make_model(library, name, "qwen2", has_shared=True)
    check(library, model, name)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(library: Library, routing: str) -> None:
    check(library, make_model(library, "float32", routing), "float32")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "Q4_0"])
def test_clamp_and_biases(library: Library, name: str) -> None:
    """As gpt-oss has them; the rows are so large that the clamp is at work."""
    model = make_model(library, name, "mixtral", is_clamped=True, has_bias=True, has_shared=name != "Q4_0")
    check(library, model, name, factor=8.0)


def test_matrices_of_two_formats(library: Library) -> None:
    model = make_model(library, "Q4_K", "mixtral", down_name="Q6_K")
    check(library, model, "Q4_K")


def test_ties_go_to_the_lowest_index(library: Library) -> None:
    gate = packed(library, torch.ones(NUM_EXPERTS, HIDDEN))
    one = make(library, (2 * WIDTH, HIDDEN), "float32", activation=1), make(library, (HIDDEN, WIDTH), "float32")
    for num_groups, scoring in ((1, SOFTMAX), (4, SOFTMAX), (4, SIGMOID)):
        router = RouterArgs(gate.args, None, NUM_EXPERTS, NUM_CHOSEN, num_groups, -(-num_groups // 2), scoring, TOP2)
        router.scale = 1.0
        linears = ([weight.packed.args] * NUM_EXPERTS for weight in one)
        _, chosen, weights = Mixture(library, router, *linears).explain(torch.randn(5, HIDDEN))
        assert chosen.tolist() == [[0, 1, 2]] * 5
        if scoring == SOFTMAX:
            assert torch.equal(weights, torch.full((5, NUM_CHOSEN), 1 / NUM_EXPERTS))


def test_experts_of_different_formats(library: Library) -> None:
    """A scheme may leave some experts as they are."""
    torch.manual_seed(1)
    names = ("float32", "Q4_0", "int8", "Q4_1") * 2
    gate_up = [make(library, (2 * WIDTH, HIDDEN), name, activation=1) for name in names]
    down = [make(library, (HIDDEN, WIDTH), name) for name in reversed(names)]
    gate = make(library, (NUM_EXPERTS, HIDDEN), "float32")
    router = RouterArgs(gate.packed.args, None, NUM_EXPERTS, NUM_EXPERTS, 1, 1, scale=1.0)
    linears: list[list[LinearArgs]] = [[weight.packed.args for weight in weights] for weights in (gate_up, down)]
    mixture, x = Mixture(library, router, *linears), rows("int8")
    expected = torch.zeros(len(x), HIDDEN).double()
    for share, first, second in zip(torch.softmax(gate(x), 1).T, gate_up, down, strict=True):
        gates, ups = first(x).chunk(2, 1)
        expected += share[:, None] * second((F.silu(gates) * ups).float())
    y = mixture(x)
    assert (y - expected).norm() < QUANTISED * expected.norm()
    assert torch.equal(mixture(x[9:10]), y[9:10])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_sizes_that_fill_no_block(library: Library, name: str) -> None:
    """Against the same matrices' own products."""
    torch.manual_seed(2)
    hidden, width = 50, 34
    gate_up = [make(library, (2 * width, hidden), name, activation=1).packed for _ in range(NUM_EXPERTS)]
    down = [make(library, (hidden, width), name).packed for _ in range(NUM_EXPERTS)]
    gate = make(library, (NUM_EXPERTS, hidden), "float32")
    router = RouterArgs(gate.packed.args, None, NUM_EXPERTS, NUM_CHOSEN, 1, 1, is_normalised=1, scale=1.0)
    mixture = Mixture(library, router, [linear.args for linear in gate_up], [linear.args for linear in down])
    x = rows(name)[:, :hidden].contiguous()
    y, chosen, weights = mixture.explain(x)
    results = torch.stack([second(first(x), torch.float32) for first, second in zip(gate_up, down, strict=True)])
    picked = results[chosen.T.long(), torch.arange(len(x))]  # [ranks, rows, hidden]
    torch.testing.assert_close(y, (picked * weights.T[..., None]).sum(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(mixture(x[7:8]), y[7:8])


def test_what_is_not_a_number_stays_in_its_row(library: Library) -> None:
    model, x = make_model(library, "Q4_0", "deepseek3"), rows("Q4_0")
    y = model.mixture(x)
    x[3, 7], x[5] = torch.nan, torch.inf
    spoilt = model.mixture(x)
    assert not spoilt[[3, 5]].isfinite().any()
    others = [row for row in range(len(x)) if row not in (3, 5)]
    assert torch.equal(spoilt[others], y[others])


def test_more_rows_than_are_computed_together(library: Library) -> None:
    model, x = make_model(library, "Q4_0", "mixtral"), rows("Q4_0", 1030)
    y = model.mixture(x)
    assert torch.equal(model.mixture(x[1020:]), y[1020:])
