"""Prompts that become vectors: the same whatever chunks, cached blocks, preemptions and failed steps lie behind them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core.stats import PreemptionKind
from engine.core.step import POOLED_UNIT
from engine.core.types import AbortCause, FinishReason, Pooling, PoolingParams, Request
from loadtest.fake_runner import hidden_state
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request

KINDS = (Pooling.LAST, Pooling.MEAN)


def embedding(name: str, prompt: tuple[int, ...], pooling: Pooling, **changes: object) -> Request:
    return replace(request(name, prompt, **changes), params=PoolingParams(pooling=pooling))


def expected(asked: Request) -> list[float]:
    """The vector, from the states themselves."""
    states = [hidden_state(asked.prompt[: end + 1]) for end in range(len(asked.prompt))]
    assert isinstance(asked.params, PoolingParams)
    if asked.params.pooling is Pooling.LAST:
        return [value * POOLED_UNIT for value in states[-1]]
    return [sum(column) * POOLED_UNIT / len(states) for column in zip(*states, strict=True)]


def check(driver: Driver, names: set[str]) -> None:
    for name in names:
        end, asked = driver.ends[name, 0], driver.requests[name]
        assert end.finish_reason is FinishReason.LENGTH
        assert not end.token_ids
        assert end.prompt is not None
        assert end.prompt.pooled == pytest.approx(expected(asked), rel=1e-12), name
    check_scheduler(driver.scheduler)
    assert driver.scheduler.stats.blocks_held == driver.scheduler.stats.host_blocks_held == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pooling", KINDS)
def test_a_prompt_of_many_chunks(pooling: Pooling, depth: int) -> None:
    driver = Driver(config(max_num_batched_tokens=7), depth)
    driver.add(embedding("r", tuple(range(40)), pooling))
    driver.drain()
    check(driver, {"r"})


def test_only_the_last_state_can_come_after_cached_blocks() -> None:
    """And what a mean has computed is there for others to hit."""
    driver, prompt, hits = Driver(config(max_num_batched_tokens=64)), tuple(range(21)), []
    for name, pooling in (("a", Pooling.MEAN), ("b", Pooling.MEAN), ("c", Pooling.LAST)):
        driver.add(embedding(name, prompt, pooling))
        driver.drain()
        hits.append(driver.prompts[name, 0].num_cached_tokens)
    assert hits == [0, 0, 20]
    check(driver, {"a", "b", "c"})


@pytest.mark.parametrize("depth", [0, 1])
def test_half_a_mean_is_not_swapped(depth: int) -> None:
    """Its sum so far is of this one pass; what comes before the last state may be copied out and back."""
    for pooling, kind in ((Pooling.MEAN, PreemptionKind.RECOMPUTE), (Pooling.LAST, PreemptionKind.SWAP)):
        tight = {"num_blocks": 9, "max_num_batched_tokens": 4, "max_num_seqs": 4, "enable_prefix_caching": False}
        driver = Driver(config(num_host_blocks=40, **tight), depth)
        driver.add(request("r", tuple(range(7)), max_tokens=12, eos_token_ids=frozenset()))
        driver.add(embedding("e", tuple(range(24)), pooling))
        driver.drain()
        assert [other for other, times in driver.scheduler.stats.preempted.items() if times] == [kind]
        check(driver, {"e"})


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_a_crowd_with_too_little_memory(seed: int, depth: int) -> None:
    """Beside answers, in a pool that preempts, to the host and not, with steps that fail and clients that leave."""
    rng = random.Random(seed)
    settings = config(num_blocks=14, num_host_blocks=rng.choice([0, 30]), max_num_batched_tokens=9)
    driver, names, gone = Driver(settings, depth), set(), set()
    for i in range(24):
        prompt = tuple(range(rng.choice([0, 3]), rng.randrange(4, 30)))
        if rng.random() < 0.6:
            driver.add(embedding(f"e{i}", prompt, rng.choice(KINDS), arrival_s=driver.now))
            names.add(f"e{i}")
        else:
            driver.add(request(f"r{i}", prompt, max_tokens=20, eos_token_ids=frozenset(), arrival_s=driver.now))
        for _ in range(rng.randrange(4)):
            driver.step()
        if rng.random() < 0.2:
            driver.run_out_of_memory()
        if rng.random() < 0.1 and f"e{i}" in names:
            gone.add(f"e{i}")
            driver.take(driver.scheduler.abort(f"e{i}", AbortCause.DISCONNECT, driver.now))
    driver.drain()
    check(driver, names - gone)
    assert {driver.ends[name, 0].finish_reason for name in gone} <= {FinishReason.ABORT, FinishReason.LENGTH}
    check(driver, {name for name in gone if driver.ends[name, 0].finish_reason is FinishReason.LENGTH})
