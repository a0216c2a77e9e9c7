"""MTP heads: drafts equal a float32 oracle's, and answers are the same with and without them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.core.config import DraftCosts
from engine.core.errors import ConfigError, ModelLoadError
from engine.core.rows import Rows, SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.runtime.execution.plain_steps import PlainSteps
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.load import load_mtp
from engine.runtime.speculation import heads
from engine.runtime.speculation.heads import Head, HeadDrafter
from engine.settings.engine_config import EngineConfig
from engine.startup.model_check import check_model
from engine.startup.speculation import load_speculation
from tests.cpu import test_models_families as families
from tests.cpu import test_moe_stored
from tests.cpu import test_weights_gguf as gguf
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.lora_folders import load_adapter, save_adapter
from tests.cpu.model_driver import CPU, Served, make_runner, request, serve, settings, state_blocks

_NUM_LAYERS = 2
_LITE = families.LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
CASES = {
    "glm4_moe": families.Case("Glm4MoeConfig", families.GLM4 | {"use_qk_norm": True}),
    "glm4_moe_lite": families.Case("Glm4MoeLiteConfig", _LITE),
    "deepseek_v3": families.Case("DeepseekV3Config", families.LATENT | families.LATENT_YARN),
    "qwen3_5": families.Case(
        "Qwen3_5TextConfig",
        families.QWEN3_5 | {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
}
QWEN = {  # its names, and its norms scale by 1 + weight
    "count": "mtp_num_hidden_layers",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
CASES["qwen3_5_moe"] = families.Case(
    "Qwen3_5MoeTextConfig", families.QWEN3_5_MOE | {"layer_types": CASES["qwen3_5"].settings["layer_types"]}
)
_random = random.Random(3)
PROMPTS = [[_random.randrange(3, 128) for _ in range(length)] for length in (1, 3, 17, 30)]
REGIMES: dict[str, dict[str, int]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "tiny_pool": {"num_blocks": 22},
    "swapping": {"num_blocks": 22, "num_host_blocks": 100},
}


class Saved(NamedTuple):
    """A checkpoint with an MTP head; `theirs` has the head's layer as its last."""

    folder: Path
    theirs: Any
    head: dict[str, Tensor]  # the tensors beside that layer's


def save(case: families.Case, folder: Path, change: Any = None) -> Saved:
    """Save a model of transformers whose last layer is the MTP layer; `change` edits it before."""
    case = families.Case(case.config, case.settings | {"num_hidden_layers": _NUM_LAYERS + 1})
    theirs = families.save_tiny(case, folder)
    hidden, prefix = theirs.config.hidden_size, f"model.layers.{_NUM_LAYERS}."
    head = {
        "enorm.weight": 1 + torch.randn(hidden) * 0.2,
        "hnorm.weight": 1 + torch.randn(hidden) * 0.2,
        "eh_proj.weight": torch.randn(hidden, 2 * hidden) * 0.15,
        "shared_head.norm.weight": 1 + torch.randn(hidden) * 0.2,
    }
    if change is not None:
        with torch.no_grad():
            change(theirs, head)
        theirs.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, is_qwen = load_file(file), case.config.startswith("Qwen")
    if is_qwen:
        tensors = {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        tensors |= {f"mtp.{QWEN[name]}": tensor - float("norm" in name) for name, tensor in head.items()}
    else:
        tensors |= {prefix + name: tensor for name, tensor in head.items()}
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_hidden_layers": _NUM_LAYERS, QWEN["count"] if is_qwen else "num_nextn_predict_layers": 1}
    values.pop("num_mtp_layers", None)
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] = values["mlp_layer_types"][:_NUM_LAYERS]
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:_NUM_LAYERS]
    (folder / "config.json").write_text(json.dumps(values))
    return Saved(folder, theirs, head)


_folder = TemporaryDirectory()


@cache
def saved(name: str) -> Saved:
    folder = Path(_folder.name) / name
    folder.mkdir()
    return save(CASES[name], folder)


def load(folder: Path, **changes: Any) -> tuple[Decoder, Head]:
    config = EngineConfig(model=str(folder), dtype="float32", **changes)
    target = families.load(folder, **changes)
    return target, load_mtp(config, target, CPU, lambda progress: None)


class Noted(NamedTuple):
    tokens: list[int]
    drafts: list[int]


def run(
    target: Decoder, head: Head | None, sampling: dict[str, object], noted: list[Noted] | None = None, **regime: int
) -> tuple[Served, Scheduler]:
    size = state_blocks(target, 4)
    regime |= {"state_blocks": size, "num_blocks": regime.get("num_blocks", 200) + 3 * size}
    config = settings(**regime, num_speculative_tokens=3 if head else 0)
    scheduler, runner = Scheduler(config), make_runner(target, config, head=head)
    if noted is not None:
        runner.speculate(Noting(runner.heads, noted))
    asked = [request(f"r{i}", prompt, **{"seed": i, "max_tokens": 10, **sampling}) for i, prompt in enumerate(PROMPTS)]
    return serve(target, config, asked, apart=1, scheduler=scheduler, runner=runner), scheduler


class Noting:
    """A drafter that notes the drafts of another."""

    def __init__(self, drafter: HeadDrafter | None, noted: list[Noted]) -> None:
        assert drafter is not None
        self._drafter, self._noted = drafter, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        drafts = self._drafter.draft(plan, slices)
        self._noted += [Noted(list(slices[index].tokens), found) for index, found in drafts.items()]
        return drafts


# -- the oracle --------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@torch.no_grad()
def oracle(made: Saved, tokens: Sequence[int], num_drafts: int) -> list[Tensor]:
    """Return the logits of each draft, all of it computed over the whole text in float32 by transformers' layers."""
    body, head, eps = made.theirs.model, made.head, made.theirs.config.rms_norm_eps
    layers, ids = body.layers, list(tokens)
    body.layers, body.config.num_hidden_layers = layers[:_NUM_LAYERS], _NUM_LAYERS
    states = body(torch.tensor([ids[:-1]]), use_cache=False).last_hidden_state[0]
    body.layers, body.config.num_hidden_layers = layers, _NUM_LAYERS + 1
    found = []
    for _ in range(num_drafts):
        embedded = norm(body.embed_tokens(torch.tensor(ids[1:])), head["enorm.weight"], eps)
        both = torch.cat((embedded, norm(states, head["hnorm.weight"], eps)), -1)
        x, num = (both @ head["eh_proj.weight"].T)[None], len(states)
        positions = torch.arange(num)[None]
        mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
        angles = body.rotary_emb(x, positions)
        x = layers[_NUM_LAYERS](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        last = norm(x[0, -1:], head["shared_head.norm.weight"], eps)
        found.append(made.theirs.lm_head(last)[0])
        ids.append(int(found[-1].argmax()))
        states = torch.cat((states, last))
    return found


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_oracle(name: str) -> None:
    made = saved(name)
    target, head = load(made.folder)
    noted: list[Noted] = []
    served, scheduler = run(target, head, {}, noted)
    assert served.ids == run(target, None, {})[0].ids
    stats, num_right = scheduler.stats, 0
    for tokens, drafts in noted[::5]:
        for logits, draft in zip(oracle(made, tokens, len(drafts)), drafts, strict=True):
            best = logits.topk(2).values
            if best[0] - best[1] < 1e-3:
                break
            assert draft == int(logits.argmax())
    for tokens, drafts in noted:
        whole = next(
            prompt + served.ids[f"r{i}", 0] for i, prompt in enumerate(PROMPTS) if prompt == tokens[: len(prompt)]
        )
        coming = whole[len(tokens) : len(tokens) + len(drafts)]
        agreeing = [draft == token for draft, token in zip(drafts, coming, strict=False)]
        num_right += agreeing.index(False) if False in agreeing else len(agreeing)
    assert len(noted) > 10
    assert stats.spec_accepted_tokens == num_right


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_answers_stay_the_same(name: str, regime: str) -> None:
    target, head = load(saved(name).folder)
    sampling = {"temperature": 1.0, "n": 2}
    served, scheduler = run(target, head, sampling, **REGIMES[regime])
    assert served.ids == run(target, None, sampling)[0].ids
    assert scheduler.stats.spec_draft_tokens > 10


def test_adapters_change_the_model_and_not_its_head(tmp_path: Path) -> None:
    target, head = load(saved("glm4_moe").folder)
    sampling = {"adapter": load_adapter(target, save_adapter(target, tmp_path, size=1.0))}
    served, scheduler = run(target, head, sampling)
    plain = run(target, None, sampling)[0]
    assert served.ids == plain.ids != run(target, None, {})[0].ids
    assert scheduler.stats.spec_draft_tokens > 10


def test_a_slot_that_changes_hands_has_no_state() -> None:
    target, head = load(saved("glm4_moe").folder)
    config = settings(num_speculative_tokens=3)
    runner = make_runner(target, config, head=head)
    plan = warm_up_plan(config, 1, 5)
    runner.run(plan).wait()
    following = Rows().follow(plan)[0].at(5)._replace(tokens=[0] * 6)
    assert runner.heads is not None
    for seq_id, num_drafted in ((following.seq_id, 2), (99, 0)):
        drafts = runner.heads.draft(plan._replace(drafts=((0, 2),)), [following._replace(seq_id=seq_id)])
        assert sum(map(len, drafts.values())) == num_drafted


# -- right by construction ---------------------------------------------------------------------------------------------

CHAIN = torch.randperm(64, generator=torch.Generator().manual_seed(4))  # the token that follows each


def chained(model: nn.Module, head: dict[str, Tensor], *, by_token: float, by_state: float) -> None:
    """Make a model that continues a chain of tokens, and a head that does, from the token or from the state."""
    table = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(5)))[0]
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            parameter.zero_()  # each layer adds nothing
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
    model.model.embed_tokens.weight.copy_(table)  # type: ignore[union-attr, operator]
    follower = torch.empty_like(table)
    follower[CHAIN] = table
    model.lm_head.weight.copy_(follower)  # type: ignore[union-attr, operator]
    for name, tensor in head.items():
        tensor.fill_(1.0) if "norm" in name else tensor.zero_()
    # The state of a token becomes that of the next one.
    step = sum(torch.outer(table[after], table[token]) for token, after in enumerate(CHAIN.tolist()))
    head["eh_proj.weight"].copy_(torch.cat((by_token * torch.eye(64), by_state * step), 1))


@pytest.mark.parametrize(("by_token", "by_state"), [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)])
def test_a_head_that_knows_the_chain_is_always_right(by_token: float, by_state: float, tmp_path: Path) -> None:
    """By tokens it must read the next one, by states the one before; drafts behind drafts read their own."""
    case = families.Case("Glm4MoeConfig", families.GLM4 | {"vocab_size": 64})
    save(case, tmp_path, lambda model, head: chained(model, head, by_token=by_token, by_state=by_state))
    target, head = load(tmp_path)
    config = settings(num_speculative_tokens=4, max_num_batched_tokens=8)
    scheduler = Scheduler(config)
    asked = [request(f"r{token}", [token] * length, max_tokens=16) for token, length in ((3, 1), (7, 21), (9, 4))]
    served = serve(target, config, asked, scheduler=scheduler, runner=make_runner(target, config, head=head))
    for (name, _), ids in served.ids.items():
        expected = [int(CHAIN[int(name[1:])])]
        while len(expected) < 16:
            expected.append(int(CHAIN[expected[-1]]))
        assert ids == expected
    stats = scheduler.stats
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 20


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_head_is_loaded_and_quantised_like_the_model() -> None:
    folder = saved("glm4_moe").folder
    quantised, its_head = load(folder, quantization="int8")
    plain = run(quantised, None, {})[0].ids
    assert run(quantised, its_head, {})[0].ids == run(quantised, its_head, {}, max_num_batched_tokens=8)[0].ids == plain
    exact, rounded = states_of(*load(folder)), states_of(quantised, its_head)
    assert 1e-4 < (exact - rounded).abs().mean() < 0.1


def test_a_head_is_read_as_it_is_stored(tmp_path: Path) -> None:
    """FP8 in blocks, as DeepSeek publishes it: eh_proj is plain, and the layer like the others."""
    made, packing, generator = saved("deepseek_v3"), test_moe_stored.FP8, np.random.default_rng(0)
    tensors, plain, packed = load_file(made.folder / "model.safetensors"), {}, {}
    for name, tensor in sorted(tensors.items()):
        plain[name] = packed[name] = tensor
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith("eh_proj.weight"):
            parts, weight = packing.pack(generator, *tensor.shape)
            module = name.removesuffix(".weight")
            packed |= {module + ending: part.contiguous() for ending, part in parts.items()}
            plain[name] = torch.from_numpy(weight.copy()).float()
    for folder, stored in ((tmp_path / "plain", plain), (tmp_path / "packed", packed)):
        folder.mkdir()
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text((made.folder / "config.json").read_text())
    test_moe_stored.with_method(tmp_path / "packed", packing.config)
    expected = states_of(*load(tmp_path / "plain"))
    torch.testing.assert_close(states_of(*load(tmp_path / "packed", quantization="none")), expected, atol=1e-4, rtol=0)
    assert (states_of(*load(tmp_path / "packed", quantization="stored")) - expected).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["qwen3_5", "deepseek_v3"])
def test_steps_whose_drafts_do_not_pay_are_plain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others no draft pays; the last sequence has drafts after plain steps."""
    target, head = load(saved(name).folder)
    dear, computed, compute = ((1, 1.0), (3, 1.1), (64, 64.0)), list[StepPlan](), PlainSteps.compute
    monkeypatch.setattr(heads, "_MOST_IDLE", 2)
    plain = run(target, None, {})[0].ids
    monkeypatch.setattr(PlainSteps, "compute", lambda self, *args: computed.append(args[0]) or compute(self, *args))
    served, scheduler = run(target, head, {}, draft_costs=DraftCosts(dear, dear, ((1, 0.01),)))
    assert served.ids == plain
    assert computed
    assert scheduler.stats.spec_draft_tokens > 0


def states_of(target: Decoder, head: Head) -> Tensor:
    """Return a head's states of some tokens and states of a target."""
    states = torch.randn(8, head.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        return head.forward(
            torch.arange(3, 11), torch.arange(8), states, DenseAttention([*target.states, *head.states])
        )


GGUF: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {  # architecture, names that differ, metadata
    "glm4_moe": ("glm4moe", gguf.BEFORE_MLP, gguf.GLM4 | {"expert_shared_count": 1, "expert_weights_norm": True}),
    "qwen3_5": ("qwen35", gguf.DELTA, gguf.QWEN35 | {"attention.recurrent_layers": [True, False, False]}),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_holds_the_same_head(name: str, tmp_path: Path) -> None:
    made, (arch, names, extra) = saved(name), GGUF[name]
    tensors = gguf.convert(made.theirs, arch, names)
    for role, tensor in made.head.items():
        stem = role.removesuffix(".weight").replace(".", "_")
        tensors[f"blk.{_NUM_LAYERS}.nextn.{stem}.weight"] = (tensor.numpy(), gguf.Kind.F32)
    tensors[f"blk.{_NUM_LAYERS}.nextn.embed_tokens.weight"] = tensors["token_embd.weight"]
    file = gguf.write(tmp_path / "m.gguf", arch, made.theirs.config, tensors, nextn_predict_layers=1, **extra)
    ours, theirs = (states_of(*load(path)) for path in (made.folder, file))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


def test_models_without_a_head_are_refused(tmp_path: Path) -> None:
    families.write_tiny(families.CASES["llama"], tmp_path)
    asked = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 2}}
    with pytest.raises(ConfigError, match=r"--speculative-config: .* counts no MTP layers, .*ngram or draft_model\.$"):
        check_model(EngineConfig(model=str(tmp_path), **asked))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"transformers' code runs this model, which does not show them"):
        check_model(EngineConfig(model=str(tmp_path), model_impl="transformers", **asked))  # type: ignore[arg-type]


def test_a_checkpoint_that_lost_its_head_is_refused(tmp_path: Path) -> None:
    made = save(CASES["glm4_moe"], tmp_path)
    file = made.folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if "eh_proj" not in name}
    save_file(tensors, file, {"format": "pt"})
    config = EngineConfig(
        model=str(tmp_path), dtype="float32", speculative_config={"method": "mtp", "num_speculative_tokens": 1}
    )
    with pytest.raises(ModelLoadError, match=r"--speculative-config: .* it lacks 'model\.layers\.2\.eh_proj\.weight'"):
        load_speculation(config, families.load(tmp_path), CPU, lambda progress: None)
