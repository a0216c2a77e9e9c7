"""Graphs of decode steps on a device that compares every access: what tests/cpu/test_cuda_order.py has without kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.core.rows import SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import PreemptionKind
from engine.core.step import StepPlan
from engine.runtime.cuda import available
from engine.runtime.execution.decode_graphs import DecodeGraphs
from engine.runtime.layers import layer
from engine.runtime.layers.parts import LayerAttention
from engine.runtime.models.load import load_model
from engine.settings.engine_config import EngineConfig
from tests.cpu import test_images
from tests.cpu.model_driver import TinyModel, make_runner, request, serve, settings, state_blocks
from tests.cpu.test_models_families import CASES, Case, write_tiny
from tests.cpu.test_speculation import Prophet
from tests.fake_device import CUDA, FakeDevice, active, fake_device
from tests.fake_order import OrderError

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the device is made of Triton's interpreter"),
]
CONFIG = settings(max_num_seqs=2, max_model_len=20, num_blocks=5, num_host_blocks=12, max_num_batched_tokens=16)
REQUESTS = [
    request("plain", [3, 1, 4, 1, 5], max_tokens=6),
    request("edited", [2, 7, 1, 8, 2, 8, 1], max_tokens=6, frequency_penalty=0.5, logprobs=1),
    request("drawn", [9, 9, 7, 5, 3], max_tokens=4, temperature=1.0, seed=3, top_p=0.9),
]
Ids = dict[tuple[str, int], list[int]]


def launched(model: type[TinyModel] = TinyModel, dropped: str | None = None) -> tuple[Ids, FakeDevice]:
    """Serve with graphs on the device."""
    with pytest.MonkeyPatch.context() as patch, fake_device(dropped) as device:
        patch.setattr(available, "has_triton", lambda device: device.type == "cuda")
        scheduler, served_model = Scheduler(CONFIG), model(device=CUDA)
        runner = make_runner(served_model, CONFIG, "triton", device=CUDA)
        runner.capture(lambda progress: None)
        served = serve(served_model, CONFIG, REQUESTS, depth=1, scheduler=scheduler, runner=runner)
        assert scheduler.stats.preempted[PreemptionKind.SWAP] > 0
        return served.ids, device


def test_graphs_wait_for_what_they_read() -> None:
    ids, device = launched()
    assert ids == serve(TinyModel(), CONFIG, REQUESTS, runner=make_runner(TinyModel(), CONFIG)).ids
    assert device.num_graphs == 2
    sites = {site for site in device.sites if "decode_graphs" in site}
    assert sites
    for site in sites:
        with pytest.raises(OrderError):
            launched(dropped=site)


def test_graphs_turn_tokens_behind_images(tmp_path: Path) -> None:
    """The positions of a slot's tokens go on behind its images, and are those of text for the next that has the slot."""
    found = test_images.vision(tmp_path, "Qwen3VLConfig")
    config = settings(max_num_seqs=2, max_model_len=64, num_blocks=24, block_size=8, max_num_batched_tokens=64)
    prompts = [test_images.PROMPTS[index] for index in (4, 3, 3)]
    made = {image.digest: found.tower(image) for _, images in prompts for image in images}

    def run(device: torch.device) -> Ids:
        model = test_images.load_on(device, found.path)
        is_device = device.type == "cuda"
        runner = make_runner(model, config, "triton" if is_device else "auto", device=device)
        runner.take_images(lambda image: made[image.digest].to(device), 1 << 20)
        if is_device:
            runner.capture(lambda progress: None)
        asked = [test_images.ask(f"{i}", ids, max_tokens=3 + i) for i, (ids, _) in enumerate(prompts)]
        return serve(model, config, asked, depth=int(is_device), runner=runner).ids

    with pytest.MonkeyPatch.context() as patch, fake_device() as device:
        patch.setattr(available, "has_triton", lambda device: device.type == "cuda")
        said = run(CUDA)
        assert device.num_graphs == 2
    assert said == run(torch.device("cpu"))


class Asking(TinyModel):
    """Asks what is in a tensor."""

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        assert positions.min().item() >= 0
        return super().forward(ids, positions, attention, rows)


class Sending(TinyModel):
    """Sends numbers of the host."""

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        return super().forward(
            ids + torch.tensor([0]).pin_memory().to(CUDA, non_blocking=True), positions, attention, rows
        )


class Keeping(TinyModel):
    """Keeps for all graphs what the first has made."""

    zeros: Tensor | None = None

    def forward(self, ids: Tensor, positions: Tensor, attention: LayerAttention, rows: Tensor | None = None) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            if self.zeros is None:
                self.zeros = torch.zeros(CONFIG.max_num_seqs, dtype=torch.int64, device=CUDA)
            ids = ids + self.zeros[: len(ids)]
        return super().forward(ids, positions, attention, rows)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Asking, "(item|_local_scalar_dense) at .* while a graph is recorded"),
        (Sending, "an allocation of pinned memory at .* while a graph is recorded"),
        (Keeping, "uses the memory of zeros at .* which belongs to a graph that may not have run"),
    ],
)
def test_what_a_graph_cannot_record_is_refused(model: type[TinyModel], why: str) -> None:
    with pytest.raises(OrderError, match=why):
        launched(model)


TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "shared_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24}
GRANITE = TINY | EXPERTS | {"num_local_experts": 4, "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 16}
NEMOTRON = CASES["nemotron_h-latent"].settings | {
    **{name: size for name, size in TINY.items() if name not in ("num_hidden_layers", "layer_types")},
    **EXPERTS,
    "layers_block_type": ["moe", "linear_attention", "full_attention"],
    "mamba_num_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_latent_size": 16,
}
KINDS = {
    **{name: CASES[name] for name in ("lfm2", "gemma3n", "gemma4-shared")},
    "qwen3_5": Case("Qwen3_5TextConfig", TINY | DELTA),
    "granitemoehybrid": Case("GraniteMoeHybridConfig", GRANITE),
    "nemotron_h": Case("NemotronHConfig", NEMOTRON),
    "falcon_h1": Case(
        "FalconH1Config",
        CASES["falcon_h1"].settings
        | {name: size for name, size in TINY.items() if name not in ("num_hidden_layers", "layer_types")}
        | {"num_hidden_layers": 1, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 2},
    ),
    "lfm3": Case("Lfm3Config", TINY | {"layer_types": ["conv", "full_attention"]}),
}


class Oracle(Prophet):
    """Drafts in every third step, so that steps take in drafts that have none themselves."""

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        found = super().draft(plan, slices)
        return {index: drafts for index, drafts in found.items() if len(slices[index].tokens) % 3 == 0}


@pytest.mark.parametrize(
    ("name", "num_drafts"),
    [*((name, 0) for name in KINDS if name != "granitemoehybrid"), ("qwen3_5", 1), ("granitemoehybrid", 1)],
)
def test_graphs_of_many_kinds_of_layer_say_what_the_cpu_says(name: str, num_drafts: int, tmp_path: Path) -> None:
    """No graph takes drafts in."""
    write_tiny(KINDS[name], tmp_path)
    prompts = [[(7 * i + 3 * j * j) % 128 for j in range(length)] for i, length in enumerate((1, 18))]
    asked = [request(f"r{i}", prompt, max_tokens=6 if num_drafts else 4) for i, prompt in enumerate(prompts)]

    def run(device: torch.device, drafter: Prophet | None = None) -> Ids:
        options = EngineConfig(model=str(tmp_path), model_impl="quire", dtype="float32")
        model = load_model(options, device, torch.float32, lambda progress: None)
        size = state_blocks(model, 8)
        sizes = {"num_blocks": 8 + 3 * size, "state_blocks": size, "block_size": 8, "max_model_len": 32}
        config = settings(max_num_seqs=2, max_num_batched_tokens=32, num_speculative_tokens=num_drafts, **sizes)
        is_device = device.type == "cuda"
        runner = make_runner(model, config, "triton" if is_device else "auto", device=device)
        if is_device:
            assert model.capabilities.graphs
            runner.capture(lambda progress: None)
            active().hidden.clear()
        if drafter is not None:
            runner.speculate(drafter)
        scheduler = Scheduler(config)
        ids = serve(model, config, asked, depth=1 - num_drafts, apart=1, scheduler=scheduler, runner=runner).ids
        assert drafter is None or scheduler.stats.spec_accepted_tokens > 1
        return ids

    expected = run(torch.device("cpu"))
    oracle = Oracle([[*prompts[int(name[1:])], *ids] for (name, _), ids in expected.items()], is_wrong_at=())
    launched, launch = [], DecodeGraphs.launch
    with pytest.MonkeyPatch.context() as patch, fake_device() as device:
        for module in (available, layer):
            patch.setattr(module, "has_triton", lambda device: device.type == "cuda")
        patch.setattr(DecodeGraphs, "launch", lambda self, rows: (launched.append(rows), launch(self, rows))[1])
        found = run(CUDA, oracle if num_drafts else None)
        assert device.num_graphs == 2
        assert not device.hidden
    assert len(launched) > 1
    assert found == expected
