"""A mixture's kernels against its definition in torch: routing, sorting, products, and the sum."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.runtime.activation import Activation, Clamp
from engine.runtime.cuda import experts, routing
from engine.runtime.cuda.experts import choose_tile, combine, down, gate_and_up
from engine.runtime.cuda.fp8_linear import Fp8Linear
from engine.runtime.cuda.packed import Rows
from engine.runtime.cuda.routing import route, sort_by_expert
from engine.runtime.execution.decode_graphs import DecodeGraphs
from engine.runtime.layers.mixture import MoE, Router
from engine.runtime.layers.model_config import MoEConfig
from engine.runtime.layers.parts import Maker
from engine.runtime.routing import GroupScoring, RouterConfig, Scoring
from engine.runtime.schemes.linear import Dense, Product, Scheme
from engine.runtime.weights.checkpoint import StoredTensor
from tests.cpu.model_driver import make_runner, request, serve, settings
from tests.cpu.test_models_families import CASES, load, write_tiny

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN and infinities, from NumPy
HIDDEN = 68


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers take their kernel under the interpreter, too."""
    monkeypatch.setattr("engine.runtime.layers.mixture.uses_triton", lambda _: True)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- routing -----------------------------------------------------------------------------------------------------------

ROUTERS = [
    RouterConfig(num_experts=60, num_chosen=4),
    RouterConfig(num_experts=8, num_chosen=2, is_normalised=True),
    RouterConfig(num_experts=32, num_chosen=8, is_normalised=True, scale=0.5),
    RouterConfig(num_experts=1, num_chosen=1),
    RouterConfig(num_experts=20, num_chosen=6, num_groups=4, num_chosen_groups=2, scale=16.0),
    RouterConfig(num_experts=48, num_chosen=6, scoring=Scoring.SIGMOID, has_correction=True),
    RouterConfig(
        num_experts=96,
        num_chosen=8,
        scoring=Scoring.SIGMOID,
        is_normalised=True,
        scale=2.5,
        has_correction=True,
        num_groups=8,
        num_chosen_groups=4,
        group_scoring=GroupScoring.TOP2,
    ),
]


def router_of(config: RouterConfig) -> tuple[Router, Tensor | None]:
    """A router whose logits are its input, as the definition has it on any device."""
    make = Maker(torch.float32, DEVICE, Scheme(), loads=[], targets={})
    router = Router(config, config.num_experts, make)
    router.linear.product = Dense(torch.eye(config.num_experts, device=DEVICE))
    if router.correction is not None:
        router.correction.copy_(torch.randn(config.num_experts, generator=generator(3)) / 4)
    return router, router.correction


@pytest.mark.parametrize("config", ROUTERS, ids=lambda config: f"{config.num_experts}-{config.num_chosen}")
def test_a_token_gets_the_definitions_experts(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.layers.mixture.uses_triton", lambda _: False)
    router, correction = router_of(config)
    logits = torch.randn(9, config.num_experts, generator=generator(1)) * 3
    logits[1] = 0.0  # all are equal
    logits[2] = logits[2].round()  # many are
    if config.scoring is Scoring.SOFTMAX:
        logits[3] = torch.arange(config.num_experts) * -150.0  # probabilities underflow
    logits = logits.to(DEVICE)
    weights, chosen = router(logits)
    found_weights, found = route(logits, correction, config)
    assert found.tolist() == chosen.tolist()
    torch.testing.assert_close(found_weights, weights, atol=1e-6, rtol=1e-5)


def test_logits_that_are_not_numbers_choose_experts_that_exist() -> None:
    logits = torch.full((2, 6), torch.nan, device=DEVICE)
    logits[1, :5] = 0.0
    weights, chosen = route(logits, None, RouterConfig(num_experts=6, num_chosen=3))
    assert chosen.tolist() == [[0, 1, 2], [5, 0, 1]]
    assert weights.isnan().all()


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "rows"),
    [(1, 1, 1, 16), (1, 8, 60, 16), (0, 2, 4, 16), (7, 3, 5, 4), (300, 6, 16, 64)],
)
def test_pairs_are_sorted_by_expert(num_tokens: int, num_chosen: int, num_experts: int, rows: int) -> None:
    scores = torch.rand(num_tokens, num_experts, generator=generator(5))
    scores[:, num_experts // 2] -= 2  # an expert that few or none choose
    chosen = scores.topk(num_chosen).indices.int().to(DEVICE)
    order = sort_by_expert(chosen, num_experts, rows)
    expected = chosen.flatten().long().argsort(stable=True)
    assert order.pairs.tolist() == expected.tolist()
    assert order.places.tolist() == expected.argsort().tolist()
    ends = chosen.flatten().long().bincount(minlength=num_experts).cumsum(0)
    assert order.ends.tolist() == ends.tolist()
    tiles, begin = [], 0
    for expert, end in enumerate(ends.tolist()):
        tiles += [[expert, first, min(first + rows, end)] for first in range(begin, end, rows)]
        begin = end
    assert order.num_tiles.tolist() == [len(tiles)]
    assert order.tiles[: len(tiles)].tolist() == tiles
    assert len(tiles) <= len(order.tiles)


# -- experts -----------------------------------------------------------------------------------------------------------


def mixture_of(config: MoEConfig, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> MoE:
    """A mixture with random weights and its experts in stacks, as it is loaded on CUDA."""
    make = Maker(dtype, DEVICE, Scheme(), loads=[], targets={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.runtime.schemes.linear.pack", lambda weight, bias, _: Dense(weight, bias))
        moe = MoE(config, HIDDEN, make)
        numbers = generator(2)
        for each in make.loads:
            drawn = {name: torch.randn(shape, generator=numbers) * 0.2 for name, shape in each.shapes.items()}
            tensors = {
                name: tensor if "gate.weight" in name else tensor.to(rounded_to or dtype)
                for name, tensor in drawn.items()
            }
            each.take({name: stored(name, tensor) for name, tensor in tensors.items()})
    moe.stack()
    assert moe.experts is not None
    return moe


def stored(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(name, tuple(tensor.shape), 0, "", partial(Tensor.copy_, other=tensor))  # type: ignore[call-arg]


PLAIN = MoEConfig(router=RouterConfig(num_experts=6, num_chosen=3), width=24, activation=Activation.SILU)
SHARED = MoEConfig(
    router=RouterConfig(num_experts=5, num_chosen=2, is_normalised=True),
    width=96,
    activation=Activation.GELU_TANH,
    shared_width=48,
    has_shared_gate=True,
)
GPT_OSS = MoEConfig(
    router=RouterConfig(num_experts=4, num_chosen=4, is_normalised=True, has_bias=True),
    width=64,
    activation=Activation.SILU,
    clamp=Clamp(1.702, 1.0),
    has_bias=True,
)
UNGATED = MoEConfig(
    router=RouterConfig(num_experts=6, num_chosen=2, scoring=Scoring.SIGMOID, has_correction=True),
    width=40,
    activation=Activation.RELU2,
    shared_width=24,
)
LATENT = replace(UNGATED, latent_width=36)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (PLAIN, torch.float32),
        (PLAIN, torch.bfloat16),
        (SHARED, torch.bfloat16),
        (GPT_OSS, torch.float16),
        (UNGATED, torch.float32),
        (LATENT, torch.bfloat16),
    ],
    ids=["plain", "plain_bf16", "shared_bf16", "gpt_oss_f16", "ungated", "latent_bf16"],
)
def test_a_mixture_equals_its_definition(config: MoEConfig, dtype: torch.dtype) -> None:
    """With experts that no token chooses, one token, and tiles that are not full."""
    moe, exact = mixture_of(config, dtype), mixture_of(config, torch.float32, rounded_to=dtype)
    for num_tokens in (1, 9):
        x = torch.randn(num_tokens, HIDDEN, generator=generator(num_tokens)).to(DEVICE, dtype)
        found, expected = moe(x), exact._total(x.float())
        assert found.dtype == dtype
        # The inner numbers are rounded once, and the result once.
        assert (found - expected).abs().max() <= (16 if dtype == torch.float32 else 1) * torch.finfo(
            dtype
        ).eps * expected.abs().max()


def test_experts_in_fp8_are_multiplied_as_they_are_stored() -> None:
    """Numbers of e4m3 with a scale a row, which no product of inputs in 16 bits needs to round again."""
    moe, config = mixture_of(PLAIN, torch.bfloat16), PLAIN.router
    numbers = generator(6)
    for linear in (*moe.gate_up, *moe.down):
        assert isinstance(linear.product, Dense)
        shape = linear.product.weight.shape
        packed = Fp8Linear(torch.randn(shape, generator=numbers).to(DEVICE).to(torch.float8_e4m3fn), None)
        packed.scales.copy_(torch.rand(shape[0], generator=numbers) / 4 + 0.1)
        linear.product = packed
    x = torch.randn(5, HIDDEN, generator=numbers).to(DEVICE, torch.bfloat16)
    wide = mixture_of(PLAIN, torch.float32)
    for wide_linear, linear in zip((*wide.gate_up, *wide.down), (*moe.gate_up, *moe.down), strict=True):
        assert isinstance(wide_linear.product, Dense)
        assert isinstance(linear.product, Fp8Linear)
        wide_linear.product.weight.copy_(linear.product.weight.float() * linear.product.scales[:, None])
    moe.stack()
    assert moe.experts is not None
    weights, chosen = moe.router(x)
    assert chosen.shape == (5, config.num_chosen)
    expected = wide.experts(x.float(), weights, chosen) if wide.experts else x
    assert (moe.experts(x, weights, chosen) - expected).abs().max() <= 2**-7 * expected.abs().max()
    linears = (moe.gate_up[1].product, moe.experts._gate_up.numbers)
    assert isinstance(linears[0], Fp8Linear)
    assert linears[0].weight.data_ptr() == linears[1][1].data_ptr()  # held once


def test_matrices_of_different_kinds_are_left_to_torch() -> None:
    moe = mixture_of(PLAIN, torch.bfloat16)
    moe.down[2].product = lambda x: x
    moe.stack()
    assert moe.experts is None


def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    moe = mixture_of(PLAIN, torch.bfloat16)
    x = torch.randn(9, HIDDEN, generator=generator(4)).to(DEVICE, torch.bfloat16)
    together = moe(x)
    assert torch.equal(together[[0, 8]], torch.cat([moe(x[[at]]) for at in (0, 8)]))


@pytest.mark.parametrize("config", [GPT_OSS, UNGATED], ids=["gpt_oss", "ungated"])
def test_a_broken_row_stays_alone_and_broken(config: MoEConfig) -> None:
    moe = mixture_of(config, torch.float32)
    x = torch.randn(6, HIDDEN, generator=generator(4)).to(DEVICE)
    expected = moe(x)
    x[2] = torch.nan
    found = moe(x)
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("num_pairs", [8, 64 * 17, 64 * 65])
def test_every_tile_computes_the_same(num_pairs: int) -> None:
    """Those for many tokens, too, which are chosen by the number of pairs."""
    moe, config = mixture_of(PLAIN, torch.float32), PLAIN.router
    assert moe.experts is not None
    gates, last = moe.experts._gate_up, moe.experts._down
    tile = choose_tile(num_pairs * 6 // 64, gates, 4, is_gated=True)
    x = torch.randn(20, HIDDEN, generator=generator(4)).to(DEVICE)
    weights, chosen = moe.router(x)
    order = sort_by_expert(chosen, config.num_experts, tile.rows)
    inner = gate_and_up(x, gates, order, config.num_chosen, PLAIN.activation, tile)
    second = choose_tile(num_pairs * 6 // 64, last, 4, is_gated=False)
    found = combine(down(inner, last, order, second), order, weights, x.dtype)
    torch.testing.assert_close(found, moe._total(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("itemsize", "is_gated"), list(product((2, 4), (True, False))))
def test_tiles_fit_every_gpu(itemsize: int, is_gated: bool) -> None:
    for num_pairs, num_inputs in product((1, 16 * 64, 16 * 64 + 1, 64 * 65, 10**6), (64, 1408, 2880, 4096, 40)):
        stack = Rows(torch.empty((64, 8, num_inputs), device="meta"))
        tile = choose_tile(num_pairs, stack, itemsize, is_gated=is_gated)
        rows = tile.rows + tile.outputs * (2 if is_gated else 1)
        assert rows * tile.inputs * itemsize * tile.stages <= 99 << 10 or tile.rows > 32
        assert num_inputs % tile.inputs == 0 or num_inputs == 40


@pytest.mark.parametrize("config", [PLAIN, SHARED, GPT_OSS, LATENT], ids=["plain", "shared", "gpt_oss", "latent"])
def test_nothing_is_read_on_the_host(config: MoEConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a graph can hold it. Tensors without memory have shapes alone; the kernels do not run."""
    launched: list[str] = []
    moe = mixture_of(config, torch.bfloat16)
    assert moe.experts is not None
    for module, names in (
        (routing, ("_route_kernel", "_sort_kernel")),
        (experts, ("_expert_kernel", "_combine_kernel")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, defaultdict(lambda n=name: lambda *_, **__: launched.append(n)))
    monkeypatch.setattr(Tensor, "data_ptr", lambda _: pytest.fail("no memory"))
    moe.router.linear.product = without_memory(moe.router.linear.product)
    shared = (moe.shared_gate_up, moe.shared_down, moe.shared_gate, *(moe.latents or ()))
    for each in [each for each in shared if each is not None]:
        each.product = without_memory(each.product)
    moe.experts._gate_up, moe.experts._down = (
        each.on(torch.device("meta")) for each in (moe.experts._gate_up, moe.experts._down)
    )
    for num_tokens in (1, 64 * 65):
        out = moe(torch.empty((num_tokens, HIDDEN), dtype=torch.bfloat16, device="meta"))
        assert (out.shape, out.dtype, out.device.type) == ((num_tokens, HIDDEN), torch.bfloat16, "meta")
    step = ["_route_kernel", "_sort_kernel", "_expert_kernel", "_expert_kernel", "_combine_kernel"]
    assert launched == step * 2


def without_memory(made: Product) -> Dense:
    assert isinstance(made, Dense)
    return Dense(made.weight.to("meta"), None if made.bias is None else made.bias.to("meta"))


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="a model on a CPU needs Triton's interpreter; tests/gpu serves this one"
)
def test_graphs_of_mixtures_over_latents_say_what_the_steps_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device a graph is its computation: padded rows go through the router and the experts, too."""
    write_tiny(CASES["deepseek_v3"], tmp_path)
    requests = [request(f"r{i}", list(range(3, 9 + 4 * i)), max_tokens=4) for i in range(3)]
    config = settings(max_num_seqs=4, max_num_batched_tokens=16)
    expected = serve(load(tmp_path), config, requests, apart=0)
    monkeypatch.setattr("engine.runtime.schemes.linear.pack", lambda weight, bias, _: Dense(weight, bias))
    monkeypatch.setattr("engine.runtime.schemes.linear.native", lambda: None)  # as on CUDA
    model, launched = load(tmp_path), []
    layers = [layer._feed_forward for layer in model._layers if isinstance(layer._feed_forward, MoE)]
    assert not model.capabilities.graphs
    for layer in layers:
        layer.mixture = None
        layer.stack()
    assert model.capabilities.graphs
    runner, launch = make_runner(model, config, "triton"), DecodeGraphs.launch
    runner.capture(lambda _: None)
    monkeypatch.setattr(
        DecodeGraphs, "launch", lambda self, rows: (launched.append(rows.fields.shape[1]), launch(self, rows))[1]
    )
    assert serve(model, config, requests, apart=0, runner=runner).ids == expected.ids
    assert 3 in launched  # rows, in a graph of four
