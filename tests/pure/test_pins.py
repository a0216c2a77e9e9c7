"""Pinned prefixes: they go last, in bounds, for a time, and cost whoever runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.core.kv.pins import Pins
from engine.core.kv.prefix_cache import PrefixCache, chain_next, chain_root
from engine.core.stats import Stats
from engine.core.types import Pin
from tests.integrity import check_index, check_pins, check_pool, check_scheduler
from tests.pure.driver import Driver, config, request
from tests.pure.test_tiers import prompt, serve, tiered

MAX_PINNED = 6
HOUR = 3600.0
SYSTEM = (49, *range(8))  # two full blocks and one token, unlike any prompt of the tiers' tests


def chain_of(*tokens: int) -> list[bytes]:
    chain = [chain_root("")]
    for token in tokens:
        chain.append(chain_next(chain[-1], [token]))
    return chain


class Target:
    """Room for every content."""

    def __init__(self) -> None:
        self.pinned: set[bytes] = set()

    def pin(self, digest: bytes) -> None:
        assert digest not in self.pinned
        self.pinned.add(digest)

    def unpin(self, digest: bytes) -> None:
        self.pinned.remove(digest)


class PinMachine(RuleBasedStateMachine):
    """Prefixes of each other are pinned, and time goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.pins, self.target, self.now = Pins(Stats(), MAX_PINNED), Target(), 0.0
        self.pins.targets.append(self.target)
        self.parents: dict[bytes, bytes] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        seconds=st.sampled_from([5.0, 60.0, HOUR, inf]),
    )
    def keep(self, tokens: list[int], seconds: float) -> None:
        chain = chain_of(*tokens)
        self.parents.update(zip(chain[2:], chain[1:], strict=False))
        for index in range(len(tokens)):
            before = dict(self.pins.until)
            is_kept = self.pins.keep(chain, index, self.now + seconds)
            gone = [until for digest, until in before.items() if digest not in self.pins.until]
            assert len(gone) <= is_kept, "a place was taken for nothing, or more than one"
            assert all(until < self.now + seconds for until in gone), "a pin that lasts longer lost its place"
            if not is_kept:
                break
            assert all(digest in self.pins.until for digest in chain[1 : index + 2])

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0, HOUR]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pins.expire(self.now)
        assert all(until > self.now for until in self.pins.until.values()), "a pin outlived its time"

    @invariant()
    def books_agree(self) -> None:
        check_pins(self.pins)
        assert self.target.pinned == set(self.pins.until)
        for digest, until in self.pins.until.items():
            parent = self.parents.get(digest)
            assert parent is None or self.pins.until[parent] >= until, "a prefix lost its beginning"


TestPinMachine = PinMachine.TestCase
TestPinMachine.settings = settings(max_examples=60, stateful_step_count=30)


def test_many_requests_for_one_prefix_cost_what_one_does() -> None:
    pins, chain = Pins(Stats(), MAX_PINNED), chain_of(*range(4))
    for index in range(1000):
        assert all(pins.keep(chain, block, HOUR + index) for block in range(4))
    check_pins(pins)
    assert len(pins._heap) < 200, "records grow with the requests"
    pins.expire(HOUR + 998.0)
    assert len(pins.until) == 4, "it lasts as long as the last one wants"
    pins.expire(HOUR + 999.0)
    assert len(pins.until) == 0


class PinnedCacheMachine(RuleBasedStateMachine):
    """Prompts come, one after another, through a small cache; some are pinned."""

    @initialize(max_pinned=st.integers(0, 8))
    def start(self, max_pinned: int) -> None:
        self.pins = Pins(Stats(), max_pinned)
        self.cache = PrefixCache(10, 1, None, self.pins.until, max_pinned)
        self.pins.targets.append(self.cache)
        self.now = 0.0

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6),
        seconds=st.sampled_from([None, None, 5.0, HOUR]),
        held=st.integers(0, 4),
    )
    def serve(self, tokens: list[int], seconds: float | None, held: int) -> None:
        """With some blocks held by others meanwhile, which is what a pin never stands in the way of."""
        pool, chain = self.cache.pool, [chain_root("")]
        others = pool.alloc_many(min(held, pool.num_available - len(tokens)))
        hits = self.cache.match(chain, tokens, len(tokens))
        for block in hits:
            pool.fork(block)
        pinned_before, num_expendable = pool.num_pinned, pool.num_expendable
        blocks = hits + pool.alloc_many(len(tokens) - len(hits))
        lost = pinned_before - pool.num_pinned
        assert lost == max(len(tokens) - len(hits) - num_expendable, 0), "pins go last, and go when they must"
        self.cache.register(chain, tokens, blocks, len(hits), len(tokens))
        for index in range(len(tokens) if seconds else 0):
            if not self.pins.keep(chain, index, self.now + (seconds or 0.0)):
                break
        for block in (*reversed(blocks), *others):
            pool.free(block)

    @rule(seconds=st.sampled_from([1.0, 10.0, HOUR]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pins.expire(self.now)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            check_index(self.cache)
            check_pool(self.cache.pool, [])
            check_pins(self.pins)
            here = {block for digest, block in self.cache._block_of.items() if digest in self.pins.until}
            assert here == set(self.cache.pool._pinned)


TestPinnedCacheMachine = PinnedCacheMachine.TestCase
TestPinnedCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)


def pinning(seconds: float = HOUR, num_tokens: int = len(SYSTEM)) -> dict[str, tuple[Pin, ...]]:
    return {"pins": (Pin(num_tokens, seconds),)}


def scan(driver: Driver, num: int = 12, name: str = "scan") -> None:
    """Prompts of four blocks that have nothing in common, several times what the pool holds."""
    for index in range(num):
        asked = tuple((13 * index + 5 * i + index * i) % 48 for i in range(17))
        driver.add(request(f"{name}{index}", asked, arrival_s=driver.now))
        driver.drain()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pinned_prefix_survives_what_turns_the_pool_over(depth: int) -> None:
    found = {}
    for share in (0.0, 0.25):
        driver = Driver(config(num_blocks=12, pinned_share=share), depth)
        driver.add(request("pin", SYSTEM, **pinning()))
        driver.drain()
        scan(driver)
        driver.add(request("again", (*SYSTEM, 40), arrival_s=driver.now))
        driver.drain()
        driver.check_streams()
        found[share] = driver.prompts["again", 0].num_cached_tokens
        assert driver.prompts["pin", 0].num_pinned_tokens == (8 if share else 0)
        assert driver.scheduler.stats.blocks_pinned == (2 if share else 0)
    assert found == {0.0: 0, 0.25: 8}


def test_a_pin_ends() -> None:
    driver = Driver(config(num_blocks=12, pinned_share=0.25))
    driver.add(request("pin", SYSTEM, **pinning(seconds=0.5)))
    driver.drain()
    driver.now += 1.0
    scan(driver)
    assert driver.scheduler.stats.blocks_pinned == 0
    driver.add(request("again", (*SYSTEM, 40)))
    driver.drain()
    assert driver.prompts["again", 0].num_cached_tokens == 0


def test_who_runs_comes_before_what_is_pinned() -> None:
    driver = Driver(config(num_blocks=12, pinned_share=0.9))
    driver.add(request("pin", tuple(range(40)), max_tokens=1, pins=(Pin(40, HOUR),)))
    driver.drain()
    assert driver.scheduler.stats.blocks_pinned == 10
    driver.add(request("large", tuple(range(1, 41)), max_tokens=8, eos_token_ids=frozenset()))
    driver.drain()
    driver.check_streams()
    assert driver.scheduler.stats.blocks_pinned == 0
    assert driver.scheduler.stats.preemptions == 0
    driver.add(request("again", tuple(range(40)), max_tokens=1))
    driver.drain()
    assert driver.scheduler.stats.blocks_pinned == 10, "computed again, it is kept again"


def test_a_pin_is_of_one_salt() -> None:
    driver = Driver(config(num_blocks=12, pinned_share=0.5))
    driver.add(request("pin", SYSTEM, cache_salt="a", **pinning()))
    driver.add(request("other", SYSTEM, cache_salt="b"))
    driver.drain()
    assert driver.scheduler.stats.blocks_pinned == 2
    scan(driver)
    for salt, found in (("b", 0), ("a", 8)):
        driver.add(request(f"again {salt}", (*SYSTEM, 40), cache_salt=salt, arrival_s=driver.now))
        driver.drain()
        assert driver.prompts[f"again {salt}", 0].num_cached_tokens == found


def test_nobody_takes_the_operators_place() -> None:
    driver = Driver(config(num_blocks=12, pinned_share=0.25))  # three
    driver.add(request("system", SYSTEM, max_tokens=0, **pinning(seconds=inf)))
    driver.drain()
    for index in range(4):
        driver.add(request(f"client{index}", (30 + index, *range(8)), tenant=f"{index}", **pinning()))
        driver.drain()
    scan(driver)
    driver.add(request("again", (*SYSTEM, 40), arrival_s=driver.now))
    driver.drain()
    assert driver.prompts["again", 0].num_cached_tokens == 8
    assert driver.scheduler.stats.pins_refused > 0


def test_a_pin_holds_in_the_tiers_behind_the_pool_and_is_found_there() -> None:
    """The pool itself keeps it too, unless somebody who runs needs all of that."""
    driver = tiered(num_host_blocks=8, num_disk_blocks=12, pinned_share=0.5)
    serve(driver, "pin", SYSTEM, **pinning())
    while driver.spill():
        pass
    assert serve(driver, "large", prompt(9, 47), max_tokens=1) == (0, 0, 0)
    stats = driver.scheduler.stats
    assert (stats.blocks_pinned, stats.host_blocks_pinned, stats.store_blocks_pinned["disk"]) == (0, 2, 2)
    for index in range(12):
        serve(driver, f"scan{index}", tuple((13 * index + 5 * i + index * i) % 48 for i in range(17)))
        while driver.spill():
            pass
    assert (stats.host_blocks_pinned, stats.store_blocks_pinned["disk"]) == (2, 2)
    assert sum(serve(driver, "again", (*SYSTEM, 40))) == 8
    assert stats.blocks_pinned == 2
    driver.check_streams()


def conserved(driver: Driver, shares: Iterable[float]) -> bool:
    pools = (driver.scheduler.kv.pool, driver.scheduler.tiers.host.pool, driver.scheduler.tiers.stores["disk"].pool)
    return all(pool.num_pinned <= share * pool.num_blocks for pool, share in zip(pools, shares, strict=True))


@settings(max_examples=30)
@given(
    depth=st.integers(0, 3),
    share=st.sampled_from([0.25, 0.9]),
    turns=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from([None, 0.05, HOUR, inf]),
            st.sampled_from(["step", "fail", "spill", "lose", "wait"]),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
)
def test_pins_change_no_stream_and_lose_no_block(
    depth: int, share: float, turns: list[tuple[int, float | None, str, int]]
) -> None:
    driver = tiered(depth, num_blocks=10, num_host_blocks=9, pinned_share=share)
    for index, (first, seconds, deed, times) in enumerate(turns):
        pins = () if seconds is None else (Pin(8, seconds), Pin(16, seconds / 2))
        asked = request(
            str(index), prompt(10 * first, 17), seed=index, arrival_s=driver.now, tenant=str(first % 2), pins=pins
        )
        driver.add(asked)
        for _ in range(times):
            if deed == "fail":
                driver.run_out_of_memory()
            elif deed == "lose":
                driver.transfer(is_good=False)
            elif deed == "spill" and not driver.launched:
                driver.spill()
            else:
                driver.now += 0.5 * (deed == "wait")
                driver.step()
            check_scheduler(driver.scheduler)
            assert conserved(driver, (share, share, share))
    driver.drain()
    driver.check_streams()
