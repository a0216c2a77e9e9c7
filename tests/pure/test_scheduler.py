"""The scheduler, scenario by scenario. Each stream is compared with what the request would have said alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.types import AbortCause, FinishReason, PlainTokens, Request, StepEvents, TokenEvent
from tests.integrity import check_scheduler
from tests.pure.driver import FAILS, Driver, config, request, solo


def long_prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 50 for i in range(length))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_mixed_batch_equals_solo_runs(depth: int) -> None:
    driver = Driver(config(), depth)
    for i in range(8):
        driver.add(request(str(i), long_prompt(3 + 4 * i, i), max_tokens=4 + i, seed=i, arrival_s=0.1 * i))
    driver.drain()
    driver.check_streams()


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    driver = Driver(config(max_num_batched_tokens=6))
    driver.add(request("talks", max_tokens=30, eos_token_ids=frozenset()))
    driver.step()
    driver.add(request("long", long_prompt(20), max_tokens=2))
    widths = []
    while ("long", 0) not in driver.ends:
        before = len(driver.streams["talks", 0])
        driver.step()
        assert len(driver.streams["talks", 0]) == before + 1, "a prompt never holds up a running stream"
        widths.append(driver.scheduler.stats.step_tokens.sum)
    assert len(widths) >= 4
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_changes_nothing_but_time(depth: int) -> None:
    driver = Driver(config(num_blocks=9, enable_prefix_caching=False), depth)
    for i in range(4):
        driver.add(request(str(i), long_prompt(7, i), max_tokens=20, seed=i, eos_token_ids=frozenset(), arrival_s=i))
    driver.drain()
    assert driver.scheduler.stats.preemptions > 0
    assert driver.ends["0", 0].timings.num_preemptions == 0, "the first in the queue is never the victim"  # type: ignore[union-attr]
    driver.check_streams()


def test_a_prefix_hit_skips_work_and_changes_nothing() -> None:
    driver = Driver(config())
    driver.add(request("a", long_prompt(17)))
    driver.drain()
    computed = driver.scheduler.stats.step_tokens.sum
    driver.add(request("b", long_prompt(17), seed=3))
    driver.drain()
    assert driver.scheduler.stats.step_tokens.sum - computed == len(driver.streams["b", 0]) - 1 + 1
    assert driver.scheduler.stats.prefix_hit_tokens == 16
    assert driver.scheduler.stats.prefix_queried_tokens == 34
    driver.check_streams()


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    driver = Driver(config())
    for name in ("a", "b"):
        driver.add(request(name, long_prompt(16)))
        driver.drain()
    assert driver.scheduler.stats.prefix_hit_tokens == 12
    driver.check_streams()


def test_salts_keep_prefixes_apart() -> None:
    driver = Driver(config())
    for salt in ("alice", "bob"):
        driver.add(request(salt, long_prompt(17), cache_salt=salt))
        driver.drain()
    assert driver.scheduler.stats.prefix_hit_tokens == 0


def test_n_choices_share_the_prompt_and_copy_on_write() -> None:
    driver = Driver(config())
    driver.add(request("n", long_prompt(10), n=4, max_tokens=6, eos_token_ids=frozenset()))
    driver.step()
    assert driver.scheduler.stats.blocks_held == 3, "four choices, one prompt of two and a half blocks"
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    assert len(plan.copies) == 3, "the last writer needs no copy"
    driver.take(driver.scheduler.commit(plan, driver.runner.run(plan).wait(), driver.now))
    assert driver.scheduler.stats.blocks_held == 2 + 4
    driver.drain()
    driver.check_streams()
    assert len({tuple(stream) for stream in driver.streams.values()}) == 4, "choices draw from different seeds"


def test_choice_0_of_n_says_what_n_1_says() -> None:
    assert solo(request(seed=5, n=3), 0) == solo(request(seed=5), 0)


@pytest.mark.parametrize("depth", [0, 1])
def test_n_choices_survive_a_tiny_pool(depth: int) -> None:
    driver = Driver(config(num_blocks=5), depth)
    driver.add(request("n", long_prompt(6), n=4, max_tokens=12, eos_token_ids=frozenset()))
    driver.drain()
    assert driver.scheduler.stats.preemptions > 0
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("steps", range(8))
def test_abort_at_any_step_frees_everything(depth: int, steps: int) -> None:
    driver = Driver(config(num_blocks=9), depth)
    for i in range(3):
        driver.add(request(str(i), long_prompt(9, i), n=1 + i % 2, max_tokens=9, eos_token_ids=frozenset()))
    for _ in range(steps):
        driver.step()
    for i in range(3):
        driver.take(driver.scheduler.abort(str(i), AbortCause.DISCONNECT, driver.now))
    assert {event.finish_reason for event in driver.ends.values()} == {FinishReason.ABORT}
    assert len(driver.ends) == 4
    driver.drain()
    driver.check_streams(aborted={"0", "1", "2"})


def test_a_block_whose_tokens_nobody_knows_is_not_cached() -> None:
    """Aborted with two steps in flight: the second has computed a position whose token is thrown away."""
    driver = Driver(config(), depth=1)
    driver.add(request(prompt=(1, 2, 3), max_tokens=20))
    assert driver.launch()
    assert driver.launch()
    driver.take(driver.scheduler.abort("r", AbortCause.DISCONNECT, driver.now))
    driver.drain()
    assert driver.scheduler.stats.blocks_cached == 0
    check_scheduler(driver.scheduler)


def test_an_abort_counts_every_choice_it_ends() -> None:
    driver = Driver(config())
    driver.add(request(n=3))
    driver.take(driver.scheduler.abort("r", AbortCause.DISCONNECT, driver.now))
    stats = driver.scheduler.stats
    assert stats.finished[FinishReason.ABORT] == stats.aborted[AbortCause.DISCONNECT] == len(driver.ends) == 3


def test_a_stop_string_ends_one_choice_as_stop() -> None:
    driver = Driver(config())
    driver.add(request("n", n=2, max_tokens=20, eos_token_ids=frozenset()))
    for _ in range(3):
        driver.step()
    driver.take(driver.scheduler.abort("n", AbortCause.STOP_STRING, driver.now, choice=1))
    assert driver.ends["n", 1].finish_reason is FinishReason.STOP
    assert ("n", 0) not in driver.ends
    driver.drain()
    assert driver.streams["n", 0] == solo(driver.requests["n"], 0)[0]


def test_stop_tokens_end_with_their_id_and_eos_without() -> None:
    driver = Driver(config())
    expected, _ = solo(request(max_tokens=10, eos_token_ids=frozenset()), 0)
    driver.add(request("stop", max_tokens=10, eos_token_ids=frozenset(), stop_token_ids=frozenset([expected[4]])))
    driver.add(request("eos", max_tokens=10, eos_token_ids=frozenset([expected[4]])))
    driver.drain()
    assert driver.ends["stop", 0].stop_reason == expected[4]
    assert driver.ends["eos", 0].stop_reason is None
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failing_request_ends_alone(depth: int) -> None:
    driver = Driver(config(), depth)
    for i in range(4):
        driver.add(
            request(str(i), max_tokens=8, n=1 + i // 2, seed=i, top_k=FAILS if i % 2 else 0, eos_token_ids=frozenset())
        )
    driver.drain()
    driver.check_streams()
    assert {key for key, event in driver.ends.items() if event.error} == {("1", 0), ("3", 0), ("3", 1)}


def test_scoring_computes_the_prompt_and_no_token() -> None:
    driver = Driver(config(max_num_batched_tokens=6))
    driver.add(request("score", long_prompt(15), max_tokens=0, prompt_logprobs=1))
    driver.drain()
    end = driver.ends["score", 0]
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.LENGTH)
    assert end.prompt is not None
    assert end.prompt.logprobs is not None
    assert [entry and entry.token_id for entry in end.prompt.logprobs] == [None, *long_prompt(15)[1:]]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_next_turn_finds_the_answer_that_was_told_just_now(depth: int, is_stopped: bool) -> None:
    driver = Driver(config(num_blocks=200, max_model_len=200, max_num_batched_tokens=64), depth)
    prompt = tuple(range(10, 20))
    seed = next(
        seed for seed in range(999) if 30 < len(solo(request("first", prompt, max_tokens=60, seed=seed), 0)[0]) < 60
    )
    driver.add(request("first", prompt, max_tokens=60, seed=seed))
    while ("first", 0) not in driver.ends:
        driver.step()
        if is_stopped and len(driver.streams.get(("first", 0), [])) == 25:
            driver.take(driver.scheduler.abort("first", AbortCause.STOP_STRING, driver.now))
    driver.add(request("next", (*prompt, *driver.streams["first", 0], 1, 2, 3, 4, 5), arrival_s=driver.now))
    driver.drain()
    num_known = len(prompt) + len(driver.streams["first", 0]) - 1
    assert driver.prompts["next", 0].num_cached_tokens == num_known // 4 * 4
    driver.check_streams({"first"} if is_stopped else set())


def test_prompt_logprobs_ignore_what_is_cached_and_come_once_a_choice() -> None:
    driver = Driver(config(max_num_batched_tokens=6))
    driver.add(request("warm", long_prompt(15)))
    driver.drain()
    driver.add(request("asks", long_prompt(15), max_tokens=4, prompt_logprobs=0, n=2))
    driver.drain()
    assert driver.scheduler.stats.prefix_hit_tokens == 0
    assert set(driver.prompts) == {("warm", 0), ("asks", 0), ("asks", 1)}
    for choice in range(2):
        logprobs = driver.prompts["asks", choice].logprobs
        assert logprobs is not None
        assert [entry and entry.token_id for entry in logprobs] == [None, *long_prompt(15)[1:]]


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_prompt_logprobs_are_whole_after_a_preemption_in_mid_prompt(num_host_blocks: int) -> None:
    driver = Driver(config(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=2, num_host_blocks=num_host_blocks))
    driver.add(request("grows", long_prompt(7, 5), max_tokens=25, eos_token_ids=frozenset()))
    for _ in range(8):
        driver.step()
    driver.add(request("asks", long_prompt(15), max_tokens=4, prompt_logprobs=0, arrival_s=1.0))
    driver.drain()
    assert driver.ends["asks", 0].timings.num_preemptions > 0  # type: ignore[union-attr]
    logprobs = driver.prompts["asks", 0].logprobs
    assert logprobs is not None
    assert [entry and entry.token_id for entry in logprobs] == [None, *long_prompt(15)[1:]]
    driver.check_streams()


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    driver = Driver(config(num_blocks=4))
    driver.add(request("runs", long_prompt(9), max_tokens=4, eos_token_ids=frozenset()))
    driver.step()
    driver.add(request("waits", max_tokens=2, arrival_s=1.0))
    driver.step()
    assert driver.scheduler.stats.num_waiting == 1, "one block is free, and the running sequence may need it"
    driver.drain()
    assert driver.scheduler.stats.preemptions == 0
    driver.check_streams()


def test_the_heads_of_finished_prompts_outlive_their_tails() -> None:
    driver = Driver(config(num_blocks=10))
    driver.add(request("old", long_prompt(17), max_tokens=1))
    driver.drain()
    driver.add(request("other", long_prompt(29, 30), max_tokens=1))
    driver.drain()
    driver.add(request("again", long_prompt(17), max_tokens=1))
    driver.drain()
    assert driver.scheduler.stats.prefix_hit_tokens == 8, "the other prompt took the free blocks and two tails"
    driver.check_streams()


def test_the_same_state_makes_the_same_plan() -> None:
    drivers = [Driver(config(num_blocks=12)) for _ in range(2)]
    for driver in drivers:
        for i in range(5):
            driver.add(request(str(i), long_prompt(5 + i, i), max_tokens=12, n=1 + i % 2))
    while drivers[0].scheduler.has_work:
        plans = [driver.scheduler.plan(driver.now) for driver in drivers]
        assert plans[0] == plans[1]
        for driver, plan in zip(drivers, plans, strict=True):
            assert plan is not None
            driver.take(driver.scheduler.commit(plan, driver.runner.run(plan).wait(), driver.now))


def test_the_books_of_a_small_history() -> None:
    """Two answers in step: planned at 10 ms, a token at 20, 40, 60 and 80 ms."""
    driver = Driver(config())
    for name in "ab":
        driver.add(request(name, max_tokens=4, eos_token_ids=frozenset()))
    driver.drain()
    stats = driver.scheduler.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (6, 8, 4)
    assert stats.finished[FinishReason.LENGTH] == 2
    assert (stats.step_tokens.sum, stats.step_sequences.sum) == (6 + 6, 8)
    assert (stats.request_prompt_tokens.sum, stats.request_generation_tokens.sum) == (6, 8)
    means = {"queue_s": 0.01, "prefill_s": 0.01, "ttft_s": 0.02, "decode_s": 0.06, "e2e_s": 0.08, "tpot_s": 0.02}
    for name, mean in means.items():
        histogram = getattr(stats, name)
        assert (histogram.count, histogram.sum) == (2, pytest.approx(2 * mean)), name
    assert (stats.itl_s.count, stats.itl_s.sum) == (6, pytest.approx(6 * 0.02))
    for name in "ab":
        *times, preempted_s = driver.ends[name, 0].timings
        assert times == pytest.approx([0.01, 0.01, 0.06, 0, 0, 0])
        assert preempted_s == ()


def test_what_a_step_tells_keeps_its_order() -> None:
    first = TokenEvent("a", 0, (1,), finish_reason=FinishReason.STOP)
    told = StepEvents([first])
    told.entries += [PlainTokens([("z", 0), ("b", 1)], [5, 7], range(1, 2)), TokenEvent("c", 0, (2, 3))]
    assert list(told) == [first, TokenEvent("b", 1, (7,)), TokenEvent("c", 0, (2, 3))]
    assert told
    assert not StepEvents()


# -- prompts that arrive together and begin alike -----------------------------------------------------------------------


def _alike(driver: Driver, num: int, common: int = 40, own: int = 4, **changes: object) -> list[Request]:
    """Requests whose prompts share their first `common` ids."""
    asked = [request(f"{i}", (*range(10, 10 + common), *[i] * own), max_tokens=3, **changes) for i in range(num)]
    for each in asked:
        driver.add(each)
    return asked


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", [{}, {"windows": (8,)}, {"state_blocks": 2}, {"state_blocks": 1, "windows": (8,)}])
def test_what_prompts_share_is_computed_once(depth: int, groups: dict[str, Any]) -> None:
    driver = Driver(config(num_blocks=400, **groups), depth)
    asked = _alike(driver, 5)
    driver.drain()
    driver.check_streams()
    assert sum(driver.prompts[each.request_id, 0].num_cached_tokens for each in asked) == 4 * 40


@pytest.mark.parametrize(("changes", "groups"), [({"cache_owner": "b"}, {}), ({}, {"state_blocks": 2})])
def test_what_another_owner_or_no_state_will_have_is_not_waited_for(changes: Any, groups: Any) -> None:
    """The first prompt passes in its first step where the second one leaves it."""
    driver = Driver(config(num_blocks=400, max_num_batched_tokens=100, **groups))
    _alike(driver, 1)
    driver.add(request("other", (*range(10, 50), 7), **changes))
    plan = driver.scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.chunks) == 2


def test_a_short_prompt_waits_for_no_long_one() -> None:
    driver = Driver(config(num_blocks=400))
    _alike(driver, 1)  # 44 ids, where a step holds 12
    driver.step()
    driver.add(request("short", (*range(10, 20), 7)))
    driver.step()
    assert not driver.scheduler.has_parked


@pytest.mark.parametrize("how", ["abort", "roll back"])
def test_who_waits_goes_on_when_the_other_does_not(how: str) -> None:
    driver = Driver(config(num_blocks=400), depth=1)
    asked = _alike(driver, 3)
    driver.step()
    assert driver.scheduler.has_parked
    if how == "abort":
        driver.take(driver.scheduler.abort("0", AbortCause.DISCONNECT, driver.now))
    else:
        assert driver.run_out_of_memory("too much") == {"0"}
    driver.drain()
    assert all(driver.streams[each.request_id, 0] == solo(each, 0)[0] for each in asked[1:])


def test_who_waits_may_leave() -> None:
    driver = Driver(config(num_blocks=400))
    _alike(driver, 3)
    driver.step()
    driver.take(driver.scheduler.abort_all(AbortCause.DISCONNECT, driver.now))
    driver.drain()
    assert not driver.scheduler.has_parked
    assert not driver.scheduler.has_work


def test_who_waits_keeps_its_place() -> None:
    """There are two rows. The third request, which shares nothing, does not take the second one's."""
    driver = Driver(config(num_blocks=400, max_num_seqs=2))
    _alike(driver, 2)
    driver.add(request("late", (1, 2, 3), max_tokens=30, eos_token_ids=frozenset(), arrival_s=1.0))
    while ("1", 0) not in driver.streams:
        assert ("late", 0) not in driver.streams
        driver.step()
    driver.drain()
    driver.check_streams()


def test_who_is_called_back_by_a_transfer_follows_no_longer() -> None:
    driver = Driver(config(num_blocks=400))
    _alike(driver, 2)
    driver.step()
    queue = driver.scheduler._queue
    [follower] = queue.followers
    queue.unpark([follower])
    assert not queue.followers
    driver.drain()
    driver.check_streams()
