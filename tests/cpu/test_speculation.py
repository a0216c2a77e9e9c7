"""Speculation in the runner: whatever is drafted, every answer is token for token what it is without drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.config import SchedulerConfig
from engine.core.rows import Rows, SequenceSlice
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan
from engine.core.types import FinishReason, Request
from engine.runtime.attention.table import load_backend
from engine.runtime.execution.synthetic import warm_up_plan
from engine.runtime.models.causal_lm import CausalLM
from engine.runtime.models.load import load_model
from engine.runtime.native.library import native
from engine.runtime.pool.groups import TILE_KEYS
from engine.runtime.pool.kv_cache import KVCache
from engine.runtime.pool.row_tables import RowTables
from engine.runtime.speculation.draft_model import DraftModel
from engine.runtime.speculation.drafter import Drafter, KnownPositions
from engine.runtime.speculation.text_drafter import TextDrafter, continuation
from engine.settings.engine_config import EngineConfig
from engine.sources.model_source import find_model
from engine.text.tokenizer_files import load_tokenizer
from tests.cpu.dense_attention import DenseAttention
from tests.cpu.model_driver import CPU, Served, TinyModel, make_runner, request, serve, settings
from tests.cpu.test_constraint import END, StepGrammar

MODEL = TinyModel()
_random = random.Random(11)
PROMPTS = [[_random.randrange(MODEL.vocab_size) for _ in range(length)] for length in (1, 3, 4, 17, 30, 9)]
ASKED: dict[str, Mapping[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "biased": {"logit_bias": ((5, 2.0), (9, -3.0)), "min_tokens": 6, "eos_token_ids": frozenset(range(20))},
    "ruled": {
        "temperature": 1.0,
        "allowed_token_ids": frozenset(range(4, 24)),
        "bad_words": ((7,), (5, 6), *((first, second, 9) for first in range(4, 14) for second in range(4, 24))),
    },
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
    "groups": {"num_blocks": 44, "windows": (24 + TILE_KEYS - 1,), "num_host_blocks": 100},
}


# Everything where there is room, and what depends on more than the step itself everywhere.
CASES = [(name, "roomy") for name in ASKED]
CASES += [
    (name, regime)
    for name in ("penalised", "ruled", "several", "constrained")
    for regime in REGIMES
    if regime != "roomy"
]


class Prophet:
    """Drafts what is known to come, with the tokens at some positions wrong."""

    def __init__(self, futures: Sequence[Sequence[int]], is_wrong_at: Container[int] = range(4, 1000, 5)) -> None:
        self._futures, self._is_wrong_at = futures, is_wrong_at
        self.closed = False
        self.forgotten: list[int] = []

    def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
        drafts = {}
        for index, num in plan.drafts:
            tokens = slices[index].tokens
            future = next((each for each in self._futures if list(each[: len(tokens)]) == list(tokens)), [])
            coming = list(future[len(tokens) : len(tokens) + num])
            drafts[index] = [
                (token + 1) % 61 if at in self._is_wrong_at else token
                for at, token in enumerate(coming, start=len(tokens))
            ]
        return {index: found for index, found in drafts.items() if found}

    def forget(self, blocks: Sequence[int]) -> None:
        self.forgotten = list(blocks)

    def close(self) -> None:
        self.closed = True


def requests(sampling: Mapping[str, object]) -> list[Request]:
    return [request(f"r{i}", prompt, **{"seed": i, "max_tokens": 14, **sampling}) for i, prompt in enumerate(PROMPTS)]


@cache
def plainly(name: str) -> Served:
    return run(ASKED[name], None)[0]


def run(sampling: Mapping[str, object], drafter: Drafter | None, **regime: Any) -> tuple[Served, Scheduler]:
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


@pytest.mark.parametrize(("name", "regime"), CASES)
def test_answers_are_the_same_with_and_without_drafts(name: str, regime: str) -> None:
    sampling = ASKED[name]
    plain = plainly(name)
    for drafter in (Prophet(futures(plain)), TextDrafter(1, 8, least=0.1, num_answers=9)):
        served, scheduler = run(sampling, drafter, **REGIMES[regime])
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


def test_a_poisoned_draft_harms_nobody() -> None:
    """One for which the model gives no finite number: the sequence goes on without drafts."""
    model = TinyModel(poison=42)
    plain = serve(model, settings(), requests({}))
    assert all(events[-1].finish_reason is FinishReason.LENGTH for events in plain.events.values())

    class Poisoner(Prophet):
        def draft(self, plan: StepPlan, slices: Sequence[SequenceSlice]) -> dict[int, list[int]]:
            return {index: [*drafts[:-1], 42] for index, drafts in super().draft(plan, slices).items()}

    config = settings(num_speculative_tokens=4)
    runner = make_runner(model, config, "torch")
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


def by_hand(
    texts: list[list[int]], shortest: int, longest: int, num: int, factor: float, least: float
) -> tuple[int, list[int]]:
    """Return how many places match, and the tokens that followed most of them; -1 ends every text but the last."""
    own = texts[-1]
    for size in range(min(longest, len(own) - 1), shortest - 1, -1):
        rows = []
        for text in texts:
            for end in range(size, len(text)):
                if text[end - size : end] == own[-size:]:
                    longer = list(text) if text is own else [*text, *[-1] * num]
                    while len(longer) < len(text) + num:
                        longer.append(longer[end - len(text) + len(longer)])
                    rows.append(longer[end : end + max(1, int(min(num, size * factor)))])
        if rows:
            break
    else:
        return 0, []
    drafts: list[int] = []
    agreeing = rows
    for place in range(len(rows[0])):
        counts = Counter(row[place] for row in agreeing)
        token = next(row[place] for row in reversed(agreeing) if counts[row[place]] == max(counts.values()))
        agreeing = [row for row in agreeing if row[place] == token]
        if token == -1 or len(agreeing) < least * len(rows):
            break
        drafts.append(token)
    return len(rows), drafts


def test_a_continuation_is_what_followed_the_longest_matches_most_often() -> None:
    rng, found = random.Random(2), Counter[str]()
    for _ in range(800):
        num_ids = rng.choice([2, 5, 40])
        texts = [[rng.randrange(num_ids) for _ in range(rng.randrange(1, 60))] for _ in range(rng.randrange(1, 4))]
        for text in texts[:-1]:
            text.append(-1)
        shortest = rng.randrange(1, 4)
        asked = (
            shortest,
            shortest + rng.randrange(9),
            rng.randrange(1, 7),
            rng.choice([0.5, 1.0, 9.0]),
            rng.random() / 2,
        )
        num_places, expected = by_hand(texts, *asked)
        assert continuation([np.array(text, np.int32) for text in texts], *asked) == expected
        found += Counter(places=bool(num_places), several=num_places > 1, drafts=bool(expected))
    assert 200 < found["several"] < found["places"] < 800
    assert 100 < found["drafts"] < found["places"]


def test_of_very_many_places_the_latest_that_match_longest_count() -> None:
    text = [7, 8, 1, 3, *[8, 2] * 400, 7, 8]
    assert continuation([np.array(text, np.int32)], 1, 4, 2) == [1, 3]


def test_answers_are_shared_where_blocks_are() -> None:
    """Sequences with the same root find an answer once its slot has another sequence; those with another root or none never do."""
    drafter, rows, config = TextDrafter(2, 8, num_answers=2), Rows(), settings()

    def answer(seq_id: int, root: bytes, answer: list[int], *, slot: int = 0) -> list[int]:
        """Begin a row with the prompt [1, 2], let it answer, and return what is drafted behind that."""
        plan = warm_up_plan(config, 1, 1)
        row = plan.rows[0]._replace(slot=slot, seq_id=seq_id, num_prompt=2, ids=(1, 2), root=root)
        plan = plan._replace(rows=(row,), chunks=(plan.chunks[0]._replace(slot=slot),))
        slices = rows.follow(plan)
        drafter.draft(plan, slices)
        slices[0].tokens.extend(answer)
        return drafter.draft(StepPlan(0, drafts=((0, 9),)), slices).get(0, [])

    assert answer(1, b"a", [5, 6, 7, 8]) == []
    assert answer(2, b"b", [5, 6]) == []
    assert answer(3, b"", [5, 6]) == []
    assert answer(4, b"a", [4, 5, 6]) == [7, 8]
    assert answer(5, b"a", [5, 6, 9], slot=1) == []
    assert answer(4, b"a", [4, 5, 6]) == [7, 8], "the same sequence begins again after a preemption"
    assert answer(6, b"", [5, 6]) == []
    assert answer(7, b"a", [0, 0, 6, 9], slot=1) == [], "an answer ends where it ended"
    assert answer(8, b"a", [7, 8], slot=1) == [], "of three answers two are kept"
    assert answer(9, b"a", [5, 6], slot=2) == [9]
    drafter.close()
    assert answer(11, b"a", [5, 6], slot=1) == []


def test_a_slot_that_changes_hands_begins_a_text() -> None:
    drafter = TextDrafter(1, 3)
    for seq_id, tokens, expected in ((1, [9, 8, 7, 9], {0: [8, 7]}), (2, [1, 2, 1], {0: [2, 1]})):
        (piece,) = Rows().follow(warm_up_plan(settings(), 1, 1))
        piece = piece._replace(seq_id=seq_id, tokens=tokens)
        assert drafter.draft(StepPlan(0, drafts=((0, 2),)), [piece]) == expected


# -- a draft model -----------------------------------------------------------------------------------------------------


def draft_model(config: SchedulerConfig, model: CausalLM = MODEL) -> DraftModel:
    backend = load_backend("auto", CPU)
    pool = KVCache(
        model.states,
        backend,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        dtype=model.dtype,
        device=CPU,
    )
    return DraftModel(model, backend, pool, config, CPU)


@pytest.mark.parametrize(("name", "regime"), [("greedy", "roomy"), *(("several", regime) for regime in REGIMES)])
def test_a_model_that_drafts_for_itself_is_always_right(name: str, regime: str) -> None:
    """So its K/V are what they should be, after prefix hits, forks, copies, chunks, preemption and swapping."""
    plain = plainly(name)
    drafter = draft_model(settings(**REGIMES[regime]))
    served, scheduler = run(ASKED[name], drafter, **REGIMES[regime])
    assert served.ids == plain.ids
    stats = scheduler.stats
    assert stats.spec_accepted_tokens == stats.spec_draft_tokens > 30


class Other(TinyModel):
    """One that mostly agrees."""

    error = 0.15

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return super().logits(hidden + self.error * torch.sin(17 * hidden), out)


def test_another_model_drafts_and_nothing_changes() -> None:
    for name in ("greedy", "seeded", "constrained"):
        plain = plainly(name)
        served, scheduler = run(ASKED[name], draft_model(settings(), Other()))
        assert served.ids == plain.ids
        assert scheduler.stats.spec_accepted_tokens > 0
        assert scheduler.stats.spec_accepted_tokens < scheduler.stats.spec_draft_tokens or name == "constrained"


def test_blocks_that_came_from_elsewhere_are_read_anew() -> None:
    config = settings(num_speculative_tokens=4)
    runner, prophet = make_runner(MODEL, config), Prophet([])
    runner.speculate(prophet)
    rows = np.zeros((2, sum(view[0].nbytes for view in runner.blocks)), np.uint8)
    runner.write_blocks([3, 1], rows)
    assert prophet.forgotten == [3, 1]
    tables, size = RowTables(config), config.block_size
    known, plan = KnownPositions(config, tables), warm_up_plan(config, 1, 3 * size)
    plan = plan._replace(rows=(plan.rows[0]._replace(tables=((2, 3, 5),)),))
    tables.follow(plan)
    piece = Rows().follow(plan)[0].at(3 * size - 1)
    known.note(piece.slot, 0, 3 * size - 1)
    assert known.up_to(piece) == 3 * size - 1
    known.bring([3])
    known.follow(plan, [])
    assert known.up_to(piece) == size, "a row that begins again is walked from its first block"


def test_a_draft_model_of_short_contexts_leaves_long_ones_alone() -> None:
    class Short(TinyModel):
        max_model_len = 20

    plain = plainly("greedy")
    served, scheduler = run({}, draft_model(settings(), Short()))
    assert served.ids == plain.ids
    assert scheduler.stats.spec_drafts > 0


def test_what_prompts_share_is_read_once() -> None:
    """The second of two equal prompts finds the first one's blocks in the pool of either model."""
    config = settings(num_speculative_tokens=4)
    runner, drafter = make_runner(MODEL, config), draft_model(config)
    runner.speculate(drafter)
    num_read: list[int] = []
    forward = MODEL.forward
    model = drafter._model

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def forward(self, ids: Tensor, *rest: object) -> Tensor:
            num_read.append(len(ids))
            return forward(ids, *rest)

    drafter._model = Counting()  # type: ignore[assignment]
    scheduler = Scheduler(config)
    for name in "ab":
        served = serve(MODEL, config, [request(name, PROMPTS[4], max_tokens=3)], scheduler=scheduler, runner=runner)
        assert len(served.ids[name, 0]) == 3
    whole = len(PROMPTS[4])
    first, second = (num for num in num_read if num > 1)
    assert first == whole + 1
    assert second <= whole % config.block_size + 1  # less where a part of a block was copied as well


def test_what_is_drawn_behind_drafts_follows_the_models_distribution() -> None:
    """Over many seeds, the pairs of second and third tokens of an answer, against their exact probabilities.

    The draft model sees the very noise that the draw is made with, and it is often wrong: were a draft ever kept because
    it was likely, or a draw made twice, the frequencies would show it.
    """
    num_seeds, temperature, prompt = 1000, 1.3, [3, 1, 4]
    config = settings(num_speculative_tokens=3, max_num_seqs=64, max_num_batched_tokens=512, num_blocks=800)
    runner = make_runner(MODEL, config)
    other = Other()
    other.error = 0.6
    runner.speculate(draft_model(config, other))
    scheduler = Scheduler(config)
    asked = [request(f"s{i}", prompt, temperature=temperature, seed=i, max_tokens=4) for i in range(num_seeds)]
    served = serve(MODEL, config, asked, scheduler=scheduler, runner=runner)
    assert 0 < scheduler.stats.spec_accepted_tokens < 0.95 * scheduler.stats.spec_draft_tokens
    counts = Counter(tuple(ids[1:3]) for ids in served.ids.values())

    def following(tokens: list[int]) -> Tensor:
        hidden = MODEL.forward(torch.tensor(tokens), torch.arange(len(tokens)), DenseAttention(MODEL.states))
        return (MODEL.logits(hidden[-1:])[0].double() / temperature).softmax(-1)

    exact: Counter[tuple[int, int]] = Counter()
    for first, p_first in enumerate(following(prompt).tolist()):
        if p_first < 1e-3:
            continue
        for second, p_second in enumerate(following([*prompt, first]).tolist()):
            if p_first * p_second < 5e-4:
                continue
            for third, p_third in enumerate(following([*prompt, first, second]).tolist()):
                exact[second, third] += p_first * p_second * p_third
    likely = {pair: p for pair, p in exact.items() if p * num_seeds >= 8}
    rest = 1 - sum(likely.values())
    assert len(likely) > 8
    assert rest < 0.5, rest
    cells = [(counts[pair], p) for pair, p in likely.items()]
    cells.append((num_seeds - sum(count for count, _ in cells), rest))
    statistic = sum((count - num_seeds * p) ** 2 / (num_seeds * p) for count, p in cells)
    degrees = len(cells) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "one time in ten thousand, were the seeds not fixed"


# -- the default model -------------------------------------------------------------------------------------------------


def test_the_default_model_says_the_same_to_the_last_bit() -> None:
    """bfloat16 on the native kernels, whose results do not depend on the batch: log probabilities are equal, not close."""
    library = native()
    if library is None:
        pytest.skip("no native library and no C compiler")
    path = find_model(None).path
    model = load_model(EngineConfig(model=path, dtype="bfloat16"), CPU, torch.bfloat16, lambda progress: None)
    tokenizer = load_tokenizer(path)
    texts = ("1, 2, 3, 4, 5, 6, 7, 8, 9,", "The capital of France is")
    asked = [
        request(f"{i}", tokenizer.encode(text, add_special_tokens=False), max_tokens=20, logprobs=2, seed=i, **sampling)
        for i, (text, sampling) in enumerate(product(texts, ({}, {"temperature": 0.9, "top_p": 0.95})))
    ]
    sizes = {"max_num_batched_tokens": 48, "block_size": 16}
    plain = serve(model, settings(**sizes), asked)
    config = settings(**sizes, num_speculative_tokens=4)
    for drafter in (TextDrafter(1, 4), draft_model(config, model)):
        runner, scheduler = make_runner(model, config), Scheduler(config)
        runner.speculate(drafter)
        served = serve(model, config, asked, runner=runner, scheduler=scheduler)
        assert served.ids == plain.ids
        for key, events in served.events.items():
            scores = [entry for event in events for entry in event.logprobs or ()]
            assert scores == [entry for event in plain.events[key] for entry in event.logprobs or ()]
        stats = scheduler.stats
        assert stats.spec_accepted_tokens > 10
        if isinstance(drafter, DraftModel):
            assert stats.spec_accepted_tokens == stats.spec_draft_tokens
