"""The eviction orders: against the plainest statement of their rule, and a chain that is eaten from its end."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.kv.eviction import Lru, Weighed
from engine.core.kv.prefix_cache import PrefixCache, chain_next, chain_root
from tests.integrity import check_index, check_pool

NUM_BLOCKS = 10


class PlainOrder:
    """The rule over a list of what was let go, oldest first; nothing is kept sorted. Without weights it is lru."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.weights: dict[int, int] = {}
        self.keys: dict[int, int] = {}  # as they were when the block was let go
        self.floor = 0

    def add(self, block: int) -> None:
        self.keys[block] = self.floor + self.weights.get(block, 1)
        self.cached.append(block)

    def remove(self, block: int) -> None:
        self.cached.remove(block)

    def next(self) -> int:
        return min(self.cached, key=lambda block: self.keys[block])  # the first of equals, which is the oldest

    def evict(self, block: int) -> None:
        self.floor = self.keys[block]
        self.remove(block)
        self.forget(block)

    def forget(self, block: int) -> None:
        self.weights.pop(block, None)

    def weigh(self, block: int, weight: int) -> None:
        self.weights[block] = weight


class OrderMachine(RuleBasedStateMachine):
    """Blocks are let go, weighed, held again and evicted; both say the same."""

    @initialize(is_weighed=st.booleans())
    def start(self, is_weighed: bool) -> None:
        self.order, self.plain = Weighed() if is_weighed else Lru(), PlainOrder()

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def turn(self, block: int) -> None:
        change = "remove" if block in self.order else "add"
        for each in (self.order, self.plain):
            getattr(each, change)(block)

    @precondition(lambda self: isinstance(self.order, Weighed))
    @rule(block=st.integers(0, NUM_BLOCKS - 1), weight=st.integers(0, 4))
    def weigh(self, block: int, weight: int) -> None:
        for each in (self.order, self.plain):
            each.weigh(block, weight)

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


def serve(cache: PrefixCache, tokens: list[int]) -> None:
    """One request after another."""
    pool, chain, needed = cache.pool, [chain_root("")], len(tokens) // cache.block_size
    hits = cache.match(chain, tokens, len(tokens))
    for block in hits:
        pool.fork(block)
    blocks = hits + pool.alloc_many(needed - len(hits))
    cache.register(chain, tokens, blocks, len(hits), needed)
    for block in reversed(blocks):
        pool.free(block)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 4), st.integers(0, 9)), max_size=60)
)
def test_no_block_outlives_the_one_before_it(prompts: list[tuple[int, int, int, int]]) -> None:
    cache = PrefixCache(NUM_BLOCKS, block_size=1)
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
