"""Speculation in the runner: whatever is drafted, every answer is token for token what it is without drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from engine.core.plan import StepPlan
from engine.core.scheduler import Scheduler
from engine.core.types import FinishReason, Request
from engine.runtime.speculation.base import Drafter
from engine.runtime.speculation.ngram import NgramDrafter, continuation
from tests.cpu.model_driver import Served, TinyModel, make_runner, request, serve, settings
from tests.cpu.test_constraint import END, StepGrammar

MODEL = TinyModel()
_random = random.Random(11)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 3, 4, 17, 30, 9)]
ASKED: dict[str, Mapping[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "biased": {"logit_bias": ((5, 2.0), (9, -3.0)), "min_tokens": 6, "eos_token_ids": frozenset(range(20))},
    "stopped": {"temperature": 1.0, "stop_token_ids": frozenset(range(0, 61, 3))},
    "scored": {"temperature": 1.0, "logprobs": 3},
    "several": {"temperature": 1.0, "n": 3},
    "constrained": {"temperature": 1.0, "grammar": StepGrammar(reach=3), "eos_token_ids": frozenset({END})},
}
REGIMES = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 8},
    "tiny_pool": {"num_blocks": 22},
    "block_size_1": {"block_size": 1, "num_blocks": 600},
    "swapping": {"num_blocks": 22, "num_host_blocks": 100},
}


class Prophet:
    """Drafts what is known to come, with every fifth token wrong."""

    def __init__(self, futures: Sequence[Sequence[int]]) -> None:
        self._futures = futures
        self.closed = False

    def draft(self, plan: StepPlan) -> dict[int, list[int]]:
        drafts = {}
        for index, num in plan.num_drafts.items():
            tokens = plan.slices[index].tokens
            future = next((each for each in self._futures if list(each[: len(tokens)]) == list(tokens)), [])
            coming = list(future[len(tokens) : len(tokens) + num])
            drafts[index] = [
                (token + 1) % 61 if at % 5 == 4 else token for at, token in enumerate(coming, start=len(tokens))
            ]
        return {index: found for index, found in drafts.items() if found}

    def close(self) -> None:
        self.closed = True


def requests(sampling: Mapping[str, object]) -> list[Request]:
    return [request(f"r{i}", prompt, **{"seed": i, "max_tokens": 20, **sampling}) for i, prompt in enumerate(PROMPTS)]


def run(sampling: Mapping[str, object], drafter: Drafter | None, **regime: int) -> tuple[Served, Scheduler]:
    config = settings(**regime, num_speculative_tokens=4 if drafter else 0)
    scheduler, runner = Scheduler(config), make_runner(MODEL, config)
    if drafter is not None:
        runner.speculate(drafter)
    return serve(MODEL, config, requests(sampling), apart=1, scheduler=scheduler, runner=runner), scheduler


def futures(served: Served) -> list[list[int]]:
    return [[*PROMPTS[int(name[1:])], *ids] for (name, _), ids in served.ids.items()]


def logprobs(served: Served) -> dict[tuple[str, int], list[float]]:
    return {
        key: [entry.logprob for event in events for entry in event.logprobs or ()]
        for key, events in served.events.items()
    }


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
@pytest.mark.parametrize("sampling", ASKED.values(), ids=ASKED)
def test_answers_are_the_same_with_and_without_drafts(
    sampling: Mapping[str, object], regime: Mapping[str, int]
) -> None:
    plain, _ = run(sampling, None)
    for drafter in (Prophet(futures(plain)), NgramDrafter(1, 3)):
        served, scheduler = run(sampling, drafter, **regime)
        assert served.ids == plain.ids
        for key, events in served.events.items():
            assert events[-1].finish_reason == plain.events[key][-1].finish_reason
            assert events[-1].stop_reason == plain.events[key][-1].stop_reason
        for key, expected in logprobs(plain).items():
            assert logprobs(served)[key] == pytest.approx(expected, abs=1e-5)
        stats = scheduler.stats
        if isinstance(drafter, Prophet):
            assert 0 < stats.spec_accepted_tokens < stats.spec_draft_tokens
        assert sum(stats.spec_accepted_at) == stats.spec_accepted_tokens


def test_drafts_are_cut_where_the_grammar_forbids_them() -> None:
    """Right drafts behind a grammar are all accepted, so that a step brings as many tokens as without one."""
    sampling = ASKED["constrained"]
    plain, before = run(sampling, None)
    served, after = run(sampling, Prophet(futures(plain)))
    assert served.ids == plain.ids
    assert after.stats.steps < 0.7 * before.stats.steps


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_poisoned_draft_harms_nobody(backend: str) -> None:
    """One for which the model gives no finite number: the sequence goes on without drafts."""
    model = TinyModel(poison=42)
    plain = serve(model, settings(), requests({}))
    assert all(events[-1].finish_reason is FinishReason.LENGTH for events in plain.events.values())

    class Poisoner(Prophet):
        def draft(self, plan: StepPlan) -> dict[int, list[int]]:
            return {index: [*drafts[:-1], 42] for index, drafts in super().draft(plan).items()}

    config = settings(num_speculative_tokens=4)
    runner = make_runner(model, config, backend)
    runner.speculate(Poisoner(futures(plain)))
    assert serve(model, config, requests({}), runner=runner).ids == plain.ids


def test_a_failure_behind_a_right_draft_is_told_when_its_turn_comes() -> None:
    """All tokens before it are the same, and so is the error."""
    grammar = StepGrammar(reach=3, fails_at=5)
    plain = serve(MODEL, settings(), requests({**ASKED["constrained"], "grammar": grammar}))
    whole, _ = run(ASKED["constrained"], None)
    config = settings(num_speculative_tokens=4)
    runner = make_runner(MODEL, config)
    runner.speculate(Prophet(futures(whole)))
    served = serve(MODEL, config, requests({**ASKED["constrained"], "grammar": grammar}), runner=runner)
    assert served.ids == plain.ids
    for key, events in plain.events.items():
        assert (served.events[key][-1].finish_reason, str(served.events[key][-1].error)) == (
            events[-1].finish_reason,
            str(events[-1].error),
        )
    assert FinishReason.ERROR in {events[-1].finish_reason for events in plain.events.values()}


def test_closing_the_runner_closes_the_drafter() -> None:
    drafter, runner = Prophet([]), make_runner(MODEL, settings())
    runner.speculate(drafter)
    runner.close()
    assert drafter.closed


# -- prompt lookup -----------------------------------------------------------------------------------------------------


def by_hand(text: list[int], shortest: int, longest: int, num: int) -> list[int]:
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                longer = list(text)
                while len(longer) < len(text) + num:
                    longer.append(longer[end - len(text) + len(longer)])
                return longer[len(text) :]
    return []


def test_a_continuation_is_what_followed_the_longest_match() -> None:
    rng = random.Random(2)
    num_found = 0
    for _ in range(600):
        text = [rng.randrange(rng.choice([2, 5, 40])) for _ in range(rng.randrange(1, 60))]
        shortest = rng.randrange(1, 4)
        longest, num = shortest + rng.randrange(3), rng.randrange(1, 7)
        expected = by_hand(text, shortest, longest, num)
        assert continuation(np.array(text, np.int32), shortest, longest, num) == expected
        num_found += bool(expected)
    assert 100 < num_found < 600
