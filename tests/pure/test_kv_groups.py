"""Groups of layers with sliding windows beside full attention: footprint, resuming, and refusals.

Histories over mixtures of windows and recurrent state are in test_snapshots.py.

FakeRunner asserts in every step that all positions of a window are there and right, so a history that runs to its end
proves that no block was freed too early, shared without a copy, or found under a wrong name.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.in_flight import InFlightStep
from engine.core.kv import groups as kv_groups
from engine.core.kv.groups import WindowGroup
from engine.core.kv.prefix_cache import PrefixCache, name_block
from engine.core.page_table import NO_BLOCK, blocks_for
from engine.core.sequence import Sequence
from engine.core.types import AbortCause, Request
from tests.pure.driver import Driver, config, request

WINDOWS = st.lists(st.sampled_from([1, 2, 4, 5, 9, 17]), min_size=1, max_size=2)


def windowed(windows: list[int], **changes: bool | str | float | None) -> SchedulerConfig:
    """A small engine with groups of these windows."""
    return config(windows=tuple(windows), **changes)  # type: ignore[arg-type]


def groups_of(driver: Driver) -> list[WindowGroup]:
    return driver.scheduler.kv._windows


def num_held(table: list[int]) -> int:
    return sum(block != NO_BLOCK for block in table)


def check_footprint(driver: Driver) -> None:
    """No sequence holds more than its window, what is in flight of it, drafts, and two partial blocks."""
    settings = driver.scheduler.config
    for seq in driver.scheduler._queue.holders(driver.scheduler._in_flight):
        for window, table in zip(settings.windows, seq.kv.tables[1:], strict=bool(seq.kv.tables)):
            most = window, seq.num_planned - seq.num_computed, settings.num_speculative_tokens
            assert num_held(table) <= sum(blocks_for(num, settings.block_size) for num in most) + 2
            assert len(table) <= len(seq.kv.blocks)


def check_findable(driver: Driver) -> None:
    """The groups together find what the pool says is found."""
    kv = driver.scheduler.kv
    num_findable = sum(kv.pool.findable)
    assert sum(group.num_findable for _, group in kv.groups) == num_findable


turns = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(1, 3)),
    st.tuples(st.just("step"), st.just([]), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.just([]), st.integers(0, 5)),
    st.tuples(st.just("memory"), st.just([]), st.just(0)),
)


def play(driver: Driver, history: list[tuple[str, list[int], int]]) -> set[str]:
    """Run a history to its end; returns the requests that were aborted."""
    aborted: set[str] = set()
    for action, prompt, num in history:
        if action == "add":
            driver.add(request(str(len(driver.requests)), tuple(prompt), max_tokens=12, n=num))
        elif action == "step":
            for _ in range(num):
                driver.step()
        elif action == "memory":
            driver.run_out_of_memory()
        elif events := driver.scheduler.abort(str(num), AbortCause.DISCONNECT, driver.now):
            aborted.add(str(num))
            driver.take(events)
    driver.drain()
    return aborted


@settings(max_examples=60)
@given(
    history=st.lists(turns, max_size=30),
    windows=WINDOWS,
    depth=st.integers(0, 1),
    caching=st.booleans(),
    num_blocks=st.integers(24, 60),
    num_host_blocks=st.sampled_from([0, 12]),
)
def test_windows_change_no_stream(
    history: list[tuple[str, list[int], int]], windows: list[int], depth: int, caching: bool, **sizes: int
) -> None:
    one, more = (
        Driver(each(enable_prefix_caching=caching, max_model_len=40, **sizes), depth)
        for each in (config, lambda **changes: windowed(windows, **changes))
    )
    aborted = set[str]()  # in either run: the lengths of these streams depend on what was cached
    for driver in (one, more):
        aborted |= play(driver, history)
    for driver in (one, more):
        driver.check_streams(aborted)
    assert all(more.streams[key] == said for key, said in one.streams.items() if key[0] not in aborted)


def test_no_ticket_is_saved_of_a_window_that_a_rollback_has_passed() -> None:
    """A copy that is lost takes a sequence back to a boundary before the window that it still has."""
    driver = Driver(windowed([2], num_blocks=40, num_host_blocks=12, enable_prefix_caching=False))
    driver.add(request("r", (2, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 2, 2, 1, 2, 0, 0, 2, 2, 1, 2, 2), n=2, max_tokens=12))
    driver.run_out_of_memory()
    for _ in range(4):
        driver.step()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


def held_at_most(driver: Driver) -> int:
    """Run to the end; returns the most blocks of the first group with a window that were held meanwhile."""
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        check_footprint(driver)
        tables = [seq.kv.tables[1] for seq in driver.scheduler.running]
        most = max(most, sum(map(num_held, tables)))
    return most


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_holds_its_window_and_the_chunks_in_flight(depth: int) -> None:
    driver = Driver(windowed([8], num_blocks=80, max_model_len=200), depth)
    driver.add(request(prompt=tuple(range(150)), max_tokens=40, eos_token_ids=frozenset()))
    most = held_at_most(driver)
    driver.check_streams()
    assert 3 <= most <= 2 + 3 * (1 + depth) + 2, "8 positions and chunks of 12, in blocks of 4"


@pytest.mark.parametrize("num_steps", [2, 3, 16])
def test_a_step_that_is_rolled_back_finds_its_windows_again(num_steps: int) -> None:
    driver = Driver(windowed([2, 5]), depth=1)
    driver.add(request(prompt=tuple(range(30)), max_tokens=20, eos_token_ids=frozenset()))
    for _ in range(num_steps):
        driver.step()
    driver.run_out_of_memory()
    check_footprint(driver)
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("num_steps", range(1, 12))
def test_drafts_that_are_rolled_back_leave_tables_of_one_length(num_steps: int) -> None:
    driver = Driver(windowed([5], num_speculative_tokens=4))
    driver.add(request(prompt=(1, 2, 3, 4, 5), max_tokens=30, eos_token_ids=frozenset()))
    for _ in range(num_steps):
        driver.step()
    driver.run_out_of_memory()
    driver.step()
    assert all(len(seq.kv.tables[1]) == len(seq.kv.blocks) for seq in driver.scheduler.running)
    driver.drain()
    driver.check_streams()


def prefill(driver: Driver, asked: Request) -> int:
    """Run a request to its end; returns how many positions it was admitted with."""
    driver.add(asked)
    driver.drain()
    return driver.prompts[asked.request_id, 0].num_cached_tokens


def test_findable_blocks_are_counted_by_kind_of_group() -> None:
    driver = Driver(windowed([4, 4, 9], max_model_len=64, num_blocks=200))
    driver.add(request("a", tuple(range(32)), max_tokens=1))
    driver.drain()
    stats, size = driver.scheduler.stats, driver.scheduler.config.block_size
    assert stats.findable_blocks.keys() == {"full", "window 4", "window 9"}
    assert stats.findable_blocks["full"] == 32 // size
    assert 0 < stats.findable_blocks["window 9"] < stats.findable_blocks["window 4"]
    assert sum(stats.findable_blocks.values()) == stats.blocks_cached


def test_a_prefix_is_resumed_where_every_group_can() -> None:
    driver = Driver(windowed([8, 3], num_blocks=60))
    prompt = tuple(range(32))
    assert prefill(driver, request("first", prompt)) == 0
    assert prefill(driver, request("again", prompt)) == 28
    names = driver.scheduler.kv.first_names(request("names", prompt))
    driver.scheduler.kv._cache.match(names, prompt, 32)
    wide, narrow = groups_of(driver)
    narrow.drop(names[7])  # of positions 24 .. 27; position 28 reads 26
    wide.drop(names[3])  # of 8 .. 11; positions 12 and 16 read them
    assert prefill(driver, request("cut", prompt)) == 24
    narrow.drop(names[7])
    narrow.drop(names[6])
    assert prefill(driver, request("shorter", prompt)) == 20
    for name in (names[7], names[6], names[5]):
        narrow.drop(name)
    assert prefill(driver, request("shortest", prompt)) == 8, "at 16 and 12 the wide window misses a block"
    driver.check_streams()


@given(
    found=st.lists(st.sampled_from(["", "pool", "host"]), max_size=12),
    window=st.integers(1, 20),
)
def test_the_boundary_is_the_longest_whose_window_is_cached(found: list[str], window: int) -> None:
    group = WindowGroup(1, windowed([window], num_blocks=20), PrefixCache(20, 4))
    chain = [bytes([index]) for index in range(len(found) + 1)]
    for name, where in zip(chain[1:], found, strict=True):
        if where == "pool":
            group.put(*group.names(name), group.pool.alloc())

    def can_resume(num_blocks: int) -> bool:
        reads = range(max(4 * num_blocks - window + 1, 0), 4 * num_blocks)
        return all(found[position // 4] for position in reads)

    below = {group.names(name)[0] for name, where in zip(chain[1:], found, strict=True) if where == "host"}
    assert group.resumable(chain, len(found), below.__contains__) == max(
        num for num in range(len(found) + 1) if can_resume(num)
    )


def test_answers_share_a_window_until_they_write() -> None:
    driver = Driver(windowed([6], num_blocks=60))
    driver.add(request(prompt=tuple(range(10)), n=4, max_tokens=20, eos_token_ids=frozenset(), temperature=1.0))
    driver.step()
    copies = 0
    while driver.scheduler.has_work:
        driver.step()
        living = driver.scheduler.running
        copies = max(copies, len({seq.kv.tables[1][-1] for seq in living}))
    assert copies == 4
    driver.check_streams()


def off_by_a_block(group: WindowGroup, position: int) -> int:
    return max(position - group._window + 5, 0) // group._block_size


WRITE = WindowGroup.extend


def share_and_write(group: WindowGroup, seq: Sequence, step: InFlightStep, *, is_copied: bool) -> None:
    """Leave a shared tail in place."""
    if not is_copied:
        WRITE(group, seq, step, is_copied=False)


def answer_and_continue(driver: Driver) -> None:
    driver.add(request(prompt=tuple(range(10)), n=3, max_tokens=20, eos_token_ids=frozenset(), temperature=1.0))
    driver.drain()


@pytest.mark.parametrize(
    ("name", "mistake"), [("_first_read", off_by_a_block), ("extend", share_and_write)], ids=["early", "shared"]
)
def test_the_runner_notices_mistakes(monkeypatch: pytest.MonkeyPatch, name: str, mistake: object) -> None:
    monkeypatch.setattr(WindowGroup, name, mistake)
    with pytest.raises(AssertionError, match=r"freed too early|overwritten"):
        answer_and_continue(Driver(windowed([6], num_blocks=60)))


def test_a_preempted_sequence_is_recomputed_from_where_its_windows_are_cached() -> None:
    driver = Driver(windowed([5], num_blocks=24))
    for index in range(3):
        driver.add(request(str(index), tuple(range(index, index + 9)), max_tokens=20, eos_token_ids=frozenset()))
    resumed: list[Sequence] = []
    while driver.scheduler.has_work:
        waiting = [seq for seq in driver.scheduler._queue.waiting if seq.is_resuming]
        driver.step()
        resumed += [seq for seq in waiting if seq in driver.scheduler.running and seq.kv.num_published]
    driver.check_streams()
    assert driver.scheduler.stats.preempted
    assert resumed, "nothing resumed from the cache"


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        config(windows=(0,))


def test_the_next_turn_finds_its_prompt_in_a_pool_full_of_others() -> None:
    """The window of a prompt's end stays cached, though the answer has passed it."""
    driver = Driver(windowed([8, 3], num_blocks=60, max_model_len=120))
    for index in range(4):  # they fill the pool, and nobody asks for them again
        prefill(driver, request(f"other{index}", tuple(range(100 * index, 100 * index + 60))))
    assert not driver.scheduler.kv.pool.counts[0], "blocks are free"
    prompt = tuple(range(1000, 1030))
    prefill(driver, request("turn1", prompt, max_tokens=60, eos_token_ids=frozenset()))
    assert prefill(driver, request("turn2", (*prompt[:28], 7, 8, 9, 10, 11))) == 28
    driver.check_streams()


def test_a_prompt_finds_the_window_where_another_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool whose passed windows make room for others: where one left, and every so often, they are kept."""
    monkeypatch.setattr(kv_groups, "EVERY", 5)
    driver = Driver(windowed([8], num_blocks=80, max_model_len=200))
    pool, common, found = driver.scheduler.kv.pool, tuple(range(500, 590)), list[int]()
    for index in range(3):
        found.append(prefill(driver, request(f"{index}", (*common, *range(100 * index, 100 * index + 9)))))
        while pool._passed:
            groups_of(driver)[0].forget(next(iter(pool._passed)))
    assert found == [0, 64, 88], "every eight blocks: a window takes two"
    driver.check_streams()


def test_an_answer_is_named_at_its_end_with_the_window_that_it_has_then() -> None:
    """While it decodes no digest of its blocks is made, and blocks that slide out of windows are free."""
    driver = Driver(windowed([8, 3], num_blocks=200, max_model_len=120))
    prompt = tuple(range(1000, 1030))
    driver.add(request("turn1", prompt, max_tokens=60, eos_token_ids=frozenset()))
    for _ in range(50):
        driver.step()
    [seq] = driver.scheduler.running
    assert len(seq.tokens) > 70
    assert len(seq.kv.chain) == 1 + len(prompt) // driver.scheduler.config.block_size
    assert all(num_held(seq.kv.tables[group.number]) < 5 for group in groups_of(driver))
    driver.drain()
    answer = tuple(driver.streams["turn1", 0])
    assert prefill(driver, request("turn2", (*prompt, *answer, 7, 8, 9))) == 88
    driver.check_streams()


def test_the_first_in_line_is_looked_up_again_once_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(windowed([8], max_num_seqs=2, max_num_batched_tokens=40))
    match, lookups = PrefixCache.match, list[int]()
    monkeypatch.setattr(PrefixCache, "match", lambda *args: (lookups.append(len(args[2])), match(*args))[1])
    for index in range(2):
        driver.add(request(str(index), (index, 2, 3), max_tokens=9, eos_token_ids=frozenset()))
    driver.step()
    driver.add(request("blocked", tuple(range(17)), max_tokens=1))
    driver.step()
    num_asked = 0
    while waiting := driver.scheduler._queue.waiting:
        driver.scheduler.kv.lookup(waiting[0])
        driver.step()
        num_asked += 1
    assert 0 < lookups.count(17) < num_asked, "once, and after each block that became full"
    driver.drain()
    driver.check_streams()


def test_a_window_goes_with_the_block_of_the_first_group() -> None:
    driver = Driver(windowed([8], num_blocks=40))
    prompt = tuple(range(20))
    prefill(driver, request("first", prompt))
    kv, group = driver.scheduler.kv, groups_of(driver)[0]
    names = kv.first_names(request("names", prompt))
    full = kv._cache.match(names, prompt, 20)
    assert group.has(names[5])
    while kv._cache.content(full[4]) is not None:
        kv.pool.alloc()
    assert not group.has(names[5]), "no prompt reaches it any more"


def crowd(driver: Driver, first: int = 0) -> None:
    """Fill the pool several times with prompts that no request continues."""
    for index in range(first, first + 8):
        prefill(driver, request(f"other{index}", tuple(range(100 * index, 100 * index + 60))))


@pytest.mark.parametrize("windows", [[3], [8, 3], [17, 1000]])
def test_the_next_turn_finds_its_prompt_in_host_memory(windows: list[int]) -> None:
    """The pool has lost it: the first group's blocks and the windows at the prompt's end come from below."""
    driver = Driver(windowed(windows, num_blocks=60, max_model_len=120, num_host_blocks=1000, host_caching=True))
    prompt = tuple(range(9000, 9030))
    prefill(driver, request("turn1", prompt, max_tokens=60, eos_token_ids=frozenset()))
    crowd(driver)
    assert prefill(driver, request("turn2", (*prompt[:28], 7, 8, 9, 10, 11))) == 28
    said = driver.streams["turn1", 0]
    crowd(driver, 8)
    whole = (*prompt, *said)  # the end of the answer: 89 positions, the last of them without K/V
    assert prefill(driver, request("turn3", (*whole, 7, 8, 9))) == 88
    assert driver.scheduler.stats.prefix_hits["host"] == 28 + 88
    driver.check_streams()


def test_a_window_that_comes_from_host_memory_is_findable_in_the_pool_again() -> None:
    """Also behind blocks of the first group that the pool has kept."""
    driver = Driver(windowed([9], num_blocks=60, max_model_len=120, num_host_blocks=100, host_caching=True))
    kv, prompt, (group,) = driver.scheduler.kv, tuple(range(9000, 9030)), groups_of(driver)
    prefill(driver, request("turn1", prompt))
    names = list(kv.first_names(driver.requests["turn1"]))
    name_block(names, prompt, 6, 4)
    window = [names[index + 1] for index in group.window_at(7)]
    for name in window:
        group.drop(name)
    prefill(driver, request("other", (1, 2, 3)))  # whose step copies it out
    assert prefill(driver, request("turn2", (*prompt[:28], 7, 8, 9, 10, 11))) == 28
    assert all(map(group.has, window))
    driver.check_streams()


@pytest.mark.parametrize(("lost", "num_found"), [(4, 28), (5, 0), (6, 0)])
def test_a_prompt_resumes_in_no_group_if_a_block_of_one_window_is_gone(lost: int, num_found: int) -> None:
    driver = Driver(windowed([9], num_blocks=60, max_model_len=120, num_host_blocks=1000, host_caching=True))
    kv, prompt = driver.scheduler.kv, tuple(range(9000, 9030))
    prefill(driver, request("turn1", prompt))
    names = list(kv.first_names(driver.requests["turn1"]))
    for index in range(7):
        name_block(names, prompt, index, 4)
    crowd(driver)
    kv.tiers.host.drop(*groups_of(driver)[0].names(names[lost + 1]))
    assert prefill(driver, request("turn2", (*prompt[:28], 7, 8, 9, 10, 11))) == num_found
    driver.check_streams()


def test_a_daemon_that_starts_again_finds_windows_on_the_disk() -> None:
    settings = windowed(
        [8, 3], num_blocks=60, max_model_len=120, num_host_blocks=60, host_caching=True, num_disk_blocks=400
    )
    first, prompt = Driver(settings), tuple(range(9000, 9030))
    prefill(first, request("turn1", prompt, max_tokens=60, eos_token_ids=frozenset()))
    while first.spill():
        pass
    second = Driver(settings)
    second.slots = first.slots
    index = first.scheduler.tiers.stores["disk"]
    second.scheduler.tiers.restore("disk", list(index._block_of.items()))
    second.add(request("turn2", (*prompt[:28], 7, 8, 9, 10, 11)))
    assert second.scheduler.has_parked
    second.transfer()
    second.drain()
    assert second.prompts["turn2", 0].num_cached_tokens == 28
    assert second.scheduler.stats.prefix_hits["disk"] == 28
    second.check_streams()


@pytest.mark.parametrize("num_steps", range(2, 30))
def test_a_rollback_owes_no_more_than_it_frees(num_steps: int) -> None:
    driver = Driver(windowed([17, 1], num_blocks=42, max_num_batched_tokens=30), depth=3)
    for index in range(3):
        driver.add(request(f"{index}", tuple(range(index, index + 10)), max_tokens=25, eos_token_ids=frozenset()))
    for _ in range(num_steps):
        driver.step()
    driver.run_out_of_memory()
    kv = driver.scheduler.kv
    assert kv.pool.num_available >= kv.pool.num_owed
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("has_full", [False, True])
def test_a_copied_tail_that_was_rolled_back_is_computed_again(has_full: bool) -> None:
    """The first group has no blocks in a model without full attention."""
    driver = Driver(config(windows=(2,), has_full=has_full, enable_prefix_caching=False, num_blocks=30))
    driver.add(request("n", (0,), n=2, max_tokens=2, eos_token_ids=frozenset()))
    driver.step()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize(("num_blocks", "num_together"), [(38, 1), (44, 1), (45, 2)])
def test_a_prompt_is_admitted_once_its_windows_have_room_beside_all_others(num_blocks: int, num_together: int) -> None:
    """Their full attention has room earlier, and one of them would be preempted for the other's window."""
    driver, most = Driver(windowed([20], num_blocks=num_blocks, max_num_batched_tokens=64)), 0
    for index in range(2):
        driver.add(request(f"{index}", tuple(range(index, index + 58)), max_tokens=4, eos_token_ids=frozenset()))
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(driver.scheduler.running))
    assert (most, sum(driver.scheduler.stats.preempted.values())) == (num_together, 0)
    driver.check_streams()


def test_a_chunk_takes_no_blocks_that_are_kept_for_another_prompt_s_window() -> None:
    """Else one of two prompts that were computed together would be preempted for the other."""
    driver = Driver(windowed([9], num_blocks=32, max_num_batched_tokens=24), depth=1)
    for index, (first, length, most) in enumerate(((49, 37, 3), (93, 38, 4), (29, 44, 1), (0, 45, 4))):
        driver.add(request(f"{index}", tuple(range(first, first + length)), max_tokens=most, eos_token_ids=frozenset()))
        if index == 2:
            driver.step()
            driver.step()
            driver.run_out_of_memory()
    driver.drain()
    assert not sum(driver.scheduler.stats.preempted.values())
    driver.check_streams()


def test_a_prompt_that_waits_for_another_s_window_is_preempted() -> None:
    """The window of the first slides past blocks that the second still reads, so that they do not become free."""
    driver = Driver(config(windows=(41,), num_blocks=36, max_num_batched_tokens=6, max_model_len=80))
    shared = tuple(range(1, 29))
    driver.add(request("before", (*shared, 49), max_tokens=1))
    driver.drain()
    driver.add(request("long", (*shared, *range(10, 47)), max_tokens=3))
    driver.step()
    driver.add(request("short", (*shared, *range(30, 37)), max_tokens=3, n=2))
    driver.drain()
    assert driver.scheduler.stats.num_preempted == 0
    assert sum(driver.scheduler.stats.preempted.values()) > 0
    driver.check_streams()
