"""Eviction orders: each against the plainest statement of its rule, and a chain that is eaten from its end under all."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.kv.eviction import EVICTION_POLICIES
from engine.core.kv.prefix_cache import PrefixCache, chain_next, chain_root
from tests.integrity import check_index, check_pool
from tests.pure.driver import Driver, config, request

NUM_BLOCKS = 10
POLICY_NAMES = tuple(EVICTION_POLICIES)


class PlainOrder:
    """The rules as sentences over a list of what was let go, oldest first; nothing is kept sorted."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.cached: list[int] = []
        self.finds: dict[int, int] = {}
        self.savings: dict[int, int] = {}
        self.protected: list[int] = []  # of cached, for slru
        self.keys: dict[int, int] = {}  # as they were when the block was let go
        self.let_go: dict[int, int] = {}  # evictions so far, then
        self.num_evicted = 0
        self.floor = 0

    def add(self, block: int) -> None:
        earned = {"lfu": self.finds, "cost": self.savings}.get(self.policy, {})
        self.keys[block] = self.floor + 1 + earned.get(block, 0)
        self.let_go[block] = self.num_evicted
        self.cached.append(block)
        if self.finds.get(block):
            self.protected.append(block)
            if len(self.protected) > NUM_BLOCKS * 4 // 5:
                fallen = self.protected.pop(0)
                if self.policy == "slru":
                    self.finds[fallen] = 0
                    self.cached.remove(fallen)
                    self.cached.append(fallen)

    def remove(self, block: int) -> None:
        self.cached.remove(block)
        if block in self.protected:
            self.protected.remove(block)

    def next(self) -> int:
        if self.policy == "slru":
            if self.protected and self.num_evicted - self.let_go[self.protected[0]] >= 4 * NUM_BLOCKS:
                return self.protected[0]
            return next((block for block in self.cached if block not in self.protected), self.cached[0])
        if self.policy == "lru":
            return self.cached[0]
        return min(self.cached, key=lambda block: self.keys[block])  # the first of equals, which is the oldest

    def evict(self, block: int) -> None:
        self.floor = self.keys[block]
        self.num_evicted += 1
        self.remove(block)
        self.forget(block)

    def forget(self, block: int) -> None:
        self.finds.pop(block, None)
        self.savings.pop(block, None)

    def found(self, blocks: list[int]) -> None:
        for behind, block in enumerate(reversed(blocks), start=1):
            self.finds[block] = self.finds.get(block, 0) + 1
            self.savings[block] = self.savings.get(block, 0) + behind


class OrderMachine(RuleBasedStateMachine):
    """Blocks are let go, found, held again and evicted; both say the same."""

    @initialize(policy=st.sampled_from(POLICY_NAMES))
    def start(self, policy: str) -> None:
        self.order, self.plain = EVICTION_POLICIES[policy](NUM_BLOCKS), PlainOrder(policy)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def turn(self, block: int) -> None:
        change = "remove" if block in self.order else "add"
        for each in (self.order, self.plain):
            getattr(each, change)(block)

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=4))
    def find(self, blocks: list[int]) -> None:
        self.order.found(blocks)
        self.plain.found(blocks)

    @precondition(lambda self: len(self.order))
    @rule()
    def evict(self) -> None:
        block = self.order.evict()
        assert block == self.plain.next()
        self.plain.evict(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        """As when a pool takes a block that is pinned, or one is written anew."""
        if block in self.order:
            self.turn(block)
        self.order.forget(block)
        self.plain.forget(block)

    @invariant()
    def both_know_the_same(self) -> None:
        if hasattr(self, "order"):
            assert sorted(self.order) == sorted(self.plain.cached)
            assert len(self.order) == len(self.plain.cached)


TestOrderMachine = OrderMachine.TestCase


def serve(cache: PrefixCache, tokens: list[int]) -> int:
    """One request after another: what was found, in blocks."""
    pool, chain, needed = cache.pool, [chain_root("")], len(tokens) // cache.block_size
    hits = cache.match(chain, tokens, len(tokens))
    for block in hits:
        pool.fork(block)
    pool.found(hits)
    blocks = hits + pool.alloc_many(needed - len(hits))
    cache.register(chain, tokens, blocks, len(hits), needed)
    for block in reversed(blocks):
        pool.free(block)
    return len(hits)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 4), st.integers(0, 9)), max_size=60)
)
def test_no_block_outlives_the_one_before_it(policy: str, prompts: list[tuple[int, int, int, int]]) -> None:
    cache = PrefixCache(NUM_BLOCKS, block_size=1, eviction=policy)
    parents: dict[bytes, bytes] = {}
    for family, shared, own, salt in prompts:
        tokens = [100 * family + i for i in range(shared)] + [1000 + 10 * salt + i for i in range(own)]
        serve(cache, tokens)
        digests = list(accumulate([[token] for token in tokens], chain_next, initial=chain_root("")))  # type: ignore[arg-type]
        parents.update(zip(digests[2:], digests[1:], strict=False))
        check_index(cache)
        check_pool(cache.pool, [])
        known = cache._block_of
        assert all(parents[digest] in known for digest in known if digest in parents)


def hits_after_scan(policy: str) -> int:
    """Two prompts in use, then documents that nobody asks for again, twice what the pool holds; what is left of the two."""
    cache = PrefixCache(NUM_BLOCKS, block_size=1, eviction=policy)
    popular = [[1, 2, 3], [11, 12, 13]]
    for _ in range(8):
        for tokens in popular:
            serve(cache, tokens)
    for document in range(5):
        serve(cache, [1000 + 10 * document + i for i in range(4)])
    return sum(serve(cache, tokens) for tokens in popular)


def test_what_is_in_use_survives_a_scan_but_under_lru() -> None:
    assert {policy: hits_after_scan(policy) for policy in POLICY_NAMES} == {"lru": 0, "slru": 6, "lfu": 6, "cost": 6}


@pytest.mark.parametrize("policy", ["slru", "lfu", "cost"])
def test_what_was_popular_once_goes_in_the_end(policy: str) -> None:
    cache = PrefixCache(NUM_BLOCKS, block_size=1, eviction=policy)
    for _ in range(20):
        serve(cache, [1, 2, 3, 4, 5, 6])
    for _ in range(60):
        for tokens in ([21, 22, 23, 24], [31, 32, 33, 34]):
            serve(cache, tokens)
    assert serve(cache, [21, 22, 23, 24]) == serve(cache, [31, 32, 33, 34]) == 4


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_streams_are_the_same_under_every_policy(policy: str) -> None:
    driver = Driver(config(num_blocks=12, eviction=policy), depth=1)
    for i in range(30):
        driver.add(request(str(i), (*range(4 + 4 * (i % 3)), 40 + i % 5), max_tokens=6, seed=i))
        driver.step()
    driver.drain()
    driver.check_streams()
    assert driver.scheduler.stats.prefix_hit_tokens > 0
