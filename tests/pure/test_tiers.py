"""Cached blocks in host memory and on a disk: what is found there, what is kept, and what nobody may ever read."""

from __future__ import annotations

import random

import pytest

from engine.core.budget import StepTime
from engine.core.kv import prefix_cache, tiers
from engine.core.stats import TransferKind
from engine.core.types import AbortCause, Request
from tests.integrity import check_scheduler
from tests.pure.driver import Driver, config, request


def prompt(first: int, length: int = 17) -> tuple[int, ...]:
    return tuple((first + i) % 50 for i in range(length))


def tiered(depth: int = 0, **changes: object) -> Driver:
    """A pool of 12 blocks of four tokens, with host blocks and a disk behind it, both larger."""
    sizes = {"num_blocks": 12, "num_host_blocks": 40, "host_caching": True, "num_disk_blocks": 60}
    return Driver(config(**(sizes | changes)), depth)  # type: ignore[arg-type]


def serve(driver: Driver, name: str, asked: tuple[int, ...], **params: object) -> tuple[int, int, int]:
    """One request to its end; how many tokens were found in the pool, in host memory and on the disk."""
    driver.add(request(name, asked, arrival_s=driver.now, **params))
    driver.drain()
    info = driver.prompts[name, 0]
    return (
        info.num_cached_tokens - info.num_host_tokens - info.num_disk_tokens,
        info.num_host_tokens,
        info.num_disk_tokens,
    )


def restarted(driver: Driver, **changes: object) -> Driver:
    """Another process that finds the same disk."""
    other = tiered(**changes)
    kept = driver.scheduler.tiers.stores["disk"]
    by_age = sorted((slot, digest) for digest, slot in kept._block_of.items())
    other.scheduler.tiers.restore("disk", [(digest, slot) for slot, digest in by_age])
    other.slots = dict(driver.slots)
    return other


def saved() -> Driver:
    """A driver whose disk has the four blocks of a prompt."""
    driver = tiered()
    serve(driver, "first", prompt(0))
    driver.spill()
    return driver


def spilled(depth: int = 0, **params: object) -> Driver:
    """A driver whose disk has the blocks of four prompts, more than the pool holds."""
    driver = tiered(depth)
    for index in range(4):
        serve(driver, f"first{index}", prompt(10 * index), **params)
    while driver.spill():
        pass
    return driver


@pytest.mark.parametrize("depth", [0, 1])
def test_what_the_pool_gave_up_comes_back_from_host_memory(depth: int) -> None:
    driver = tiered(depth, num_disk_blocks=0)
    for index in range(4):
        assert serve(driver, f"first{index}", prompt(10 * index)) == (0, 0, 0)
    pool, host, disk = serve(driver, "again", prompt(0))
    assert pool + host == 16
    assert host > 0 == disk
    assert driver.scheduler.stats.prefix_hits == {"pool": pool, "host": host, "disk": 0, "shared": 0}
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_restart_finds_on_the_disk_what_was_cached(depth: int) -> None:
    other = restarted(spilled(depth), depth=depth)
    for index in range(4):
        assert serve(other, f"again{index}", prompt(10 * index)) == (0, 0, 16)
    assert other.scheduler.stats.transferred[TransferKind.LOAD] == 16
    assert serve(other, "and again", prompt(30))[2] == 0
    other.check_streams()


def loading() -> Driver:
    """A driver whose request waits for the 16 tokens of its prompt, which only the disk has."""
    other = restarted(saved())
    other.add(request("again", prompt(0)))
    other.transfers += other.scheduler.tiers.start(other.now)
    return other


def num_looks(driver: Driver) -> int:
    """Return how often the request is looked at in vain, 10 ms each; then it is computed."""
    looks = 0
    while not driver.launch():
        looks += 1
    driver.drain()
    assert driver.prompts["again", 0].num_disk_tokens == 0
    return looks


def test_a_request_waits_for_the_disk_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_PARKED_S", 0.08)
    other = loading()
    assert num_looks(other) == 7
    assert serve(other, "later", prompt(0), seed=1)[2] == 0, "it was computed by now, and is in the pool"
    other.check_streams()


def test_a_request_waits_no_longer_than_computing_the_blocks_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTime, "is_known", True)
    monkeypatch.setattr(StepTime, "chunk_s", lambda _, start, count: 0.002 * (start + count))
    assert num_looks(loading()) == 3, "16 tokens: 0.032 s"


def test_a_step_that_holds_up_the_loads_is_not_counted_as_waiting_for_them() -> None:
    other = restarted(saved())
    other.cost = lambda _: 10.0
    other.add(request("before", prompt(30), arrival_s=other.now))
    assert other.launch()
    other.add(request("again", prompt(0), arrival_s=other.now))  # it was sent before this step ...
    other.commit()
    assert other.launch()
    other.commit()  # ... and its loads begin after this one
    other.transfer()
    other.drain()
    assert other.prompts["again", 0].num_disk_tokens == 16


def test_a_long_prompt_waits_longer_while_the_pace_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_PACE", 10)
    assert num_looks(loading()) == 159, "16 tokens: 1.6 s"


def test_what_a_prompt_finds_in_host_memory_stays_while_the_rest_is_loaded() -> None:
    other = restarted(spilled(), num_host_blocks=8)
    for index in (1, 2, 3, 0):
        serve(other, f"again{index}", prompt(10 * index, 17 if index else 9))
    serve(other, "crowd", tuple(range(100, 141)))
    names = other.scheduler.kv.first_names(request("names", prompt(0)))
    for index in range(2):  # what the prompt finds is the first to be evicted
        other.scheduler.tiers.host.pass_by(prefix_cache.name_block(names, prompt(0), index, 4))
    loaded = other.scheduler.stats.transferred[TransferKind.LOAD]
    assert serve(other, "whole", prompt(0)) == (0, 8, 8)
    assert other.scheduler.stats.transferred[TransferKind.LOAD] == loaded + 2
    other.check_streams()


def test_one_prompt_loads_half_of_host_memory_at_most() -> None:
    """Else the blocks it waits for could push each other out, and a second prompt would find no room."""
    driver = tiered()
    serve(driver, "first", prompt(0, 37))
    while driver.spill():
        pass
    for num_host, expected in ((40, 36), (8, 16)):
        other = restarted(driver, num_host_blocks=num_host)
        other.add(request("again", prompt(0, 37)))
        assert other.scheduler.tiers.host.pool.num_held * 4 == expected
        other.drain()
        assert other.prompts["again", 0].num_disk_tokens == expected
        other.check_streams()


def test_no_save_begins_while_as_many_transfers_are_under_way_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_TRANSFERS", 3)
    driver = tiered()
    serve(driver, "first", prompt(0, 37))
    assert len(driver.scheduler.tiers.spill()) == 3
    assert len(driver.scheduler.tiers.start(0.0)) == 3
    assert not driver.scheduler.tiers.spill(), "none has ended"


def test_a_load_that_never_happened_is_not_published_by_an_abort() -> None:
    driver = tiered(num_disk_blocks=0)
    for index in range(4):
        serve(driver, f"first{index}", prompt(10 * index))
    driver.add(request("gone", prompt(0)))
    plan = driver.scheduler.plan(driver.now)
    assert plan is not None
    assert plan.swap_in
    driver.take(driver.scheduler.abort("gone", AbortCause.DISCONNECT, driver.now))
    driver.take(driver.scheduler.roll_back(driver.now))  # the device did nothing of the plan
    serve(driver, "later", prompt(0))
    driver.check_streams(aborted={"gone"})


def test_a_parked_request_holds_up_no_other() -> None:
    other = restarted(saved())
    other.add(request("parked", prompt(0)))
    other.add(request("later", prompt(30)))
    assert other.scheduler.has_parked
    assert other.scheduler.stats.num_waiting == 2
    assert other.launch()
    assert {row.num_prompt for row in other.launched[0][0].rows} == {17}
    assert len(other.scheduler.running) == 1
    other.drain()
    assert other.prompts["parked", 0].num_disk_tokens == 16
    other.check_streams()


def test_a_report_that_comes_twice_is_ignored() -> None:
    other = restarted(saved())
    other.add(request("again", prompt(0)))
    transfers = other.scheduler.tiers.start(0.0)
    for transfer in transfers:
        other.runner.transfer(transfer, other.slots)
        for is_good in (True, True, False):
            other.scheduler.transferred([(transfer, is_good)])
    check_scheduler(other.scheduler)
    assert other.scheduler.stats.transferred[TransferKind.LOAD] == 4
    assert not other.scheduler.stats.failed_transfers[TransferKind.LOAD]
    other.drain()
    other.check_streams()


def test_late_bytes_reach_no_new_owner() -> None:
    """A request goes on without its blocks and ends; what arrives after that is in nobody's page table."""
    other = restarted(saved(), num_host_blocks=10)
    other.add(request("again", prompt(0)))
    transfers = other.scheduler.tiers.start(0.0)
    while other.scheduler.has_work:
        other.now += 1.0
        if other.launch():
            other.commit()
    for index in range(8):
        serve(other, f"crowd{index}", prompt(3 * index), max_tokens=9)
    for transfer in transfers:
        other.runner.transfer(transfer, other.slots)
    other.scheduler.transferred([(transfer, True) for transfer in transfers])
    for index in range(8):
        serve(other, f"crowd again{index}", prompt(3 * index), max_tokens=9)
    other.check_streams()


def test_two_who_wait_for_the_same_read_it_once() -> None:
    other = restarted(saved())
    for name in ("a", "b"):
        other.add(request(name, prompt(0), seed=3))
    other.drain()
    assert other.scheduler.stats.transferred[TransferKind.LOAD] == 4
    other.check_streams()


def test_who_leaves_while_it_is_read_leaves_nothing_behind() -> None:
    other = restarted(saved())
    other.add(request("gone", prompt(0)))
    other.take(other.scheduler.abort("gone", AbortCause.DISCONNECT, other.now))
    check_scheduler(other.scheduler)
    other.transfer()
    assert serve(other, "later", prompt(0)) == (0, 0, 16), "what was read is there for the next one"
    other.check_streams(aborted={"gone"})


def test_what_cannot_be_read_is_computed_and_not_asked_for_again() -> None:
    other = restarted(saved())
    other.add(request("again", prompt(0)))
    other.transfer(is_good=False)
    other.drain()
    assert other.prompts["again", 0].num_cached_tokens == 0
    assert other.scheduler.stats.failed_transfers[TransferKind.LOAD] == 4
    assert other.scheduler.tiers.stores["disk"].pool.num_cached == 1, (
        "of five, that with what was generated was not asked for"
    )
    other.check_streams()


def test_what_cannot_be_written_is_not_said_to_be_there() -> None:
    driver = tiered()
    serve(driver, "first", prompt(0))
    driver.scheduler.tiers.spill()
    driver.transfer(is_good=False)
    assert driver.scheduler.tiers.stores["disk"].pool.num_free == 60
    check_scheduler(driver.scheduler)


def test_a_content_is_not_saved_before_its_copy_is_made() -> None:
    """It was evicted after its copy had arrived, and is copied to the same host block again."""
    tiers = tiered().scheduler.tiers
    tiers.host.offload(b"content", 3)
    tiers._landed[b"content"] = tiers.host.find(b"content")
    assert not tiers.start(0.0)
    tiers.host.take_due()
    tiers._landed[b"content"] = tiers.host.find(b"content")
    assert not tiers.start(0.0), "a plan in flight makes it"


def test_a_spill_that_fails_is_forgotten() -> None:
    driver = tiered()
    serve(driver, "first", prompt(0))
    assert driver.scheduler.tiers.spill()
    check_scheduler(driver.scheduler)
    driver.scheduler.tiers.spill()
    check_scheduler(driver.scheduler)
    assert driver.scheduler.tiers.host.pool.num_held == 0
    assert driver.scheduler.tiers.stores["disk"].pool.num_free == 60


def test_salts_keep_lower_tiers_apart() -> None:
    driver = spilled(cache_salt="alice")
    assert serve(driver, "bob", prompt(0), cache_salt="bob") == (0, 0, 0)
    assert serve(restarted(driver), "bob", prompt(0), cache_salt="bob") == (0, 0, 0)


def test_preempted_sequences_come_before_cached_blocks() -> None:
    driver = tiered(num_blocks=9, num_host_blocks=10, num_disk_blocks=0)
    for index in range(6):
        serve(driver, f"cached{index}", prompt(10 * index, 9))
    assert driver.scheduler.tiers.host.pool.num_cached > 0
    for index in range(4):
        asked = request(str(index), prompt(index, 7), max_tokens=20, seed=index, eos_token_ids=frozenset())
        driver.add(asked)
    driver.drain()
    assert driver.scheduler.stats.preemptions > 0
    driver.check_streams()


def crowd(chance: random.Random, driver: Driver, name: str) -> Request:
    shared = chance.choice((4, 8, 13, 16))
    own = tuple(chance.randrange(50) for _ in range(chance.randrange(1, 6)))
    n = chance.choice((1, 1, 2))
    params = {"max_tokens": chance.randrange(12), "n": n, "seed": chance.randrange(9), "arrival_s": driver.now}
    return request(name, prompt(10 * chance.randrange(4), shared) + own, **params)


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_to_copies_on_their_way_nobody_reads_what_is_not_there(seed: int) -> None:
    """Steps are taken back, transfers fail or never end, requests leave, the process is started anew."""
    chance, depth = random.Random(seed), seed % 2
    driver, hits = None, 0
    for life in range(3):
        sizes = {"num_host_blocks": chance.choice((3, 12, 40)), "num_disk_blocks": chance.choice((5, 60))}
        changes = {
            "depth": depth,
            "num_blocks": 10,
        }
        driver = tiered(**changes, **sizes) if driver is None else restarted(driver, **changes)
        aborted: set[str] = set()
        for turn in range(120):
            luck = chance.random()
            if luck < 0.2:
                driver.add(crowd(chance, driver, f"{life}.{turn}"))
            elif luck < 0.3:
                driver.run_out_of_memory()
            elif luck < 0.35 and driver.requests:
                name = chance.choice(list(driver.requests))
                events = driver.scheduler.abort(name, AbortCause.DISCONNECT, driver.now)
                aborted |= {name} if events else set()
                driver.take(events)
            elif luck < 0.45:
                driver.transfer(chance.randrange(4), is_good=chance.random() < 0.7)
            elif luck < 0.5 and not driver.launched:
                driver.spill()
            else:
                driver.step()
            check_scheduler(driver.scheduler)
        driver.drain()
        driver.transfer()
        driver.check_streams(aborted)
        hits += sum(driver.scheduler.stats.prefix_hits.values())
    assert hits > 0
