"""The real model, float32: whatever the scheduler does, every request says what transformers says greedily alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Request
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu.model_driver import make_runner, request, serve, settings

NUM_NEW = 10
SYSTEM = "You are a careful librarian who answers in one short sentence and never makes anything up. "
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "1, 2, 3, 4, 5, 6,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    SYSTEM + "Who wrote Hamlet?",
    SYSTEM + "Which planet is the largest?",
    " ".join(f"{i} squared is {i * i}." for i in range(2, 7)) + " 7 squared is",
)
BLOCK_SIZE = 4


class Real:
    """The model, its prompts, and how each goes on by transformers' most likely tokens."""

    def __init__(self, theirs: Any) -> None:
        path = Path(find_model(None).path)
        tokenizer = load_tokenizer(str(path))
        self.prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        self.model: CausalLM = load_model(
            EngineConfig(model=str(path), dtype="float32"), torch.device("cpu"), torch.float32, lambda progress: None
        )
        served = serve(self.model, self.regime("roomy"), self.requests())
        self.expected = [served.ids[f"r{i}", 0] for i in range(len(TEXTS))]
        # Each token is the most likely one after those before it: what `generate` computes one by one, in one pass.
        for prompt, found in zip(self.prompts, self.expected, strict=True):
            assert len(found) == NUM_NEW
            with torch.inference_mode():
                logits = theirs(torch.tensor([prompt + found[:-1]]), use_cache=False).logits
            assert logits[0, len(prompt) - 1 :].argmax(-1).tolist() == found

    def requests(self) -> list[Request]:
        return [request(f"r{i}", prompt, max_tokens=NUM_NEW) for i, prompt in enumerate(self.prompts)]

    def regime(self, name: str) -> SchedulerConfig:
        longest = max(map(len, self.prompts)) + NUM_NEW
        changes = {
            "roomy": {},
            "chunked": {"max_num_batched_tokens": 24},
            "preempting": {"num_blocks": -(-longest // BLOCK_SIZE), "max_num_batched_tokens": 64},
        }
        return settings(**({"block_size": BLOCK_SIZE, "num_blocks": 300} | changes[name]))


@pytest.fixture(scope="module")
def real(transformers_smollm2: Any) -> Real:
    return Real(transformers_smollm2)


@pytest.mark.parametrize(("regime", "depth"), [("chunked", 1), ("preempting", 1)])
def test_greedy_batches(real: Real, regime: str, depth: int) -> None:
    config = real.regime(regime)
    scheduler = Scheduler(config)
    served = serve(real.model, config, real.requests(), depth=depth, apart=2, scheduler=scheduler)
    assert [served.ids[f"r{i}", 0] for i in range(len(TEXTS))] == real.expected
    if regime == "preempting":
        assert scheduler.stats.preemptions > 0
    else:
        assert scheduler.stats.prefix_hit_tokens >= 16  # the second of the two that share a beginning


def test_a_second_time_everything_is_cached(real: Real) -> None:
    config = real.regime("roomy")
    scheduler, runner = Scheduler(config), make_runner(real.model, config)
    for round_ in range(2):
        served = serve(real.model, config, real.requests(), apart=2, scheduler=scheduler, runner=runner)
        assert [served.ids[f"r{i}", 0] for i in range(len(TEXTS))] == real.expected, f"round {round_}"
        assert scheduler.stats.prefix_hit_tokens >= 16  # the second of the two that share a beginning
    assert scheduler.stats.prefix_hit_tokens > sum(len(prompt) - 5 for prompt in real.prompts)


def test_greedy_choices(real: Real) -> None:
    config = real.regime("roomy")
    served = serve(real.model, config, [request("r", real.prompts[1], max_tokens=NUM_NEW, n=3)])
    assert [served.ids["r", choice] for choice in range(3)] == [real.expected[1]] * 3


def test_seeded_text_alone_busy_preempted_and_on_a_hit(real: Real) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "seed": 42, "max_tokens": NUM_NEW, "n": 2}
    asked = request("s", real.prompts[5], **sampling)
    alone = serve(real.model, real.regime("roomy"), [asked]).ids
    assert alone["s", 0] != alone["s", 1]
    for regime in ("roomy", "preempting"):  # where r5 and r6 have left the beginning of this prompt in the cache
        config = real.regime(regime)
        served = serve(real.model, config, [*real.requests(), asked], apart=2)
        assert {key: served.ids[key] for key in alone} == alone
