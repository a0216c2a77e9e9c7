"""Every family through the whole engine: chunked, preempted and batched, against transformers over the whole context."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.core.types import Request
from engine.runtime.execution.plain_steps import PlainSteps
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.pool.groups import group_layers
from tests.cpu import test_models_families as own
from tests.cpu import test_models_transformers as adapted
from tests.cpu.engine_logprobs import largest_difference
from tests.cpu.model_driver import make_runner, request, serve, settings, state_blocks

NUM_NEW = 10
_random = random.Random(3)
PROMPTS = [[_random.randrange(3, 128) for _ in range(length)] for length in (1, 5, 23, 40, 12, 31)]


# transformers changes this one's rotation once a sequence outgrows its first training length; we turn all positions by
# the longest length served, as K and V of a cached prefix must fit whatever follows it.
LENGTH_DEPENDENT = "phi3-longrope-long"
RECURRENT = ("qwen3_5", "lfm2", "granitemoehybrid-mamba", "granitemoehybrid-mamba-dense")  # see test_recurrent.py
RECURRENT += (
    "lfm3",
    "lfm3-ungated",
    "bamba",
    "mamba2",
    "falcon_h1",
    "falcon_h1-normed",
    "nemotron_h",
    "nemotron_h-latent",
)
# Mixtures of experts differ below the engine only.
ALIKE = ("qwen3-moe", "qwen3-moe-not-normalised", "mixtral", "olmoe", "granitemoe", "glm4-moe", "glm4-moe-air")
ALIKE += ("glm4_moe_lite", "deepseek_v2", "deepseek_v2-lite", "deepseek_v3-halves-biased", "lfm2-biased", "lfm2-moe")
ALIKE += ("qwen3_5-moe", "qwen3_next", "granitemoeshared", "granitemoehybrid", "granitemoehybrid-dense")
ALIKE += ("granitemoe_swa",)
CASES = [pytest.param(own, name, id=name) for name in own.CASES if name not in (LENGTH_DEPENDENT, *RECURRENT, *ALIKE)]
CASES += [pytest.param(adapted, name, id=f"adapted-{name}") for name in adapted.CASES]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_tight_engine_says_what_transformers_says(kind: ModuleType, name: str, tmp_path: Path) -> None:
    theirs = own.save_tiny(kind.CASES[name], tmp_path)
    config = settings(num_blocks=15, max_model_len=60, max_num_batched_tokens=11)
    scheduler = Scheduler(config)
    requests = [request(f"r{i}", prompt, max_tokens=NUM_NEW) for i, prompt in enumerate(PROMPTS)]
    served = serve(kind.load(tmp_path), config, requests, depth=1, apart=1, scheduler=scheduler)
    assert scheduler.stats.preemptions > 0
    for i, prompt in enumerate(PROMPTS):
        answer = served.ids[f"r{i}", 0]
        assert len(answer) == NUM_NEW
        with torch.no_grad():  # each token is the best after all tokens before it
            logits = theirs(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer


WINDOWED = [(own, name) for name in ("gemma2", "gemma3", "gpt-oss", "olmo3", "qwen2-window", "mistral", "phi3")]
WINDOWED += [(own, "smollm3-window")]
WINDOWED += [(own, "gemma4"), (own, "gemma4-shared"), (own, "gemma3n")]  # full layers of other sizes; shared K/V
LONG = [_random.randrange(3, 128) for _ in range(205)]
LONG_PROMPTS = [LONG, [*LONG[:150], *LONG[:50]], LONG[30:190], LONG[:31], LONG[:5]]
LONG_PROMPTS += [LONG[begin : begin + 30] for begin in range(29, 118, 9)]


@pytest.mark.parametrize(("kind", "name"), WINDOWED)
@pytest.mark.parametrize("num_host_blocks", [0, 300])
def test_groups_with_windows_say_what_transformers_says(
    kind: ModuleType, name: str, num_host_blocks: int, tmp_path: Path
) -> None:
    case = kind.CASES[name]
    theirs = own.save_tiny(own.Case(case.config, case.settings | {"max_position_embeddings": 256}), tmp_path)
    model = kind.load(tmp_path)
    groups = group_layers(model.states, model.dtype, 256)
    assert groups.windows
    num_kept = sum(spec.source is None for spec in model.states)
    assert num_kept == {"gemma4-shared": 3, "gemma3n": 2}.get(name, len(model.states)), "the others have no place"
    config = settings(
        num_blocks=60 * (1 + len(groups.windows)),
        max_model_len=256,
        max_num_batched_tokens=40,
        windows=groups.windows,  # type: ignore[arg-type]
        has_full=groups.has_full,
        num_host_blocks=num_host_blocks if groups.has_full else 0,
    )
    assert largest_difference(model, theirs, LONG_PROMPTS, config) < 1e-4


def test_layers_that_share_narrow_keys_with_others_start(tmp_path: Path) -> None:
    """The first pass, whose numbers must be finite, writes K/V of several layouts; bytes of one are NaN as another's scales."""
    case = own.CASES["gemma4-shared"]
    own.write_tiny(case, tmp_path)
    model = own.load(tmp_path)
    groups = group_layers(model.states, torch.int8, 256)
    config = settings(windows=groups.windows, has_full=groups.has_full)  # type: ignore[arg-type]
    assert groups.windows
    runner = make_runner(model, config, kv_dtype=torch.int8)
    assert not runner.run(warm_up_plan(config, num_seqs=1, num_tokens=16)).wait().errors


CAPPED = {"final_logit_softcapping": 0.05}  # changes small logits, too
PLAIN = {"gemma2": CAPPED, "gemma3n": CAPPED, "granite": {"logits_scaling": 50.0}, "qwen3_5": {}, "falcon_h1": {}}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_step_draws_what_other_steps_draw(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the library, an operation after the other, and both in turn."""
    case = own.CASES[name]
    own.write_tiny(own.Case(case.config, case.settings | PLAIN[name]), tmp_path)
    model = own.load(tmp_path)
    size = state_blocks(model, 4)
    config = settings(
        num_blocks=15 + 2 * size, max_model_len=60, max_num_batched_tokens=11, state_blocks=size, writes_midway=True
    )
    asked = [request(f"r{i}", prompt, max_tokens=NUM_NEW, temperature=1.0, seed=i) for i, prompt in enumerate(PROMPTS)]
    mate = request("mate", PROMPTS[2], max_tokens=4, logprobs=1)  # steps with it are not plain
    computed = list[StepPlan]()

    def run(requests: Sequence[Request]) -> Mapping[tuple[str, int], Sequence[int]]:
        computed.clear()
        return serve(model, config, requests, apart=1).ids

    compute = PlainSteps.compute
    monkeypatch.setattr(PlainSteps, "compute", lambda self, *args: computed.append(args[0]) or compute(self, *args))
    plain = run(asked)
    assert computed
    mixed = run([*asked[:3], mate, *asked[3:]])
    assert computed
    assert {key: ids for key, ids in mixed.items() if key[0] != "mate"} == plain
    monkeypatch.setattr(PlainSteps, "takes", lambda *_: False)
    assert run(asked) == plain


@pytest.mark.parametrize("name", [name for name in adapted.CASES if name == "phimoe"])
def test_log_probabilities_of_transformers_code_are_its_own(name: str, tmp_path: Path) -> None:
    theirs = own.save_tiny(adapted.CASES[name], tmp_path)
    assert largest_difference(adapted.load(tmp_path), theirs) < 4e-5
