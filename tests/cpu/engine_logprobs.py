"""Log probabilities through the whole engine, against transformers over the whole context."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.core.config import SchedulerConfig
from engine.core.scheduling.scheduler import Scheduler
from engine.core.types import Request
from engine.runtime.execution.runner import ModelRunner
from engine.runtime.models.causal_lm import CausalLM
from tests.cpu.model_driver import request, serve, settings

_random = random.Random(3)
_SHARED = [_random.randrange(3, 128) for _ in range(12)]
LENGTHS = (1, 5, 23, 40, 12, 31)
PROMPTS = [[*_SHARED, *(_random.randrange(3, 128) for _ in range(48))][:length] for length in LENGTHS]
NUM_NEW = 10


TIGHT = settings(num_blocks=15, max_model_len=60, max_num_batched_tokens=11)


def largest_difference(
    model: CausalLM,
    theirs: Any,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    config: SchedulerConfig = TIGHT,
    *,
    ask: Callable[..., Request] = request,
    runner: ModelRunner | None = None,
) -> float:
    """Return the largest difference in log probability over all tokens that `model` reports for some prompts.

    They run chunked, in batches, preempted, and once more over the K/V that the first run left in the prefix cache.
    """
    scheduler, worst = Scheduler(config), 0.0
    runs = [{"prompt_logprobs": 1}, {}]  # a request for its prompt's log probabilities computes the whole prompt
    requests = [
        ask(f"{run}-{i}", prompt, max_tokens=NUM_NEW, logprobs=1, **fields)
        for run, fields in enumerate(runs)
        for i, prompt in enumerate(prompts)
    ]
    served = serve(model, config, requests, depth=1, apart=1, scheduler=scheduler, runner=runner)
    # Windows and states are kept for a sequence from its start.
    assert scheduler.stats.preemptions > 0 or config.state_blocks or not config.has_full
    assert scheduler.stats.prefix_hit_tokens > 0
    for run in range(len(runs)):
        for i, prompt in enumerate(prompts):
            answer, events = served.ids[f"{run}-{i}", 0], served.events[f"{run}-{i}", 0]
            assert len(answer) == NUM_NEW
            with torch.no_grad():
                logits = theirs(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].double()
            rows = torch.log_softmax(logits, -1)
            found = [each for event in events for each in event.logprobs or ()]
            about = next((event.prompt.logprobs for event in events if event.prompt and event.prompt.logprobs), None)
            assert len(found) == NUM_NEW
            assert (about is not None) == (run == 0)
            pairs = list(zip(range(len(prompt) - 1, len(rows)), answer, found, strict=False))
            pairs += list(zip(range(len(rows)), prompt[1:], (about or ())[1:], strict=False))
            for row, token, entry in pairs:
                worst = max(worst, abs(float(rows[row, token]) - entry.logprob))
    return worst
