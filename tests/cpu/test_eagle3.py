"""EAGLE-3 drafts: the forward pass against the published formulas, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.core.errors import ConfigError, ModelLoadError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import Stats
from engine.core.types import Progress, Request
from engine.runtime.models.decoder import Decoder
from engine.runtime.models.eagle3 import Eagle3
from engine.runtime.models.load import load_eagle3, load_model
from engine.runtime.pool import groups
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.startup.build import build_engine
from engine.startup.model_check import check_model
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.eagle3_drafts import HIDDEN, LAYER, Oracle, bigram_draft, bigram_target, random_tensors, write_draft
from tests.cpu.model_driver import CPU, Poisoner, Served, make_runner, request, serve, settings
from tests.cpu.test_engine_build import answer
from tests.free_drafts import FREE_DRAFTS

VOCAB, NUM_LAYERS = 48, 7
TARGET = {**LAYER, "vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 256}


@pytest.fixture
def target(tmp_path: Path) -> Decoder:
    """A model with random weights."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    model = load_model(EngineConfig(model=str(folder), load_format="dummy"), CPU, torch.float32, lambda _: None)
    assert isinstance(model, Decoder)
    return model


def load(folder: str, target: Decoder) -> Eagle3:
    return load_eagle3(EngineConfig(model=folder), target, CPU, lambda _: None, served_len=256)


OPTIONS: dict[str, tuple[str, int, dict[str, Any]]] = {  # layout, draft vocabulary, settings
    "original": ("original", 20, {}),
    "speculators": ("speculators", 20, {}),
    "one vocabulary": ("speculators", VOCAB, {}),
    "plain residual": ("speculators", 20, {"norm_before_residual": False}),
    "normed residual": ("original", 20, {"norm_before_residual": True}),
    "norm before fc": ("original", 20, {"norm_before_fc": True}),
    "norms of parts": ("speculators", 20, {"fc_norm": True, "norm_output": True}),
    "qwen3": ("speculators", 20, {"model_type": "qwen3", "norm_before_residual": False}),
    "own states": ("original", 20, {"eagle_aux_hidden_state_layer_ids": [6, 1]}),
    "three layers": ("speculators", 20, {"num_layers": 3}),
}


@cache
def made(name: str) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    layout, draft_vocab, options = OPTIONS[name]
    options = dict(options)
    num_layers = options.pop("num_layers", 1)
    num_states = len(options.get("eagle_aux_hidden_state_layer_ids", range(3)))
    return (
        layout,
        options,
        random_tensors(VOCAB, draft_vocab, num_states, num_layers=num_layers, options=options, seed=len(name)),
    )


@pytest.mark.parametrize("has_embedding", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_forward_pass_is_the_published_one(tmp_path: Path, target: Decoder, name: str, has_embedding: bool) -> None:
    layout, options, tensors = made(name)
    generator = torch.Generator().manual_seed(3)
    if has_embedding:
        tensors = {**tensors, "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    draft = load(write_draft(tmp_path / "draft", tensors, VOCAB, options, layout=layout), target)
    ids = torch.arange(12) * 5 % VOCAB
    oracle = Oracle(tensors, options, target.embed(torch.arange(VOCAB)))
    assert draft.streams == ((1, 6) if name == "own states" else (2, 3, 4))
    streams = torch.randn(len(ids), len(draft.streams), HIDDEN, generator=generator)
    states, expected = draft.project(streams.flatten(1)), oracle.project(streams.unbind(1))
    assert torch.allclose(states.double(), expected, atol=1e-4)
    found = draft.forward(ids, torch.arange(len(ids)), states, DenseAttention([*target.states, *draft.states]))
    expected = oracle.forward(ids, expected)
    assert torch.allclose(found.double(), expected, atol=1e-4)
    # The state of a draft stands in for the target's.
    again = draft.forward(ids, torch.arange(len(ids)), found, DenseAttention([*target.states, *draft.states]))
    assert torch.allclose(again.double(), oracle.forward(ids, expected), atol=1e-4)
    logits = draft.logits(again)
    assert logits.shape == (len(ids), VOCAB)
    assert int(logits[0].isfinite().sum()) == len(tensors["lm_head.weight"])
    expected = oracle.logits(oracle.forward(ids, expected), VOCAB)
    assert torch.allclose(logits.double().log_softmax(-1), expected.log_softmax(-1), atol=1e-4)


def test_bfloat16_is_close(tmp_path: Path, target: Decoder) -> None:
    _, options, tensors = made("speculators")
    folder = write_draft(
        tmp_path / "draft",
        {name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()},
        VOCAB,
        options,
        layout="speculators",
    )
    target.dtype, embed = torch.bfloat16, target.embed
    target.embed = lambda ids: embed(ids).bfloat16()
    draft = load(folder, target)
    streams = torch.randn(9, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(9)
    oracle = Oracle(tensors, options, embed(torch.arange(VOCAB)))
    attention = DenseAttention([*target.states, *draft.states])
    states = draft.forward(ids, ids, draft.project(streams.flatten(1).bfloat16()), attention)
    assert states.dtype is torch.bfloat16
    expected = oracle.logits(oracle.forward(ids, oracle.project(streams.unbind(1))), VOCAB).softmax(-1)
    assert (draft.logits(states).double().softmax(-1) - expected).abs().max() < 0.05


DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], type[Exception], str]] = {
    "hidden size": ({"target_hidden_size": 64}, {}, ConfigError, "for states of 64 numbers, and the model has 32"),
    "vocabulary": ({"vocab_size": 47}, {}, ConfigError, "for a vocabulary of 47 tokens, and the model has 48"),
    "draft vocabulary": ({"draft_vocab_size": 49}, {}, ConfigError, "a draft vocabulary of 49 tokens, more than"),
    "states": ({"eagle_aux_hidden_state_layer_ids": [1, 8]}, {}, ModelLoadError, "whole numbers from 0 to 7"),
    "layers": ({"model_type": "gemma2"}, {}, ModelLoadError, "'model_type' is 'gemma2'; Quire needs llama or qwen3"),
    "no states": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, ModelLoadError, "'use_aux_hidden_state' is Fa"),
    "flag": ({"norm_before_residual": "yes"}, {}, ModelLoadError, "'norm_before_residual' is 'yes'; Quire needs true"),
    "no head": ({}, {"lm_head.weight": None}, ModelLoadError, "it lacks 'lm_head.weight'"),
    "no fc": ({}, {"fc.weight": None}, ModelLoadError, "it lacks 'fc.weight'"),
    "no map": ({}, {"d2t": None}, ModelLoadError, "it lacks 'd2t'"),
    "another": ({}, {"mlp.weight": torch.ones(2)}, ModelLoadError, "it has 'mlp.weight' that its config does not call"),
    "shape": ({}, {"fc.weight": torch.ones(HIDDEN, HIDDEN)}, ModelLoadError, "'fc.weight' has shape"),
    "map": ({}, {"d2t": torch.zeros(20, dtype=torch.int64).index_fill_(0, torch.tensor(3), -1)}, ModelLoadError, "'d2t'"),
    "map's end": ({}, {"d2t": torch.full((20,), 29)}, ModelLoadError, "'d2t' does not map 20 draft tokens to as many"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_draft_is_one_sentence(tmp_path: Path, target: Decoder, name: str) -> None:
    settings, changes, kind, sentence = DAMAGE[name]
    tensors = {key: each for key, each in {**made("original")[2], **changes}.items() if each is not None}
    folder = (
        write_draft(tmp_path / "draft", tensors, VOCAB, {}, layout="original") if "lm_head.weight" in tensors else None
    )
    if folder is None:
        folder = write_draft(tmp_path / "draft", made("original")[2], VOCAB, {}, layout="original")
        save_file(tensors, Path(folder) / "model.safetensors")
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(kind, match=sentence) as caught:
        load(folder, target)
    assert str(caught.value).count("\n") == 0


# -- through the engine ------------------------------------------------------------------------------------------------

KEPT = torch.tensor([token for token in range(VOCAB) if token % 6])
_random = random.Random(7)
PROMPTS = [[_random.randrange(VOCAB) for _ in range(length)] for length in (2, 3, 4, 17, 30, 9, 40)]
REGIMES: dict[str, dict[str, int]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "tiny pool": {"num_blocks": 22},
    "blocks of 1": {"block_size": 1, "num_blocks": 600},
    "swapping": {"num_blocks": 22, "num_host_blocks": 100},
}
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_k": 5},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3},
    "several": {"temperature": 1.0, "n": 3},
}


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, `right` and `noisy` drafts of it."""
    folder = tmp_path_factory.mktemp("bigrams")
    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    tensors = bigram_target(VOCAB, NUM_LAYERS, KEPT)
    save_file(tensors, folder / "target" / "model.safetensors")
    write_draft(folder / "right", bigram_draft(tensors, KEPT), VOCAB, {}, layout="original")
    write_draft(folder / "noisy", bigram_draft(tensors, KEPT, noise=0.015), VOCAB, {}, layout="speculators")
    return folder


@pytest.fixture(scope="module")
def model(bigrams: Path) -> Decoder:
    loaded = load_model(EngineConfig(model=str(bigrams / "target")), CPU, torch.float32, lambda _: None)
    assert isinstance(loaded, Decoder)
    return loaded


def requests(sampling: dict[str, object]) -> list[Request]:
    return [request(f"r{i}", prompt, **{"seed": i, "max_tokens": 14, **sampling}) for i, prompt in enumerate(PROMPTS)]


def run(model: Decoder, head: Eagle3 | None, asked: list[Request], apart: int, **regime: int) -> tuple[Served, Stats]:
    config = settings(**regime, num_speculative_tokens=4 * (head is not None))
    scheduler, runner = Scheduler(config), make_runner(model, config, head=head)
    if runner.heads is not None:
        runner.speculate(runner.heads)
    return serve(model, config, asked, apart=apart, scheduler=scheduler, runner=runner), scheduler.stats


@pytest.mark.parametrize(
    ("sampling", "regime"),
    [
        *((name, "roomy") for name in SAMPLING),
        *((name, regime) for name in ("sampled", "several") for regime in REGIMES),
    ],
)
def test_a_right_draft_is_accepted_and_answers_stay(bigrams: Path, model: Decoder, sampling: str, regime: str) -> None:
    plain, _ = run(model, None, requests(SAMPLING[sampling]), 1)
    served, stats = run(model, load(str(bigrams / "right"), model), requests(SAMPLING[sampling]), 1, **REGIMES[regime])
    assert served.ids == plain.ids
    if sampling != "penalised":
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 20


@pytest.mark.parametrize(("of_head", "num_windows"), [(None, 3), (12, 7)])
def test_a_target_with_windows_keeps_a_table_for_each_group(
    bigrams: Path, monkeypatch: pytest.MonkeyPatch, of_head: int | None, num_windows: int
) -> None:
    """And so does a head. Preempted, swapped and forked; blocks that nothing holds are NaN."""
    monkeypatch.setattr(groups, "TILE_KEYS", 4)  # the backend "torch" reads no key before a window
    monkeypatch.setattr(groups, "_MAX_UNUSED", 2.0)
    target = load_model(EngineConfig(model=str(bigrams / "target")), CPU, torch.float32, lambda _: None)
    target._native = None  # type: ignore[attr-defined]
    first, *others = target.states
    target.states = [first, *(replace(spec, window=12) for spec in others)]
    head = load(str(bigrams / "right"), target)  # type: ignore[arg-type]
    head.states = [replace(spec, window=of_head) for spec in head.states]
    windows = groups.group_layers([*target.states, *head.states], target.dtype, 256).windows
    assert len(windows) == num_windows
    asked, plain = requests(SAMPLING["several"]), settings()
    expected = serve(target, plain, asked, apart=1, runner=make_runner(target, plain, "torch"))
    config = replace(
        plain, num_blocks=11 * (1 + num_windows), num_host_blocks=200, num_speculative_tokens=4, windows=windows
    )
    scheduler, runner = Scheduler(config), make_runner(target, config, "torch", head=head)
    poisoner = Poisoner(runner, scheduler)
    served = serve(target, config, asked, apart=1, scheduler=scheduler, runner=poisoner)  # type: ignore[arg-type]
    assert served.ids == expected.ids
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.spec_accepted_tokens > 20


def test_acceptance_is_that_of_the_published_formulas(bigrams: Path, model: Decoder) -> None:
    """Drafts and accepted ones are counted against the formulas, over the states of transformers' model."""
    asked = requests({"max_tokens": 20})[:5]
    plain, _ = run(model, None, asked, 0)
    served, stats = run(model, load(str(bigrams / "noisy"), model), asked, 0)
    assert served.ids == plain.ids
    theirs = LlamaForCausalLM.from_pretrained(bigrams / "target", dtype=torch.float32)
    oracle = Oracle(load_file(bigrams / "noisy" / "model.safetensors"), {}, theirs.model.embed_tokens.weight.detach())
    num_drafts = num_accepted = 0
    for index, prompt in enumerate(PROMPTS[: len(asked)]):
        tokens = torch.tensor([*prompt, *served.ids[f"r{index}", 0]])
        with torch.inference_mode():
            hidden = theirs(tokens[None], output_hidden_states=True).hidden_states
        states = oracle.project([hidden[layer][0] for layer in (2, 3, 4)])
        at = len(prompt)  # of the last known token
        while at < len(tokens) - 1:
            drafts = drafts_by(oracle, tokens[: at + 1], states, min(4, len(tokens) - 2 - at))
            agreeing = [a == b for a, b in zip(drafts, tokens[at + 1 :].tolist(), strict=False)]
            right = [*agreeing, False].index(False)
            num_drafts, num_accepted, at = num_drafts + len(drafts), num_accepted + right, at + right + 1
    assert 0.2 < num_accepted / num_drafts < 0.9
    assert (stats.spec_draft_tokens, stats.spec_accepted_tokens) == (num_drafts, num_accepted)


def drafts_by(oracle: Oracle, tokens: Tensor, states: Tensor, num: int) -> list[int]:
    """Return the tokens that a draft says follow."""
    ids, states, drafts = tokens[1:], states[: len(tokens) - 1], list[int]()
    while len(drafts) < num:
        following = oracle.forward(ids, states)[-1:]
        drafts.append(int(oracle.logits(following, VOCAB).argmax()))
        ids, states = torch.cat((ids, torch.tensor(drafts[-1:]))), torch.cat((states, following))
    return drafts


# -- as users name it --------------------------------------------------------------------------------------------------


def test_a_draft_is_found_out_by_its_config(bigrams: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised, and up to a length."""
    monkeypatch.setattr("engine.startup.speculation.measure_draft_costs", lambda *_, **__: FREE_DRAFTS)
    target = str(bigrams / "target")
    drafting = {"model": str(bigrams / "noisy"), "quantization": "int8", "max_model_len": 40, "moe_backend": "any"}
    asked = request("r", PROMPTS[3], max_tokens=40)
    sizes: dict[str, Any] = {
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_memory_bytes": 1 << 20,
    }
    for dtype in ("float32", "bfloat16"):
        told: list[Progress] = []
        named = EngineConfig(model=target, speculative_config=drafting, dtype=dtype, **sizes)
        assert check_model(named).is_native
        engine = build_engine(named, told.append)
        plain = build_engine(EngineConfig(model=target, dtype=dtype, **sizes), told.append)
        assert engine.config.num_speculative_tokens == 3
        assert engine.config.num_blocks < plain.config.num_blocks
        hints = [each.detail for each in told if each.stage == "speculation" and "no effect" in each.detail]
        assert hints == ["moe_backend has no effect: the kernels of experts are chosen for the device"]
        assert answer(engine, asked) == answer(plain, asked)
        assert 0 < engine.stats.spec_accepted_tokens < engine.stats.spec_draft_tokens
        assert engine.stats.spec_draft_tokens < 60  # none after position 40


def test_what_config_json_shows_is_refused_before_weights(bigrams: Path, tmp_path: Path) -> None:
    def refused(asked: dict[str, Any], **settings: Any) -> str:
        with pytest.raises((ConfigError, ModelLoadError)) as caught:
            check_model(EngineConfig(model=str(bigrams / "target"), speculative_config=asked, **settings))
        return str(caught.value)

    config = json.loads((bigrams / "right" / "config.json").read_text())
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    begin = "--speculative-config: the draft model could not be loaded: "
    assert refused({"model": str(folder)}) == f"{begin}{folder} holds no .safetensors file."
    (folder / "pytorch_model.bin").touch()
    assert "holds only pickled weights (pytorch_model.bin), which can run code when read" in refused(
        {"model": str(folder)}
    )
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text(json.dumps({**config, "target_hidden_size": 64}))
    assert refused({"model": str(folder)}) == (
        f"{begin}{folder}/config.json is of a draft for states of 64 numbers, and the model has 32; choose one that was "
        "trained for this model."
    )
    assert "transformers' code runs this model" in refused({"model": str(folder)}, model_impl="transformers")
    file = find_model(None).path
    assert (
        refused({"method": "eagle3", "model": file}) == f"{begin}{file} is a .gguf file; name a folder of safetensors."
    )
