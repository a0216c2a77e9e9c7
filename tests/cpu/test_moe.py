"""Routers and experts: each rule that a family could get wrong, against a few lines of float64."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.core.errors import AdapterLoadError, MemoryBudgetError, ModelLoadError
from engine.core.scheduling.scheduler import Scheduler
from engine.files.hf_config import HFConfig
from engine.runtime.activation import Activation, Clamp
from engine.runtime.layers.mixture import MoE, Router
from engine.runtime.layers.model_config import MoEConfig
from engine.runtime.layers.parts import Maker
from engine.runtime.models.families import read_config
from engine.runtime.models.load import load_model
from engine.runtime.routing import GroupScoring, RouterConfig, Scoring
from engine.runtime.schemes.linear import Scheme
from engine.runtime.weights.checkpoint import StoredTensor
from engine.runtime.weights.expert_names import expert_parts
from engine.settings.engine_config import EngineConfig
from engine.startup.model_check import check_model
from tests.cpu.lora_folders import load_adapter, save_adapter
from tests.cpu.model_driver import request, serve, settings
from tests.cpu.test_models_families import CASES, SIZES, load, logits_of, save_tiny, write_tiny

CPU = torch.device("cpu")
WITH_EXPERTS = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "gpt_oss",
    "glm4_moe",
    "granitemoe_swa",
    "nemotron_h",
)
HIDDEN = 64
IDS = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(1))


def maker(dtype: torch.dtype = torch.float32) -> Maker:
    return Maker(dtype, CPU, Scheme(), loads=[], targets={})


def fill(make: Maker, weights: Mapping[str, Tensor]) -> None:
    for each in make.loads:
        each.take({name: stored(name, weights[name]) for name in each.shapes})


def stored(name: str, tensor: Tensor) -> StoredTensor:
    return StoredTensor(name, tuple(tensor.shape), 0, "", partial(Tensor.copy_, other=tensor))  # type: ignore[call-arg]


def route(logits: Tensor, correction: Tensor | None = None, **changes: Any) -> tuple[list[list[int]], Tensor]:
    """The experts and weights that a router gives to tokens with these logits."""
    num_experts = logits.shape[1]
    config = RouterConfig(num_experts=num_experts, has_correction=correction is not None, **changes)
    make = maker()
    router = Router(config, num_experts, make)
    weights = {"gate.weight": torch.eye(num_experts)}
    if correction is not None:
        weights["gate.e_score_correction_bias"] = correction
    fill(make, weights)
    found, chosen = router(logits)
    assert found.dtype == torch.float32
    return chosen.tolist(), found


# -- routers -----------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(3, 16)
    logits[1, 5:] = 1.0
    logits[2, [3, 9]] = 2.0
    for scoring in Scoring:
        chosen, _ = route(logits, num_chosen=4, scoring=scoring)
        assert chosen == [[0, 1, 2, 3], [5, 6, 7, 8], [3, 9, 0, 1]]


def test_ties_of_groups_go_to_the_lowest_group() -> None:
    logits = torch.tensor([[0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]])
    for scoring in GroupScoring:
        chosen, _ = route(logits, num_chosen=3, num_groups=4, num_chosen_groups=2, group_scoring=scoring)
        assert chosen == [[2, 4, 3]]


def test_weights_are_of_all_experts_or_of_the_chosen() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) * 3
    best = logits.double().topk(3).values
    _, found = route(logits, num_chosen=3, scale=2.5)
    torch.testing.assert_close(found.double(), logits.double().softmax(-1).topk(3).values * 2.5)
    _, found = route(logits, num_chosen=3, is_normalised=True)
    torch.testing.assert_close(found.double(), best.softmax(-1))  # a softmax after the choice
    _, found = route(logits, num_chosen=3, scoring=Scoring.SIGMOID, is_normalised=True, scale=2.5)
    torch.testing.assert_close(found.double(), best.sigmoid() / best.sigmoid().sum(-1, keepdim=True) * 2.5)
    _, found = route(logits, num_chosen=3, scoring=Scoring.SIGMOID)
    torch.testing.assert_close(found.double(), best.sigmoid())


def test_probabilities_that_underflow_do_not_tie() -> None:
    chosen, found = route(torch.tensor([[500.0, -200.0, -100.0, -300.0]]), num_chosen=2)
    assert chosen == [[0, 2]]
    assert found.tolist() == [[1.0, 0.0]]


def test_the_correction_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen, found = route(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), num_chosen=2, scoring=Scoring.SIGMOID)
    assert chosen == [[3, 0]]
    torch.testing.assert_close(found, torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_experts_outside_of_the_groups_lose_to_negative_choices() -> None:
    """A mask of 0 would prefer them: corrections can make every choice negative."""
    logits, correction = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.full((4,), -9.0)
    groups = {"num_groups": 2, "num_chosen_groups": 1, "group_scoring": GroupScoring.TOP2}
    chosen, _ = route(logits, correction, num_chosen=2, scoring=Scoring.SIGMOID, **groups)
    assert chosen == [[0, 1]]


def test_a_group_is_as_good_as_its_best_or_its_two_best() -> None:
    logits = torch.tensor([[4.0, -9.0, -9.0, 3.0, 3.0, -9.0]])
    for scoring, expected in ((GroupScoring.MAX, [0, 1]), (GroupScoring.TOP2, [3, 4])):
        groups = {"num_groups": 2, "num_chosen_groups": 1, "group_scoring": scoring}
        chosen, _ = route(logits, num_chosen=2, scoring=Scoring.SIGMOID, **groups)
        assert chosen == [expected]


def test_the_router_is_float32_in_a_bfloat16_model() -> None:
    """These logits are one number in bfloat16, and the weights of the router do not fit it."""
    config = MoEConfig(router=RouterConfig(num_experts=2, num_chosen=1), width=2, activation=Activation.SILU)
    make = maker(torch.bfloat16)
    moe = MoE(config, 4, make)
    weights = {name: torch.ones(shape) for load in make.loads for name, shape in load.shapes.items()}
    weights["gate.weight"] = torch.tensor([[1.0, 1, 1, 1], [1.0, 1, 1, 1 + 2**-12]])
    fill(make, weights)
    assert moe.router(torch.ones(1, 4, dtype=torch.bfloat16))[1].tolist() == [[1]]


# -- experts -----------------------------------------------------------------------------------------------------------


def test_gpt_oss_clamps_the_gate_from_above_only() -> None:
    config = MoEConfig(
        router=RouterConfig(num_experts=1, num_chosen=1, has_bias=True),
        width=6,
        activation=Activation.SILU,
        clamp=Clamp(1.702, 7.0),
        has_bias=True,
    )
    gate = torch.tensor([50.0, 7.5, -0.5, -1.5, 1.0, -40.0], dtype=torch.float64)
    up = torch.tensor([1.0, -50.0, 50.0, -8.0, 0.5, 2.0], dtype=torch.float64)
    make = maker()
    moe = MoE(config, 6, make)
    weights = {name: torch.zeros(shape) for load in make.loads for name, shape in load.shapes.items()}
    weights |= {"experts.0.gate_proj.bias": gate, "experts.0.up_proj.bias": up}
    weights |= {"experts.0.down_proj.weight": torch.eye(6), "experts.0.down_proj.bias": torch.full((6,), 0.25)}
    fill(make, weights)
    clipped = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * clipped / (1 + (-1.702 * clipped).exp()) + 0.25
    torch.testing.assert_close(moe(torch.zeros(1, 6))[0].double(), expected, atol=1e-6, rtol=1e-6)
    assert expected[3] != (up.clamp(-7, 7) + 1)[3] * 0.25  # negative gates stay as they are


def random_moe(dtype: torch.dtype) -> tuple[MoE, MoEConfig, dict[str, Tensor]]:
    config = MoEConfig(
        router=RouterConfig(num_experts=8, num_chosen=3),
        width=96,
        activation=Activation.SILU,
        shared_width=64,
        has_shared_gate=True,
    )
    make, generator = maker(dtype), torch.Generator().manual_seed(2)
    moe = MoE(config, HIDDEN, make)
    shapes = {name: shape for load in make.loads for name, shape in load.shapes.items()}
    weights = {name: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}
    fill(make, weights)
    assert sum(math.prod(shape) for shape in shapes.values()) == config.num_weights(HIDDEN)
    return moe, config, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_equals_float64(dtype: torch.dtype) -> None:
    moe, config, weights = random_moe(dtype)
    wide = {name: tensor.double() for name, tensor in weights.items()}
    x = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)

    def expert(name: str, row: Tensor) -> Tensor:
        gate, up = (row @ wide[f"{name}.{role}.weight"].t() for role in ("gate_proj", "up_proj"))
        return (gate * gate.sigmoid() * up) @ wide[f"{name}.down_proj.weight"].t()

    for row, found in zip(x.double(), moe(x).double(), strict=True):
        scores = (row @ wide["gate.weight"].t()).softmax(-1)
        chosen = scores.topk(config.router.num_chosen)
        expected = torch.sigmoid(wide["shared_expert_gate.weight"] @ row) * expert("shared_expert", row)
        for weight, index in zip(chosen.values, chosen.indices.tolist(), strict=True):
            expected = expected + weight * expert(f"experts.{index}", row)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_a_token_is_the_same_alone_and_in_a_batch() -> None:
    moe, _, _ = random_moe(torch.bfloat16)
    x = torch.randn(33, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert torch.equal(moe(x), torch.cat([moe(row[None]) for row in x]))


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral", "granitemoe", "gpt-oss", "glm4-moe", "nemotron_h"])
def test_stacks_of_transformers_are_read(name: str, tmp_path: Path) -> None:
    """transformers can save what it holds in memory: all experts of a layer in one tensor."""
    save_tiny(CASES[name], tmp_path).save_pretrained(tmp_path, save_original_format=False)  # type: ignore[operator]
    stacks = [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("experts.down_proj")]
    fused = logits_of(load(tmp_path), IDS, [30])
    write_tiny(CASES[name], tmp_path)
    assert stacks
    assert torch.equal(fused, logits_of(load(tmp_path), IDS, [30]))


def test_a_stack_is_cut_without_copying() -> None:
    stack = torch.randn(4, 6, 10)
    for kind, shape in (("qwen3_moe", (3, 10)), ("gpt_oss", (5, 6))):
        config = HFConfig({"model_type": kind}, "config.json")
        parts = list(expert_parts(config, "model.layers.0.mlp.experts.gate_up_proj", tuple(stack.shape)))
        assert [part.shape for part in parts] == [shape] * 8
        views = {part.name: part.view(stack) for part in parts}
        storage = stack.untyped_storage().data_ptr()
        assert {view.untyped_storage().data_ptr() for view in views.values()} == {storage}
        ups = views["model.layers.0.mlp.experts.2.up_proj.weight"]
        assert torch.equal(ups, stack[2, 3:] if kind == "qwen3_moe" else stack[2, :, 1::2].t())


def test_packed_stacks_of_gpt_oss_are_cut_by_rows() -> None:
    config = HFConfig({"model_type": "gpt_oss"}, "config.json")
    blocks, scales, bias = (torch.arange(math.prod(shape)).view(shape) for shape in ((2, 8, 3, 16), (2, 8, 3), (2, 8)))
    found = {}
    for ending, tensor in (("_blocks", blocks), ("_scales", scales), ("_bias", bias)):
        for part in expert_parts(config, f"model.layers.0.mlp.experts.gate_up_proj{ending}", tuple(tensor.shape)):
            assert part.view(tensor).shape == part.shape
            found[part.name.removeprefix("model.layers.0.mlp.experts.")] = part.view(tensor)
    assert torch.equal(found["1.gate_proj_blocks"], blocks[1, 0::2])
    assert torch.equal(found["1.up_proj_scales"], scales[1, 1::2])
    assert torch.equal(found["0.up_proj.bias"], bias[0, 1::2])


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    write_tiny(CASES["deepseek_v3"], tmp_path)
    expected = logits_of(load(tmp_path), IDS, [30])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
    assert check_model(EngineConfig(model=str(tmp_path))).is_native
    assert torch.equal(logits_of(load(tmp_path), IDS, [30]), expected)


def test_layers_that_predict_later_tokens_are_passed_over(tmp_path: Path) -> None:
    write_tiny(CASES["glm4-moe"], tmp_path)
    expected = logits_of(load(tmp_path), IDS, [30])
    tensors = load_file(tmp_path / "model.safetensors")
    later = {key.replace("layers.2.", "layers.3."): value for key, value in tensors.items() if "layers.2." in key}
    save_file(tensors | {key: value.clone() for key, value in later.items()}, tmp_path / "model.safetensors")
    assert torch.equal(expected, logits_of(load(tmp_path), IDS, [30]))


# -- whole models ------------------------------------------------------------------------------------------------------


def test_gpt_oss_with_gates_beyond_the_limit_equals_transformers(tmp_path: Path) -> None:
    theirs = save_tiny(CASES["gpt-oss"], tmp_path)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "experts.gate_up_proj" in name:
                parameter.mul_(12.0)
        theirs.save_pretrained(tmp_path)  # type: ignore[operator]
        expected = theirs(IDS[None], use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(logits_of(load(tmp_path), IDS, [30]).log_softmax(-1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2-moe"])
def test_cached_prompts_and_several_choices_are_the_same(name: str, tmp_path: Path) -> None:
    theirs = save_tiny(CASES[name], tmp_path)
    prompt, model = IDS[:21].tolist(), load(tmp_path)
    tokens = IDS[None, :21]
    with torch.no_grad():
        for _ in range(8):
            logits = theirs(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax().reshape(1, 1)], dim=1)
    config = settings(num_blocks=40, max_num_batched_tokens=16)
    scheduler = Scheduler(config)
    requests = [request(f"r{i}", prompt, max_tokens=8, n=2) for i in range(3)]
    served = serve(model, config, requests, apart=4, scheduler=scheduler)
    assert scheduler.stats.prefix_hit_tokens > 0
    assert all(ids == tokens[0, 21:].tolist() for ids in served.ids.values())
    assert len(served.ids) == 6


def test_adapters_of_experts_are_refused(tmp_path: Path) -> None:
    theirs = save_tiny(CASES["qwen2-moe"], tmp_path / "model")
    model = load(tmp_path / "model")
    folder = save_adapter(theirs, tmp_path / "adapter", targets=("q_proj", "shared_expert.gate_proj"))
    with pytest.raises(AdapterLoadError, match=r"shared_expert\.gate_proj, which this model cannot have changed"):
        load_adapter(model, folder)
    load_adapter(model, save_adapter(theirs, tmp_path / "attention", targets=("q_proj", "o_proj")))


def test_experts_are_quantised_as_other_matrices(tmp_path: Path) -> None:
    write_tiny(CASES["qwen3-moe"], tmp_path)
    expected, found = (
        logits_of(load(tmp_path, quantization=scheme), IDS, [30]).log_softmax(-1) for scheme in ("none", "int8")
    )
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert 0 < divergence.median() < 0.01


def test_the_start_says_which_matrix_leaves_experts_to_torch(tmp_path: Path) -> None:
    """Rows of odd length have no native product; the shared expert's are even."""
    case = CASES["qwen2-moe"]
    write_tiny(replace(case, settings=case.settings | {"moe_intermediate_size": 25}), tmp_path)
    lines: list[str] = []
    for dtype in (torch.float32, torch.float16):
        config = EngineConfig(model=str(tmp_path))
        load_model(config, CPU, dtype, lambda p: lines.append(p.detail) if p.stage == "kernels" else None)
    first = (
        "the experts of 2 of 3 layers run in torch, which is slower; the native library does not compute model.layers."
    )
    assert lines == [first + "0.mlp.experts.0.down_proj in float32", first + "0.mlp.experts.0.gate_proj in float16"]
    write_tiny(case, tmp_path)
    load_model(EngineConfig(model=str(tmp_path)), CPU, torch.float32, lambda p: lines.append(p.detail))
    assert "run in torch" not in lines[-1]


def test_random_weights_and_sizes_count_experts(tmp_path: Path) -> None:
    write_tiny(CASES["qwen2-moe"], tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    config = read_config(values, "config.json")
    tensors = load_file(tmp_path / "model.safetensors")
    assert config.num_weights == sum(tensor.numel() for tensor in tensors.values() if tensor.dim() > 1)
    assert logits_of(load(tmp_path, load_format="dummy"), IDS, [30]).isfinite().all()
    (tmp_path / "config.json").write_text(json.dumps(values | {"moe_intermediate_size": 2**36}))
    engine_config = EngineConfig(model=str(tmp_path), load_format="dummy")
    with pytest.raises(MemoryBudgetError, match="GiB of weights"):
        load_model(engine_config, CPU, torch.float32, lambda progress: None)


MIXTURES = {case.config: case for case in CASES.values() if case.build().model_type in WITH_EXPERTS}
FEWEST = {"GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}}


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("has_settings", [True, False])
def test_keys_that_a_config_leaves_out_are_transformers_defaults(kind: str, has_settings: bool) -> None:
    fewest = FEWEST.get(kind, {})  # Granite 4's default has no attention
    case = replace(MIXTURES[kind], settings=MIXTURES[kind].settings if has_settings else fewest)
    config = case.build()
    short = {**SIZES, **config.to_diff_dict()}
    for key in ("layer_types", "rope_parameters"):
        if not (has_settings or key in fewest):
            short.pop(key, None)
    assert len(short) < len(config.to_dict())
    assert read_config(short, "config.json") == read_config(config.to_dict(), "config.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' is 9; Quire needs at most 4 experts to choose from"),
        ({"n_group": 3}, "'n_group' is 3; Quire needs a number of groups that divides 8 experts, two or more a group"),
        ({"n_group": 8}, "two or more a group"),
        ({"topk_group": 5}, "'topk_group' is 5; Quire needs at most 4 groups"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; Quire needs 'silu' in a mixture of experts"),
        ({"n_routed_experts": 2**16}, "3 layers of 65536 experts are more than any model has"),
        ({"n_shared_experts": -1}, "'n_shared_experts' is -1; Quire needs 0 or more"),
    ],
)
def test_routers_that_cannot_choose_are_refused(change: dict[str, Any], sentence: str) -> None:
    case = replace(CASES["glm4-moe"], settings=CASES["glm4-moe"].settings | change)
    with pytest.raises(ModelLoadError) as refusal:
        read_config(case.build().to_dict(), "config.json")
    assert sentence in str(refusal.value)
