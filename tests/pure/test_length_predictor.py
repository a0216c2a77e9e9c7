"""Predicted lengths: what is learned, from whom, and what sjf gains by it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.core.queues.shortest import NUM_PLACES, PREFIX_TOKENS, WINDOW, LengthPredictor
from tests.pure.driver import EOS, Driver, config, request

SYSTEM = tuple(range(PREFIX_TOKENS))


def told(*answers: int, **changes: object) -> LengthPredictor:
    predictor = LengthPredictor()
    for length in answers:
        predictor.learn(request(max_tokens=1000, **changes), length, is_cut=False)  # type: ignore[arg-type]
    return predictor


def test_before_anything_was_seen_it_is_max_tokens() -> None:
    assert LengthPredictor().predict(request(max_tokens=123)) == 123


def test_the_finer_level_wins_once_it_has_seen_enough() -> None:
    """One tenant, two templates; another tenant with the first of them."""
    predictor = LengthPredictor()
    for _ in range(WINDOW):
        for tenant, prompt, length in (("a", SYSTEM, 10), ("a", SYSTEM[::-1], 500), ("b", SYSTEM, 100)):
            predictor.learn(request(prompt=prompt, max_tokens=1000, tenant=tenant), length, is_cut=False)
    for tenant, prompt, length in (("a", SYSTEM, 10), ("a", SYSTEM[::-1], 500), ("b", SYSTEM, 100)):
        asked = request(prompt=(*prompt, 7, 7), max_tokens=1000, tenant=tenant)
        assert abs(predictor.predict(asked) - length) < 0.1 * length + 10
    new = predictor.predict(request(prompt=(9,) * 40, max_tokens=1000, tenant="a"))
    assert 150 < new < 350, "a new prompt of a known tenant is as that tenant's are"
    stranger = predictor.predict(request(prompt=(9,) * 40, max_tokens=1000, tenant="c"))
    assert 100 < stranger < 300, "and of an unknown one as everybody's"


def test_what_a_client_allows_tells_what_it_expects() -> None:
    """One tenant, prompts that share nothing: answers take about half of what each may."""
    predictor, chance = LengthPredictor(), random.Random(2)
    for i in range(600):
        max_tokens = chance.choice((16, 64, 256, 1024))
        asked = request(prompt=(i, 1), max_tokens=max_tokens)
        predictor.learn(asked, max_tokens // 2, is_cut=False)
    for max_tokens in (16, 64, 256, 1024):
        expected = predictor.predict(request(prompt=(9, 9), max_tokens=max_tokens))
        assert abs(expected - max_tokens / 2) < 0.1 * max_tokens / 2 + 10


def test_a_change_is_followed() -> None:
    predictor = told(*[500] * 200, *[20] * (4 * WINDOW))
    assert predictor.predict(request(max_tokens=1000)) < 60


def test_an_answer_that_was_cut_tells_only_that_it_was_no_shorter() -> None:
    predictor = told(*[200] * 20)
    before = predictor.predict(request(max_tokens=1000))
    predictor.learn(request(max_tokens=1), 1, is_cut=True)
    assert predictor.predict(request(max_tokens=1000)) == before
    predictor.learn(request(max_tokens=900), 900, is_cut=True)
    assert predictor.predict(request(max_tokens=1000)) > before


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40), st.integers(1, 3000))
def test_it_is_never_more_than_max_tokens_nor_out_of_what_was_seen(
    answers: list[tuple[int, bool]], max_tokens: int
) -> None:
    predictor = LengthPredictor()
    for length, is_cut in answers:
        predictor.learn(request(), length, is_cut=is_cut)
    seen = [max_tokens, *(length for length, _ in answers)]
    assert min(seen) - 1e-6 <= predictor.predict(request(max_tokens=max_tokens)) <= max_tokens


def test_it_stays_as_large_as_it_is() -> None:
    predictor = LengthPredictor()
    for i in range(3 * NUM_PLACES):
        predictor.learn(request(prompt=(i, i), tenant=f"t{i}"), 10, is_cut=False)
    assert sum(len(level._means) for level in predictor._levels) == 4 * NUM_PLACES


def mean_latency(policy: str) -> float:
    """Steps until the end, in the mean: two templates whose answers differ, with the same max_tokens, one slot."""
    chance = random.Random(3)
    driver = Driver(config(policy=policy, max_num_seqs=1, num_blocks=40, max_num_batched_tokens=40, max_model_len=120))
    kinds = {"short": SYSTEM, "long": SYSTEM[::-1]}
    came: dict[str, int] = {}
    ended: dict[str, int] = {}

    def send(kind: str, i: int) -> None:
        name = f"{kind}{i}"
        ending = frozenset({EOS}) if kind == "long" else frozenset(range(0, 50, 2))  # short ones soon find an end
        asked = request(name, (*kinds[kind], i), max_tokens=60, eos_token_ids=ending, arrival_s=driver.now, seed=i)
        driver.add(asked)
        came[name] = driver.scheduler.stats.steps

    for i in range(8):
        send(chance.choice(["short", "long"]), i)
        driver.drain()
    for i in range(8, 48):
        send(chance.choice(["short", "long"]), i)
    while driver.scheduler.has_work:
        driver.step()
        for name, _ in driver.ends:
            ended.setdefault(name, driver.scheduler.stats.steps)
    driver.check_streams()
    return sum(ended[name] - came[name] for name in came) / len(came)


def test_sjf_learns_who_is_short_and_the_mean_wait_shrinks() -> None:
    assert mean_latency("sjf") < 0.75 * mean_latency("fcfs")


def test_the_error_is_counted_under_sjf_alone() -> None:
    for policy, count in (("sjf", 4), ("fcfs", 0)):
        driver = Driver(config(policy=policy))
        for i in range(2):
            driver.add(request(f"r{i}", n=2, max_tokens=5))
        driver.drain()
        assert driver.scheduler.stats.length_error_tokens.count == count
