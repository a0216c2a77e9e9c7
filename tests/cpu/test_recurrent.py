"""Layers with recurrent state through the whole engine: what transformers says, however a sequence comes to its state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.scheduling.scheduler import Scheduler
from engine.runtime.kv_layout import Pieces, RecurrentSpec
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.pool.states import place_states
from engine.runtime.speculation.drafter import Drafter
from engine.runtime.speculation.text_drafter import TextDrafter
from engine.settings.engine_config import EngineConfig
from engine.startup.speculation import load_speculation
from tests.cpu import test_weights_gguf as gguf
from tests.cpu.engine_logprobs import largest_difference
from tests.cpu.model_driver import Served, TinyModel, make_runner, request, serve, settings, solo_greedy, state_blocks
from tests.cpu.test_models_families import CASES, Case, load, save_tiny
from tests.cpu.test_speculation import Prophet, draft_model

NAMES = ("qwen3_5", "granitemoehybrid-mamba", "lfm2", "nemotron_h-latent", "falcon_h1", "mamba2", "lfm3")
_random = random.Random(5)
LONG = [_random.randrange(3, 128) for _ in range(100)]
PROMPTS = [LONG, [*LONG[:70], *LONG[:20]], LONG[30:90], LONG[:31], LONG[:5]]


@pytest.fixture(autouse=True)
def _token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' chunked form is 8e-5 from its own in float64 here; token by token it is 2e-5 from that."""
    module: Any = modeling_qwen3_5

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **settings: Any) -> Any:
        names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
        return module.torch_recurrent_gated_delta_rule(q, k, v, g, beta, **{name: settings[name] for name in names})

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", rule)


def tiny(name: str, folder: Path) -> tuple[CausalLM, Any]:
    case = CASES[name]
    theirs = save_tiny(Case(case.config, case.settings | {"max_position_embeddings": 128}), folder)
    return load(folder), theirs


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    model, theirs = tiny(name, tmp_path)
    size = state_blocks(model, 4)
    config = settings(
        writes_midway=True, num_blocks=150 + 6 * size, max_model_len=128, max_num_batched_tokens=40, state_blocks=size
    )
    assert largest_difference(model, theirs, PROMPTS, config) < 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_host_blocks", [0, 100])
def test_preemption_changes_no_token(name: str, num_host_blocks: int, tmp_path: Path) -> None:
    model, _ = tiny(name, tmp_path)
    size = state_blocks(model, 4)
    config = settings(
        num_blocks=15 + 2 * size,
        max_model_len=60,
        max_num_batched_tokens=11,
        state_blocks=size,
        writes_midway=True,
        num_host_blocks=num_host_blocks,
    )
    scheduler, prompts = Scheduler(config), [LONG[i : i + length] for i, length in enumerate((1, 5, 23, 40, 12, 31))]
    requests = [request(f"r{i}", prompt, max_tokens=10) for i, prompt in enumerate(prompts)]
    served = serve(model, config, requests, depth=1, apart=1, scheduler=scheduler)
    assert scheduler.stats.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert served.ids[f"r{i}", 0] == solo_greedy(model, prompt, 10)


# By regime; the least room is one sequence's, and some blocks.
DRAFTS: dict[str, dict[str, int]] = {
    "roomy": {"num_blocks": 100},
    "chunked": {"num_blocks": 100, "max_num_batched_tokens": 8},
    "tiny_pool": {"num_blocks": 12},
    "swapping": {"num_blocks": 12, "num_host_blocks": 100},
    "block_size_8": {"num_blocks": 100, "block_size": 8},
}


SAMPLED = {"temperature": 1.0, "n": 2}
OF_EACH = [pytest.param(NAMES[0], regime, {}, id=regime) for regime in DRAFTS]
OF_EACH += [pytest.param(NAMES[0], regime, SAMPLED, id=f"{regime}-sampled") for regime in ("chunked", "swapping")]
OF_EACH += [pytest.param(name, "swapping", SAMPLED, id=name) for name in NAMES[1:]]


@pytest.mark.parametrize(("name", "regime", "sampling"), OF_EACH)
def test_right_and_wrong_drafts_change_no_answer(
    name: str, regime: str, sampling: dict[str, Any], tmp_path: Path
) -> None:
    """A step takes in as many drafts of the one before as were right."""
    model, _ = tiny(name, tmp_path)
    prompts, changes = [LONG[:length] for length in (1, 5, 23, 30, 12)], DRAFTS[regime]
    size, num_states = state_blocks(model, changes.get("block_size", 4)), 4 if "n" in sampling else 2
    changes = changes | {
        "num_blocks": changes["num_blocks"] + num_states * size,
        "state_blocks": size,
        "max_model_len": 64,
    }
    asked = [request(f"r{i}", each, **{"max_tokens": 14, "seed": i} | sampling) for i, each in enumerate(prompts)]

    def run(make: Callable[[SchedulerConfig], Drafter] | None) -> tuple[Served, Scheduler]:
        config = settings(writes_midway=True, **changes, num_speculative_tokens=4 if make else 0)
        scheduler, runner = Scheduler(config), make_runner(model, config)
        if make is not None:
            runner.speculate(make(config))
        return serve(model, config, asked, apart=1, scheduler=scheduler, runner=runner), scheduler

    plain, before = run(None)
    assert before.stats.preemptions > 0 or sampling or regime not in ("tiny_pool", "swapping")
    futures = [[*prompts[int(name[1:])], *ids] for (name, _), ids in plain.ids.items()]
    prophets = [lambda _: Prophet(futures), lambda _: Prophet(futures, is_wrong_at=())]
    for make in (*prophets, lambda _: TextDrafter(1, 3), lambda config: draft_model(config, Attending())):
        served, scheduler = run(make)
        assert served.ids == plain.ids
        assert scheduler.stats.spec_accepted_tokens > 10 or make not in prophets


def test_a_draft_model_has_to_attend(tmp_path: Path) -> None:
    model, _ = tiny("qwen3_5", tmp_path)
    asked = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    config = EngineConfig(model=str(tmp_path), dtype="float32", speculative_config=asked)
    with pytest.raises(ConfigError, match="recurrent state, from which rejected drafts cannot be taken back"):
        load_speculation(config, model, torch.device("cpu"), lambda progress: None)


class Attending(TinyModel):
    """A draft model with the vocabulary of the families."""

    vocab_size = 128


@pytest.mark.parametrize("name", NAMES)
def test_choices_go_on_from_the_state_of_their_prompt(name: str, tmp_path: Path) -> None:
    """Each has the log probabilities that transformers has over its whole context."""
    model, theirs = tiny(name, tmp_path)
    size = state_blocks(model, 4)
    config = settings(
        writes_midway=True, num_blocks=60 + 8 * size, max_model_len=64, max_num_batched_tokens=11, state_blocks=size
    )
    sampling = {"n": 3, "temperature": 1.0, "logprobs": 1, "max_tokens": 9}
    served = serve(model, config, [request(f"r{i}", LONG[:num], **sampling) for i, num in enumerate((1, 12, 40))])
    assert len(set(map(tuple, served.ids.values()))) == 9
    for (request_id, choice), ids in served.ids.items():
        prompt = LONG[: (1, 12, 40)[int(request_id[1:])]]
        with torch.no_grad():
            logits = theirs(torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(ids)), ids].tolist()
        found = [entry.logprob for event in served.events[request_id, choice] for entry in event.logprobs or ()]
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "nemotron_h_moe/latent", "lfm2", "lfm2moe"])
def test_a_gguf_file_says_the_same(name: str, tmp_path: Path) -> None:
    """Value heads of Qwen 3.5 are moved there."""
    case, names, extra = gguf.ARCHITECTURES[name]
    arch, theirs = name.partition("/")[0], save_tiny(case, tmp_path)
    file = gguf.write(tmp_path / "m.gguf", arch, theirs.config, gguf.convert(theirs, arch, names), **extra)
    asked = [request(f"r{length}", LONG[:length], max_tokens=9) for length in (1, 12, 40)]
    found = []
    for model in (load(tmp_path), load(file)):
        size = state_blocks(model, 4)
        config = settings(
            writes_midway=True, num_blocks=60 + 6 * size, max_model_len=64, max_num_batched_tokens=11, state_blocks=size
        )
        found.append(serve(model, config, asked).ids)
    assert found[0] == found[1]


def test_pieces_are_apart_and_never_across_blocks() -> None:
    spec = RecurrentSpec((Pieces(5, (8, 4), torch.float32), Pieces(3, (3, 7), torch.bfloat16)), 1, torch.float32)
    places = place_states([spec, spec], 300)
    used = set()
    for layer in places.of_layer.values():
        for (block, first), size in zip(layer.tolist(), [128] * 5 + [42] * 3, strict=True):
            assert first % 64 == 0
            assert first + size <= 300
            assert block < places.num_blocks
            found = {(block, byte) for byte in range(first, first + size)}
            assert not found & used
            used |= found
    with pytest.raises(ConfigError, match="at least 2 times"):
        place_states([spec], 64)
