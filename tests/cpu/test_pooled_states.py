"""Pooled hidden states of the real runner: against a dense forward pass, and the same bits in every schedule."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import FinishReason, Pooling, PoolingParams
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.runtime.native.library import native
from engine.settings.engine_config import EngineConfig
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.model_driver import CPU, TinyModel, request, serve, settings
from tests.cpu.test_models_families import CASES, write_tiny

MODEL = TinyModel()
KINDS = (Pooling.LAST, Pooling.MEAN)
_random = random.Random(11)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 4, 17, 30, 41, 60, 9)]
PROMPTS += [[*PROMPTS[5][:40], *tail] for tail in ((3, 1), (2,))]
# Each but the first takes something away from the scheduler.
REGIMES: tuple[dict[str, int | bool], ...] = (
    {},
    {"max_num_batched_tokens": 9},
    {"num_blocks": 22, "max_num_batched_tokens": 19},
    {"num_blocks": 22, "num_host_blocks": 60},
    {"enable_prefix_caching": False, "max_num_seqs": 2},
)


def states(prompt: list[int]) -> Tensor:
    return MODEL.forward(torch.tensor(prompt), torch.arange(len(prompt)), DenseAttention(MODEL.states))


def vectors(
    model: CausalLM, regime: dict[str, int | bool], depth: int = 0, others: int = 4
) -> tuple[dict[str, tuple[float, ...]], Scheduler]:
    """Every prompt's vectors, with `others` that generate beside them."""
    config = settings(**regime)
    scheduler = Scheduler(config)
    asked = [
        request(f"{pooling.value}{i}", prompt, pooling=pooling) for i, prompt in enumerate(PROMPTS) for pooling in KINDS
    ]
    for i in range(others):
        asked.insert(4 * i, request(f"other{i}", PROMPTS[i + 1], max_tokens=20, prompt_logprobs=1 if i == 2 else None))
    served = serve(model, config, asked, depth=depth, apart=1, scheduler=scheduler)
    found = {}
    for each in asked:
        end = served.events[each.request_id, 0][-1]
        assert end.finish_reason is FinishReason.LENGTH
        if isinstance(each.params, PoolingParams):
            assert end.prompt is not None
            assert end.prompt.pooled is not None
            found[each.request_id] = end.prompt.pooled
    return found, scheduler


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_vectors_are_the_models_own_hidden_states(regime: dict[str, int | bool]) -> None:
    found, scheduler = vectors(MODEL, regime, depth=len(regime) % 2)
    for i, prompt in enumerate(PROMPTS):
        hidden = states(prompt).double()
        assert found[f"last{i}"] == pytest.approx(hidden[-1].tolist(), abs=2e-5)
        assert found[f"mean{i}"] == pytest.approx(hidden.mean(0).tolist(), abs=2e-5)
    assert (scheduler.stats.preemptions > 0) == ("num_blocks" in regime)
    assert (scheduler.stats.prefix_hit_tokens > 0) == regime.get("enable_prefix_caching", True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), *((name, torch.bfloat16) for name in ("llama", "gemma3n", "gemma4-shared"))],
)
def test_no_schedule_shows(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Alone in one step, and in whatever a regime does to it: the same bits, as the native kernels promise.

    Of the last two families, layers that read others' K/V compute all rows here, and only sampled ones of other prompts.
    """
    if native() is None:
        pytest.skip("no native library and no C compiler")
    write_tiny(CASES[name], tmp_path)
    model = load_model(EngineConfig(model=str(tmp_path)), CPU, dtype, lambda progress: None)
    alone, _ = vectors(model, {}, others=0)
    for regime in REGIMES:
        for depth in (0, 1):
            found, _ = vectors(model, regime, depth)
            assert found == alone, regime


def test_a_state_that_is_no_number_ends_its_request_alone() -> None:
    model = TinyModel(poison=60)
    asked = [request(name, [5, token, 7], pooling=pooling)
             for name, token, pooling in (("bad0", 60, KINDS[0]), ("good", 6, KINDS[1]), ("bad1", 60, KINDS[1]))]  # fmt: skip
    served = serve(model, settings(), asked)
    ends = {each.request_id: served.events[each.request_id, 0][-1] for each in asked}
    assert "not a finite number" in str(ends["bad0"].error)
    assert "not a finite number" in str(ends["bad1"].error)
    assert ends["good"].finish_reason is FinishReason.LENGTH
