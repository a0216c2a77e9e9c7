"""Beam search without a model: the arithmetic against exhaustive search, and the beams of it in the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import InvalidRequestError, NeverFitsError
from engine.core.scheduling.beams import BeamSearch, row_params
from engine.core.types import AbortCause, BeamParams, EarlyStopping, FinishReason, Request, SamplingParams
from loadtest.fake_runner import mix
from tests.pure.driver import FAILS, Driver, config, request, solo

NUM_TOKENS = 4  # of the tables' vocabulary; 0 ends an answer


def table(seed: int, history: tuple[int, ...]) -> dict[int, float]:
    """A distribution over the next token, in logarithms."""
    weights = [1 + mix(seed, token, len(history), *history) % 97 for token in range(NUM_TOKENS)]
    return {token: math.log(weight / sum(weights)) for token, weight in enumerate(weights)}


def search_table(seed: int, params: SamplingParams) -> list[tuple[list[int], float]]:
    search, most = BeamSearch(params), row_params(params).logprobs
    beams: list[tuple[int, ...]] = [()]
    while True:
        for place, history in enumerate(beams):
            ranked = sorted(table(seed, history).items(), key=lambda pair: -pair[1])
            is_complete = search.put(place, tuple(ranked[:most]))
        assert is_complete
        if not (continuations := search.advance()):
            return [([entry.token_id for entry in answer.logprobs], answer.score) for answer in search.finished]
        for place, (parent, _) in enumerate(continuations):
            assert any(c.parent == parent and at == parent for at, c in enumerate(continuations)), (
                f"whoever {place} follows stays in its place"
            )
        beams = [(*beams[parent], token) for parent, token in continuations]


def searching(width: int, max_tokens: int, min_tokens: int = 0, **beam: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=width,
        eos_token_ids=frozenset([0]),
        beam=BeamParams(width=width, **beam),
    )


def total(seed: int, tokens: Sequence[int]) -> float:
    return sum(table(seed, tuple(tokens[:at]))[token] for at, token in enumerate(tokens))


@given(seed=st.integers(0, 10_000))
def test_a_search_as_wide_as_its_first_step_is_exhaustive(seed: int) -> None:
    every = [list(tokens) for tokens in product(range(1, NUM_TOKENS), range(NUM_TOKENS))]
    best = sorted(every, key=lambda tokens: total(seed, tokens), reverse=True)[:3]
    found = search_table(seed, searching(3, 2, min_tokens=1, length_penalty=0.0))
    assert found == [(tokens, pytest.approx(total(seed, tokens))) for tokens in best]


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 3),
    penalty=st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]),
    stopping=st.sampled_from(EarlyStopping),
    max_tokens=st.integers(1, 6),
)
def test_answers_are_distinct_ranked_and_scored_by_their_length(
    seed: int, width: int, penalty: float, stopping: EarlyStopping, max_tokens: int
) -> None:
    found = search_table(seed, searching(width, max_tokens, length_penalty=penalty, early_stopping=stopping))
    assert len(found) == width == len({tuple(tokens) for tokens, _ in found})
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for tokens, score in found:
        assert score == pytest.approx(total(seed, tokens) / len(tokens) ** penalty)
        assert tokens[-1] == 0 or len(tokens) == max_tokens
        assert 0 not in tokens[:-1]


@pytest.mark.parametrize("seed", range(40))
def test_stopping_later_never_finds_worse(seed: int) -> None:
    best = {
        stopping: search_table(seed, searching(2, 8, length_penalty=1.0, early_stopping=stopping))[0][1]
        for stopping in EarlyStopping
    }
    assert best[EarlyStopping.YES] <= best[EarlyStopping.NO] <= best[EarlyStopping.NEVER]


def test_a_penalty_that_length_earns_nothing_by_ends_no_search_early() -> None:
    """With a penalty below zero a longer answer is worse, so a beam is judged by its length so far."""
    search = BeamSearch(searching(2, 100, length_penalty=-1.0, early_stopping=EarlyStopping.NEVER))
    assert search.put(0, ((1, -0.1), (0, -3.0), (2, -3.5)))
    assert len(search.advance()) == 2
    search.put(0, ((1, -0.1), (0, -3.0), (2, -4.0)))
    search.put(1, ((1, -5.0), (2, -6.0), (0, -7.0)))
    assert search.advance(), "the beam scores -0.4, and the worst of two answers -6.2"


def beams(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), width: int = 3, **changes: Any) -> Request:
    stopping = changes.pop("early_stopping", EarlyStopping.NO)
    beam = BeamParams(width=width, early_stopping=stopping)
    return request(request_id, prompt, **({"beam": beam, "n": width, "eos_token_ids": frozenset()} | changes))


LONG = tuple(range(10))  # two blocks and a half


def test_beams_share_their_prompt_and_copy_what_they_write() -> None:
    driver = Driver(config())
    driver.add(beams(prompt=LONG, width=4, max_tokens=6))
    driver.step()
    assert driver.scheduler.stats.blocks_held == 3, "four beams, one prompt of two and a half blocks"
    driver.step()
    assert driver.scheduler.stats.blocks_held <= 2 + 4, "its full blocks have four holders"
    assert driver.streams == {("r", 0): []}, "nothing is told of beams that may not last, but that they go on"
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_search_that_gives_way_starts_anew_and_finds_the_same(depth: int) -> None:
    driver = Driver(config(num_blocks=12, enable_prefix_caching=False), depth)
    driver.add(request("first", LONG, max_tokens=30, eos_token_ids=frozenset()))
    driver.add(beams("second", LONG, width=3, max_tokens=9, arrival_s=1.0))
    driver.drain()
    assert driver.ends["second", 0].timings.num_preemptions == 1, "it comes back when there is room"  # type: ignore[union-attr]
    assert driver.ends["first", 0].timings.num_preemptions == 0  # type: ignore[union-attr]
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", range(9))
def test_abort_at_any_step_frees_everything(depth: int, steps: int) -> None:
    driver = Driver(config(num_blocks=16), depth)
    for i in range(2):
        driver.add(beams(str(i), LONG, width=3, n=2, max_tokens=9))
    for _ in range(steps):
        driver.step()
    for i in range(2):
        driver.take(driver.scheduler.abort(str(i), AbortCause.STOP_STRING, driver.now, choice=1))
        driver.take(driver.scheduler.abort(str(i), AbortCause.DISCONNECT, driver.now))
    assert len(driver.ends) == 4, "one choice alone is not ended: it is not known before the end which beams it is"
    assert {event.finish_reason for event in driver.ends.values()} == {FinishReason.ABORT}
    driver.drain()
    driver.check_streams(aborted={"0", "1"})


def test_a_beam_that_fails_ends_its_search_alone() -> None:
    driver = Driver(config())
    driver.add(beams("fails", LONG, width=3, n=2, max_tokens=9, top_k=FAILS))
    driver.add(request("goes on", LONG, max_tokens=9))
    driver.drain()
    driver.check_streams()
    assert driver.ends["fails", 1].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_step_taken_back_changes_nothing(stop: int) -> None:
    driver = Driver(config())
    driver.add(beams(prompt=LONG, width=4, max_tokens=7))
    driver.add(request("beside", LONG, max_tokens=9))
    for _ in range(stop):
        driver.step()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("is_background", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
@pytest.mark.parametrize("num_blocks", [14, 15])
def test_whatever_is_taken_back_in_a_tight_pool_comes_to_its_end(
    num_blocks: int, policy: str, is_background: bool
) -> None:
    for stop in range(1, 16):
        driver = Driver(config(num_blocks=num_blocks, policy=policy), depth=(stop + num_blocks) % 2)
        kind = {"is_background": is_background, "eos_token_ids": frozenset()}
        driver.add(request("other", LONG[: 5 + stop % 4], max_tokens=24, tenant="a", **kind))
        driver.add(beams("search", LONG, width=4, n=2, max_tokens=8, tenant="b", arrival_s=1.0, **kind))
        driver.add(request("late", LONG[:stop], n=3, max_tokens=9, tenant="c", arrival_s=2.0, **kind))
        for _ in range(stop):
            driver.step()
        driver.run_out_of_memory()
        driver.drain()
        driver.check_streams()


def test_a_search_yields_as_a_whole_to_a_tenant_that_has_nothing() -> None:
    driver = Driver(config(policy="fair"))
    driver.add(beams("search", LONG, width=6, n=1, max_tokens=9, tenant="a"))
    for _ in range(3):
        driver.step()
    driver.add(request("two slots", LONG, n=2, max_tokens=3, tenant="b", arrival_s=1.0))
    driver.drain()
    assert driver.ends["search", 0].timings.num_preemptions == 1  # type: ignore[union-attr]
    driver.check_streams()


@pytest.mark.parametrize(("state_blocks", "num_blocks"), [(1, 19), (2, 27)])
def test_searches_of_two_tenants_do_not_give_way_to_each_other_without_end(state_blocks: int, num_blocks: int) -> None:
    """Whichever came first keeps its beams, though the other's first one ranks before them."""
    driver = Driver(config(policy="fair", num_blocks=num_blocks, state_blocks=state_blocks), depth=1)
    for arrival, tenant in enumerate("ab"):
        prompt = tuple(range(arrival + 1, arrival + 21))
        kind = {"tenant": tenant, "arrival_s": float(arrival), "eos_token_ids": frozenset()}
        driver.add(beams(tenant, prompt, width=3, max_tokens=4, **kind))
    driver.drain()
    assert driver.ends["a", 0].timings.num_preemptions == 0  # type: ignore[union-attr]
    driver.check_streams()


def test_beams_beyond_a_step_s_budget_wait_for_the_next() -> None:
    driver = Driver(config())
    driver.add(
        beams(prompt=LONG, width=6, is_background=True, max_tokens=7)
    )  # three tokens a step are the background's
    driver.drain()
    driver.check_streams()


def test_what_is_told_of_an_answer_is_told_once_and_counted() -> None:
    driver = Driver(config())
    asked = beams(prompt=LONG, width=4, n=2, max_tokens=6, logprobs=1)
    driver.add(asked)
    driver.drain()
    driver.check_streams()
    stats = driver.scheduler.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished[FinishReason.LENGTH]) == (10, 12, 2)
    assert (stats.ttft_s.count, stats.itl_s.count, stats.prefill_s.count) == (2, 0, 1)
    event = driver.ends["r", 1]
    assert event.logprobs is not None
    assert [entry.token_id for entry in event.logprobs] == solo(asked, 1)[0]
    assert all(len(entry.top) == 1 and entry.rank >= 1 for entry in event.logprobs)
    assert any(entry.rank > 1 for entry in event.logprobs), "the second best is not all of likeliest tokens"


def test_the_door_knows_what_a_search_takes() -> None:
    driver = Driver(config(num_blocks=11))
    with pytest.raises(NeverFitsError, match=r"12 KV blocks.*pool has 11"):
        driver.add(beams(prompt=LONG, width=5, max_tokens=7))
    with pytest.raises(NeverFitsError, match="n is 7"):
        driver.add(beams(width=7))
    with pytest.raises(NeverFitsError, match="best_of is 7"):
        driver.add(beams(width=7, n=2))
    with pytest.raises(InvalidRequestError, match="grammar"):
        driver.add(beams(grammar=object()))
    driver.add(beams(prompt=LONG, width=5, max_tokens=3))
    driver.add(beams("scored", prompt=LONG, width=2, max_tokens=0))
    driver.drain()
    driver.check_streams()
