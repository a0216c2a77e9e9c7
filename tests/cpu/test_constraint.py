"""Constrained rows: the masks against a plain loop, and matchers that keep up with every kind of schedule."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.core.rows import SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import FailureCause
from engine.core.types import FinishReason, Matcher, SamplingParams
from engine.runtime.sampling.constraint import Constrained, Constraints, apply_masks
from tests.cpu.model_driver import Served, TinyModel, make_runner, request, serve, settings

END = 7
WORDS = -(-TinyModel.vocab_size // 32)


class StepMatcher:
    """Wants tokens that differ from the one before by at most `reach`, and is complete after `length` of them."""

    def __init__(self, grammar: StepGrammar) -> None:
        self.grammar = grammar
        self.tokens: list[int] = []
        self._error: str | None = None

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)
        if self.grammar.fails_at == len(self.tokens):
            self._error = "it broke"

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        trial = StepMatcher(self.grammar)
        trial.tokens = list(self.tokens)
        for count, token_id in enumerate(token_ids):
            if trial.is_complete() or token_id not in trial.allowed() or self.grammar.fails_at == len(trial.tokens) + 1:
                return count
            trial.accept(token_id)
        return len(token_ids)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def is_complete(self) -> bool:
        return len(self.tokens) == self.grammar.length or END in self.tokens

    def error(self) -> str | None:
        return self._error

    def allowed(self) -> list[int]:
        last = self.tokens[-1] if self.tokens else 30
        reach = self.grammar.reach
        near = [token for token in range(last - reach, last + reach + 1) if 8 <= token < self.grammar.vocab_size]
        return [*near, END] if len(self.tokens) >= 3 else near


class StepGrammar:
    """A grammar of numbers, whose masks are made in Python."""

    end_ids = frozenset({END})

    def __init__(
        self, reach: int = 2, length: int = 9, fails_at: int = -1, vocab_size: int = TinyModel.vocab_size
    ) -> None:
        self.reach, self.length, self.fails_at, self.vocab_size = reach, length, fails_at, vocab_size

    def start(self) -> StepMatcher:
        return StepMatcher(self)

    def fill_masks(self, matchers: Sequence[Matcher], address: int, num_words: int) -> None:
        assert num_words == -(-self.vocab_size // 32)
        masks = np.ctypeslib.as_array((ctypes.c_int32 * (num_words * len(matchers))).from_address(address))
        words = masks.view(np.uint32).reshape(-1, num_words)
        for row, matcher in enumerate(matchers):
            assert isinstance(matcher, StepMatcher)
            for token in matcher.allowed():
                words[row, token // 32] |= np.uint32(1 << token % 32)


def follows(ids: Sequence[int], grammar: StepGrammar) -> bool:
    matcher = grammar.start()
    for token in ids:
        if matcher.is_complete() or token not in matcher.allowed():
            return False
        matcher.accept(token)
    return True


PROMPTS = [[3, 9, 11, 2, 5], [4] * 11, [20, 21, 22], [50, 8, 13, 60, 33, 1, 12]]


def run(regime: str, depth: int, **sampling: object) -> Served:
    tight = {"num_blocks": 8, "max_num_batched_tokens": 16} if regime == "preempting" else {}
    chunked = {"max_num_batched_tokens": 8} if regime == "chunked" else {}
    config = settings(**tight, **chunked)
    scheduler = Scheduler(config)
    requests = [
        request(f"r{i}", prompt, **({"temperature": 1.0, "seed": i, "eos_token_ids": frozenset({END})} | sampling))
        for i, prompt in enumerate(PROMPTS)
    ]
    served = serve(TinyModel(), config, requests, depth=depth, apart=1, scheduler=scheduler)
    assert (scheduler.stats.preemptions > 0) == (regime == "preempting")
    return served


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 61, 1000])
def test_masks_rule_out_what_has_no_bit(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    masks = generator.integers(-(2**31), 2**31, (2, -(-vocab_size // 32)), dtype=np.int32)
    before = torch.from_numpy(generator.normal(size=(4, vocab_size)).astype(np.float32))
    logits = before.clone()
    apply_masks(logits, [3, 1], masks)
    for row, mask in ((3, masks[0]), (1, masks[1])):
        for token in range(vocab_size):
            is_allowed = int(mask[token // 32]) >> token % 32 & 1
            assert logits[row, token] == (before[row, token] if is_allowed else -torch.inf)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("n", [1, 2])
def test_every_schedule_gives_the_same_answers_within_the_grammar(n: int) -> None:
    grammar = StepGrammar()
    alone = run("roomy", 0, grammar=grammar, n=n)
    assert len(alone.ids) == n * len(PROMPTS)
    assert all(follows(ids, grammar) for ids in alone.ids.values())
    assert {event[-1].finish_reason for event in alone.events.values()} == {FinishReason.STOP}
    for regime, depth in (("roomy", 1), ("chunked", 0), ("chunked", 1), ("preempting", 0), ("preempting", 1)):
        if n == 1 or regime != "preempting":
            assert run(regime, depth, grammar=grammar, n=n).ids == alone.ids, (regime, depth)


def test_constrained_and_free_rows_do_not_disturb_each_other() -> None:
    free = run("roomy", 0)
    requests = [
        request("f", PROMPTS[0], temperature=1.0, seed=0, eos_token_ids=frozenset({END})),
        request("g", PROMPTS[1], temperature=1.0, seed=1, grammar=StepGrammar(), logit_bias=((40, 5.0),)),
        request("h", PROMPTS[2], temperature=1.0, seed=2, grammar=StepGrammar(), repetition_penalty=1.5, logprobs=2),
    ]
    served = serve(TinyModel(), settings(), requests, depth=1)
    assert served.ids["f", 0] == free.ids["r0", 0]
    assert all(follows(served.ids[name, 0], StepGrammar()) for name in "gh")


def test_where_answers_end() -> None:
    grammar = StepGrammar(length=6)
    whole = {"grammar": grammar, "logit_bias": ((END, 100.0),)}
    soon = run("roomy", 1, **whole).ids["r0", 0]  # as soon as it may
    assert (len(soon), soon[-1]) == (4, END)
    later = run("roomy", 1, **whole, min_tokens=5).ids["r0", 0]
    assert (len(later), later[-1] == END) == (6, True)
    for sampling in ({"min_tokens": 12}, {"eos_token_ids": frozenset()}):  # the grammar has the last word
        served = run("roomy", 1, **whole, **sampling)
        assert (len(served.ids["r0", 0]), END in served.ids["r0", 0]) == (6, False)
        assert served.events["r0", 0][-1].finish_reason is FinishReason.STOP
    cut = run("roomy", 1, grammar=grammar, max_tokens=2)
    assert {events[-1].finish_reason for events in cut.events.values()} == {FinishReason.LENGTH}
    exact = run("roomy", 0, grammar=grammar, max_tokens=6, eos_token_ids=frozenset())
    assert {events[-1].finish_reason for events in exact.events.values()} == {FinishReason.STOP}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_matcher_that_fails_ends_its_request_alone(depth: int) -> None:
    config, free = settings(), request("free", PROMPTS[0])
    expected = serve(TinyModel(), config, [free]).ids["free", 0]
    scheduler = Scheduler(config)
    broken = request("broken", PROMPTS[1], grammar=StepGrammar(fails_at=3))
    served = serve(TinyModel(), config, [broken, free], depth=depth, scheduler=scheduler)
    last = served.events["broken", 0][-1]
    assert (last.finish_reason, len(served.ids["broken", 0])) == (FinishReason.ERROR, 2)
    assert "it broke" in str(last.error)
    assert scheduler.stats.failed[FailureCause.GRAMMAR] == 1
    assert served.ids["free", 0] == expected


def test_a_step_that_is_taken_back_does_not_count() -> None:
    config, asked = settings(), request("r", PROMPTS[0], temperature=1.0, grammar=StepGrammar())
    expected = serve(TinyModel(), config, [asked]).ids["r", 0]
    scheduler, runner = Scheduler(config), make_runner(TinyModel(), config)
    scheduler.add(asked)
    served, step = Served(), 0
    while scheduler.has_work:
        first = scheduler.plan(0.0)
        assert first is not None
        pending = runner.run(first)
        second = scheduler.plan(0.0)
        if second is not None:
            following = runner.run(second)
        step += 1
        if step % 3 == 2:  # nothing of the two is committed: their tokens are drawn again
            scheduler.roll_back(0.0)
            continue
        served.take(scheduler.commit(first, pending.wait(), 0.0))
        if second is not None:
            served.take(scheduler.commit(second, following.wait(), 0.0))
    assert step > 3
    assert served.ids["r", 0] == expected


def test_a_matcher_follows_the_token_that_was_committed() -> None:
    """A step that is planned again may draw another token than the one that the matcher has taken in."""
    constraints, params = Constraints(), SamplingParams(max_tokens=9)
    for last in (31, 20):
        piece = SequenceSlice(0, 1, 1, params, [5, last], (), 1, 1)
        row = Constrained(0, 0, 0, piece, StepGrammar(reach=1))
        assert constraints.count_allowed(row, [last + 1, last + 2]) == 2
