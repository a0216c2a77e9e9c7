"""The prefix cache: what is found, what is not, and that tails go before heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv.prefix_cache import PrefixCache, chain_root
from tests.integrity import check_index, check_pool

TOKENS = list(range(10))


def filled(num_blocks: int = 4) -> PrefixCache:
    """A cache that knows the first two blocks of TOKENS."""
    cache = PrefixCache(num_blocks, block_size=4)
    blocks = cache.pool.alloc_many(3)
    cache.register([chain_root("")], TOKENS, blocks, 0, 2)
    for block in reversed(blocks):
        cache.pool.free(block)
    return cache


def test_only_full_blocks_are_found_and_no_further_than_asked() -> None:
    cache = filled()
    assert cache.match([chain_root("")], TOKENS, 10) == [0, 1]
    assert cache.match([chain_root("")], TOKENS, 7) == [0]
    assert cache.match([chain_root("")], TOKENS[:3], 3) == []


def test_another_salt_or_another_first_token_finds_nothing() -> None:
    cache = filled()
    assert cache.match([chain_root("tenant")], TOKENS, 10) == []
    assert cache.match([chain_root("")], [99, *TOKENS[1:]], 10) == []


def test_the_same_block_after_another_parent_is_another_block() -> None:
    cache = filled()
    assert cache.match([chain_root("")], TOKENS[4:8] + TOKENS[4:8], 8) == []


def test_a_search_extends_the_chain_once() -> None:
    cache, chain = filled(), [chain_root("")]
    cache.match(chain, TOKENS, 10)
    assert len(chain) == 3
    before = list(chain)
    cache.match(chain, TOKENS, 10)
    assert chain == before


def test_tails_are_evicted_before_heads() -> None:
    cache = filled()
    cache.pool.alloc_many(2)  # the two that were free
    cache.pool.alloc()  # evicts one: the tail
    assert cache.match([chain_root("")], TOKENS, 10) == [0]
    check_index(cache)


def test_two_sequences_that_computed_the_same_block_leave_one_findable() -> None:
    cache = PrefixCache(4, block_size=4)
    first, second = cache.pool.alloc(), cache.pool.alloc()
    cache.register([chain_root("")], TOKENS, [first], 0, 1)
    cache.register([chain_root("")], TOKENS, [second], 0, 1)
    cache.pool.free(first)
    cache.pool.free(second)
    assert cache.match([chain_root("")], TOKENS, 4) == [first]
    assert cache.pool.num_cached == 1
    check_index(cache)


def left(cache: PrefixCache, tokens: list[int], num_prompt: int = 0) -> list[int]:
    """A sequence comes, is computed, and leaves; the blocks that were found for it, and those it had."""
    chain, size = [chain_root("")], cache.block_size
    found = cache.match(chain, tokens[:num_prompt], num_prompt)
    for block in found:
        cache.pool.fork(block)
    blocks = found + cache.pool.alloc_many(len(tokens) // size - len(found))
    cache.register(chain, tokens, blocks, len(found), num_prompt // size)
    cache.register(chain, tokens, blocks, max(len(found), num_prompt // size), len(blocks))
    cache.pool.free(*reversed(blocks))
    check_index(cache)
    return blocks


def test_of_two_that_leave_the_same_one_stays() -> None:
    cache = PrefixCache(12, block_size=2)
    first, second = left(cache, TOKENS, 4), left(cache, TOKENS, 4)
    assert first[:2] == second[:2]
    assert cache.match([chain_root("")], TOKENS, 10) == first
    assert cache.pool.num_cached == 5


def test_of_what_was_left_tails_go_first_and_the_rest_can_be_found() -> None:
    cache = PrefixCache(6, block_size=2)
    blocks = left(cache, TOKENS, 4)
    held = cache.pool.alloc_many(3)
    check_index(cache)
    assert cache.match([chain_root("")], TOKENS, 10) == blocks[:3]
    cache.pool.free(*held)
    check_index(cache)


def test_blocks_that_two_show_are_found_for_both() -> None:
    cache, chain = PrefixCache(8, block_size=2), [chain_root("")]
    blocks = cache.pool.alloc_many(4)
    for block in blocks:
        cache.pool.fork(block)
    for tail in (8, 9):  # two choices that had three blocks in common, and the second of which goes on
        own = cache.pool.alloc()
        tokens = [*TOKENS[:8], tail, tail]
        cache.register(list(chain), tokens, [*blocks, own], 0, 5)
        check_index(cache)
        cache.pool.free(own, *reversed(blocks))
    assert cache.match([chain_root("")], [*TOKENS[:8], 9, 9], 10)[:4] == blocks
    assert cache.pool.num_cached == 6
    check_index(cache)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda cache: cache._name_of.update({1: b"x"}), "block 1 is not where its content is"),
        (lambda cache: cache.pool._indexed.__setitem__(9, 1), "0 indexes find block 9"),
        (lambda cache: cache._block_of.update({b"x": 9}), "a content is nowhere"),
    ],
)
def test_a_check_finds_what_is_out_of_place(damage: Callable[[PrefixCache], object], why: str) -> None:
    cache = PrefixCache(12, block_size=2)
    left(cache, TOKENS)
    damage(cache)
    with pytest.raises(AssertionError, match=why):
        check_index(cache)


def test_what_stands_behind_a_block_that_went_is_free() -> None:
    cache = PrefixCache(8, block_size=2)
    blocks = left(cache, TOKENS, 2)
    cache.pool.weigh(blocks[1:2], 0.5)
    cache.pool.fork(blocks[1])  # nobody has found it, but if it goes first ...
    cache.pool.free(blocks[1])
    order = [*cache.pool._cached]
    held = cache.pool.alloc_many(cache.pool.num_free + order.index(blocks[2]) + 1)
    check_index(cache)
    found = cache.match([chain_root("")], TOKENS, 10)
    assert found == blocks[: len(found)]
    cache.pool.free(*held)
    check_pool(cache.pool, [])


@given(
    requests=st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=24), st.integers(0, 24)), max_size=20
    )
)
def test_whatever_comes_and_leaves_a_block_that_is_found_has_what_it_is_found_for(
    requests: list[tuple[list[int], int]],
) -> None:
    cache, content = PrefixCache(16, 2), dict[int, tuple[int, ...]]()
    for tokens, num_prompt in requests:
        known = cache.match([chain_root("")], tokens, min(num_prompt, len(tokens)))
        for index, block in enumerate(known):
            assert content[block] == tuple(tokens[: 2 * index + 2])
        blocks = left(cache, tokens, min(num_prompt, len(tokens)))
        content |= {block: tuple(tokens[: 2 * index + 2]) for index, block in enumerate(blocks)}
        found = cache.match([chain_root("")], tokens, len(tokens))
        assert len(found) == len(tokens) // 2, "nothing has driven it out"
        assert all(content[block] == tuple(tokens[: 2 * index + 2]) for index, block in enumerate(found))
        check_index(cache)
    check_pool(cache.pool, [])
