"""The runner for CUDA waits for all that it reads and overwrites, on a device that compares every access.

The device is that of tests/fake_device.py. Answers are those of a CPU. Then each wait of the engine is left out in turn, and
mistakes are made on purpose: the same runs show each of them. Graphs and kernels are in tests/kernels/test_triton_order.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StateMove, StepPlan, plan_prompts
from engine.core.types import BeamParams, Request, SamplingParams
from engine.runtime.attention.table import load_backend
from engine.runtime.cuda import available
from engine.runtime.execution.synthetic import synthetic_row, warm_up_plan
from engine.runtime.layers.parts import LayerAttention
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafter import Drafter
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.settings.engine_config import EngineConfig
from tests.cpu.model_driver import CPU, TinyModel, make_runner, request, serve, settings, state_blocks
from tests.cpu.test_constraint import END, StepGrammar
from tests.cpu.test_models_families import Case, write_tiny
from tests.fake_device import CUDA, FakeDevice, Graph, fake_device
from tests.fake_order import OrderError

_random = random.Random(3)
SHARED = [_random.randrange(61) for _ in range(9)]
PROMPTS = [[*SHARED, *(_random.randrange(61) for _ in range(length))] for length in (1, 6, 14, 3, 8)]
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "top_p": 0.7, "n": 2, "prompt_logprobs": 1},
    {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "logit_bias": ((3, 2.0),),
        "bad_words": ((4,),),
        "logprobs": 2,
    },
    {"temperature": 1.0, "seed": 5, "grammar": StepGrammar(reach=3), "eos_token_ids": frozenset({END})},
    {"beam": BeamParams(width=2), "logprobs": 0},
]
TIGHT = {"num_blocks": 17, "max_num_batched_tokens": 24, "num_host_blocks": 60}
Said = dict[tuple[str, int], Any]


def requests() -> list[Request]:
    return [
        request(f"r{i}", prompt, max_tokens=9, **wish)
        for i, (prompt, wish) in enumerate(zip(PROMPTS, WISHES, strict=True))
    ]


def draft_model(device: torch.device) -> DraftModel:
    model, backend, config = TinyModel(device=device), load_backend("torch", device), settings(**TIGHT)
    pool = KVCache(model.states, backend, num_blocks=17, block_size=config.block_size, dtype=model.dtype, device=device)
    return DraftModel(model, backend, pool, config, device)


def answers(
    device: torch.device,
    depth: int = 0,
    drafter: Callable[[torch.device], Drafter] | None = None,
    model: type[TinyModel] = TinyModel,
) -> Said:
    """Serve requests that share a prefix, are preempted, and ask for all kinds of results."""
    config = settings(**TIGHT, num_speculative_tokens=3 if drafter else 0)
    scheduler, served_model = Scheduler(config), model(device=device)
    runner = make_runner(served_model, config, "torch", device=device)
    if drafter is not None:
        runner.speculate(drafter(device))
    served = serve(served_model, config, requests(), depth=depth, apart=1, scheduler=scheduler, runner=runner)
    assert drafter is not None or scheduler.stats.preempted[PreemptionKind.SWAP] > 0
    assert scheduler.stats.prefix_hit_tokens > 0
    runner.close()
    return dict(served.ids)


def ahead(device: torch.device) -> Said:
    """Launch steps that swap, and wait for none of them before the last."""
    config = settings(**TIGHT)
    runner = make_runner(TinyModel(device=device), settings(num_blocks=17), "torch", device=device)
    host = runner.open_host_pool(6)
    steps, plain = [], [warm_up_plan(config, num_seqs=2, num_tokens=num) for num in (16, 12, 3, 8, 2, 5, 6)]
    swaps: list[dict[str, list[tuple[int, int]]]] = [
        {},
        {"swap_out": [(0, 0), (2, 1), (1, 2)]},
        {"swap_out": [(3, 3)]},
        {"swap_in": [(1, 0)]},
        {"swap_in": [(0, 5), (2, 6)]},
        {"swap_out": [(5, 4)]},
    ]
    for plan, swap in zip(plain, swaps, strict=False):
        steps.append(runner.run(plan._replace(**swap)))  # type: ignore[arg-type]
    host.finish_copies()
    rows = {("row", i): bytes(host.row(i)) for i in range(5)}
    steps.append(runner.run(plain[-1]._replace(swap_out=[(6, 5)])))
    runner.close()
    return rows | {("step", i): step.wait().token_ids for i, step in enumerate(steps)}


@cache
def tiny_granite() -> TemporaryDirectory[str]:
    """A model of one layer with a recurrent state, and one that attends."""
    folder = TemporaryDirectory()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4, "mamba_d_state": 8}
    experts = {"num_local_experts": 0, "shared_intermediate_size": 16}
    write_tiny(Case("GraniteMoeHybridConfig", sizes | layers | experts), Path(folder.name))
    return folder


def granite(device: torch.device) -> tuple[CausalLM, int]:
    """A model with recurrent layers, and the blocks of a state."""
    options = EngineConfig(model=tiny_granite().name, model_impl="quire", dtype="float32")
    model = load_model(options, device, torch.float32, lambda progress: None)
    return model, state_blocks(model, 4)


def recurrent(device: torch.device) -> Said:
    """Serve a model whose states are gathered from the pool and written there, with drafts that are taken in later."""
    model, size = granite(device)
    sizes = {"num_blocks": 20 + 4 * size, "state_blocks": size, "max_num_batched_tokens": 24, "max_model_len": 32}
    config = settings(**sizes, max_num_seqs=3, num_speculative_tokens=2)
    runner = make_runner(model, config, "torch", device=device)
    runner.speculate(TextDrafter(1, 2))
    asked = [request(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(PROMPTS[:3])]
    served = serve(model, config, asked, apart=1, runner=runner)
    runner.close()
    return dict(served.ids)


def swapped_states(device: torch.device) -> Said:
    """Serve it where a sequence and its state leave the pool and come back, beside steps in flight."""
    model, size = granite(device)
    sizes = {"num_blocks": 8 + 4 * size, "state_blocks": size, "num_host_blocks": 60, "max_model_len": 40}
    config = settings(**sizes, max_num_seqs=3, max_num_batched_tokens=24)
    runner, scheduler = make_runner(model, config, "torch", device=device), Scheduler(config)
    asked = [request(f"r{i}", [(7 * i + j) % 128 for j in range(5 + i)], max_tokens=20) for i in range(3)]
    served = serve(model, config, asked, depth=1, apart=1, scheduler=scheduler, runner=runner)
    assert scheduler.stats.preempted[PreemptionKind.SWAP] > 0
    runner.close()
    return dict(served.ids)


def state_from_below(device: torch.device) -> Said:
    """Go on with a recurrent state that the same step brings from host memory, which keeps no more of the sequence."""
    model, size = granite(device)
    config = settings(num_blocks=4 + 3 * size, state_blocks=size, max_num_seqs=2, max_model_len=16)
    left, arriving, written, paged = (tuple(range(at * size, (at + 1) * size)) for at in range(4))
    runner = make_runner(model, config, "torch", device=device)
    runner.open_host_pool(size)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    before, after = (synthetic_row(config, slot, num, paged[:3], params) for slot, num in enumerate((9, 10)))
    steps = [runner.run(plan_prompts([before], [9], [left]))]
    steps.append(runner.run(StepPlan(1, swap_out=list(zip(left, range(size), strict=True)))))
    plan = plan_prompts([after], [1], [written])._replace(states=(StateMove(1, arriving, written),))
    steps.append(runner.run(plan._replace(swap_in=list(zip(range(size), arriving, strict=True)))))
    said = {("step", at): step.wait().token_ids for at, step in enumerate(steps)}
    runner.close()
    return said


RUNS: dict[str, Callable[[torch.device], Said]] = {
    "overlapped": lambda device: answers(device, depth=1),
    "one by one": answers,
    "ahead": ahead,
    "n-gram drafts": lambda device: answers(device, drafter=lambda _: TextDrafter(1, 3)),
    "a draft model": lambda device: answers(device, drafter=draft_model),
    "recurrent states": recurrent,
    "swapped states": swapped_states,
    "a state from below": state_from_below,
}


# Drafts are read before they are checked. Without kernels the states of recurrent layers are found by numbers of the host.
_OF_STATES = {
    "engine/runtime/pool/states.py",
    *(f"engine/runtime/{name}.py" for name in ("weights/safetensors", "layers/mamba")),  # as it is loaded
}
WAITS = {
    "a draft model": {"engine/runtime/speculation/drafter.py"},
    "recurrent states": _OF_STATES,
    "swapped states": _OF_STATES,
    "a state from below": _OF_STATES,
}


def run(call: Callable[[torch.device], Said], dropped: str | None = None) -> tuple[Said, FakeDevice]:
    """Run on the device, with torch's operators in place of kernels."""
    with pytest.MonkeyPatch.context() as patch, fake_device(dropped) as device:
        patch.setattr(available, "has_triton", lambda device: False)
        return call(CUDA), device


@cache
def on_the_cpu(name: str) -> Said:
    return RUNS[name](CPU)


@pytest.mark.parametrize("name", RUNS)
def test_it_says_what_a_cpu_says(name: str) -> None:
    said, device = run(RUNS[name])
    assert said == on_the_cpu(name)
    assert device.num_launches > 50
    waits = {site.partition(":")[0] for site in device.hidden}
    assert waits == WAITS.get(name, set()), "the host is to wait for nothing but the results of a step"


def is_noticed(name: str, site: str) -> bool:
    """Return whether a run shows that it does not wait there."""
    try:
        return run(RUNS[name], site)[0] != on_the_cpu(name)
    except OrderError:
        return True


def test_no_wait_can_be_left_out() -> None:
    """Streams, events and the host wait for each other at these places; without any of them a run goes wrong."""
    runs = ("ahead", "overlapped")
    sites = frozenset[str]().union(*(run(RUNS[name])[1].sites for name in runs))
    assert len(sites) >= 12
    unneeded = {site for site in sites if not any(is_noticed(name, site) for name in runs)}
    assert not unneeded


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Aside(TinyModel):
    """Computes on a stream of its own, which waits for nothing."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            return super().logits(hidden, out)


class AsideAndUnawaited(TinyModel):
    """Computes on a stream of its own, for which nothing waits."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return super().logits(hidden, out)


class Forgetful(TinyModel):
    """Has another stream read what it frees."""

    side: torch.cuda.Stream | None = None
    tells_allocator = False

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        self.side = self.side or torch.cuda.Stream()
        copy = hidden.clone()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            copy.sum()
        if self.tells_allocator:
            copy.record_stream(self.side)
        del copy
        return super().logits(hidden, out)


class Careful(Forgetful):
    """Says so to the allocator."""

    tells_allocator = True


class Thrifty(TinyModel):
    """Copies through pinned memory that it uses for every step."""

    pinned: Tensor | None = None

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        if self.pinned is None:
            self.pinned = torch.empty(256, dtype=torch.int64, pin_memory=True)
        self.pinned.numpy()[: len(ids)] += 1
        positions = positions + 0 * self.pinned[: len(ids)].to(ids.device, non_blocking=True)
        return super().forward(ids, positions, attention, rows)


class Hasty(TinyModel):
    """Reads what it has copied to pinned memory."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        pinned = torch.empty(hidden.shape, pin_memory=True)
        pinned.copy_(hidden, non_blocking=True)
        return super().logits(hidden + 0 * pinned[0, 0].item(), out)


MISTAKES: dict[type[TinyModel], str] = {
    Aside: r"\(stream 2\) reads what .* \(stream 1\) writes, and does not wait for it",
    AsideAndUnawaited: r"\(stream 1\) \w+ what \w+ at \S+model_driver.py:\d+ \(stream \d+\) writes, and does not wait for it",
    Forgetful: r"may get the memory of clone at \S+, which sum at \S+ \(stream 2\) still uses",
    Thrifty: r"overwrote pinned memory from which a copy at \S+test_cuda_order.py:\d+ \(stream 1\) may not have copied yet",
    Hasty: r"item at \S+ \(the host\) reads what a copy at \S+ \(stream 1\) writes",
}


@pytest.mark.parametrize("model", MISTAKES, ids=lambda model: model.__name__)
def test_mistakes_are_refused(model: type[TinyModel]) -> None:
    with pytest.raises(OrderError, match=MISTAKES[model]):
        run(lambda device: answers(device, depth=1, model=model))


def test_what_is_recorded_for_a_stream_may_be_freed() -> None:
    assert run(lambda device: answers(device, depth=1, model=Careful))[0] == on_the_cpu("overlapped")


def test_memory_that_nothing_wrote_is_garbage() -> None:
    with fake_device():
        made = [torch.empty(2, device=CUDA), torch.zeros(2, device=CUDA).new_empty(2), torch.ones(2).to(CUDA)]
        assert [bool(each.isnan().all()) for each in made] == [True, True, False]


# -- graphs ------------------------------------------------------------------------------------------------------------


def record(compute: Callable[[], Any]) -> Graph:
    graph, stream = Graph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):  # type: ignore[arg-type]
        compute()
    return graph


def test_a_graph_computes_when_it_is_launched() -> None:
    with fake_device():
        total, step = torch.zeros(3, device=CUDA), torch.ones(3, device=CUDA)
        results: list[Tensor] = []

        def compute() -> None:
            total.add_(step)
            results.append(total * 2)

        graph = record(compute)
        assert total.tolist() == [0.0] * 3, "recording computes nothing"
        with pytest.raises(OrderError, match="belongs to a graph that may not have run"):
            results[0].clone()
        step.fill_(3.0)
        for launched in (1, 2):
            graph.replay()
            assert results[0].tolist() == [6.0 * launched] * 3


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda x: x[0].item(), "item|_local_scalar_dense"),
        (lambda x: bool(x.any()), "is_nonzero|_local_scalar_dense"),
        (lambda x: x.tolist(), "a copy between host and device"),
        (lambda x: x.cpu(), "a copy between host and device"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x + torch.tensor([1.0, 2.0], device=CUDA), "a copy between host and device"),
        (lambda x: torch.ones(2).pin_memory(), "an allocation of pinned memory"),
        (lambda x: torch.cuda.synchronize(), "device synchronize"),
    ],
    ids=["item", "bool", "tolist", "cpu", "nonzero", "mask", "tensor", "pin", "synchronize"],
)
def test_the_host_stays_out_of_a_recording(compute: Callable[[Tensor], Any], why: str) -> None:
    with fake_device():
        x = torch.ones(2, device=CUDA)
        compute(x)
        with pytest.raises(
            OrderError, match=rf"({why}) at tests/cpu/test_cuda_order\.py:\d+ while a graph is recorded"
        ):
            record(lambda: compute(x))


def test_a_buffer_that_a_recording_makes_is_not_there_for_others() -> None:
    with fake_device():
        buffers: list[Tensor] = []

        def compute() -> None:
            if not buffers:
                buffers.append(torch.zeros(2, device=CUDA))
            buffers[0].add_(1)

        record(compute)
        with pytest.raises(OrderError, match="belongs to a graph"):
            record(compute)


def test_a_tensor_of_the_host_is_refused() -> None:
    with fake_device():
        x = torch.ones(2, device=CUDA)
        assert x.is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(2)
        with pytest.raises(TypeError, match="cpu"):
            x.numpy()
