"""Groups with recurrent state: histories over random mixtures of groups, and what is kept, found and given back.

FakeRunner asserts in every step that each state it reads is of the position where the slice begins, and that no row writes
what another one reads, so a history that runs to its end proves that each state was read where it belongs.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, NeverFitsError
from engine.core.kv import groups
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import name_block
from engine.core.kv.snapshots import RecurrentGroup
from engine.core.step import StepPlan
from engine.core.types import AbortCause, BeamParams, Pin
from loadtest.fake_runner import FakeRunner
from tests.pure.driver import EOS, VOCAB, Driver, config, request
from tests.pure.test_kv_groups import check_findable, check_footprint
from tests.pure.test_scheduler_properties import SchedulerMachine

WINDOWS = st.lists(st.sampled_from([1, 2, 4, 5, 9, 17]), max_size=2)
END = frozenset[int]()


def stateful(**changes: bool | str | float | None) -> SchedulerConfig:
    """A small engine whose sequences have a state of two blocks."""
    return config(**{"state_blocks": 2, "num_blocks": 80, "max_model_len": 200} | changes)


def group_of(driver: Driver) -> RecurrentGroup:
    group = driver.scheduler.kv._recurrent
    assert group is not None
    return group


def check_held(driver: Driver) -> None:
    """What a step in flight reads or writes is held, and what a sequence writes has no name."""
    pool, group = driver.scheduler.kv.pool, group_of(driver)
    for step in driver.scheduler._in_flight:
        assert all(pool.is_held(block) for move in step.states for block in (*move.read, *move.written, *move.midway))
    for seq in driver.scheduler.running:
        if not seq.kv.state.is_shared:
            assert not any(group.content(block) for block in seq.kv.state.slot), "a live slot has a name"


class StateMachine(SchedulerMachine):
    """The histories of test_scheduler_properties.py, aborts, beams and rollbacks included, with windows, states or both."""

    @initialize(
        depth=st.integers(0, 3),
        windows=WINDOWS,
        has_full=st.booleans(),
        state_blocks=st.integers(0, 3),
        writes_midway=st.booleans(),
        num_blocks=st.integers(18, 60),
        tiers=st.sampled_from(
            [(0, 0, False), (8, 0, False), (40, 0, False), (8, 0, True), (40, 0, True), (30, 80, True)]
        ),
        budget=st.integers(6, 30),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "fair"]),
        pinned_share=st.sampled_from([0.0, 0.3]),
        num_speculative_tokens=st.sampled_from([0, 1, 4]),
    )
    def start(  # type: ignore[override]
        self,
        depth: int,
        windows: list[int],
        has_full: bool,
        budget: int,
        caching: bool,
        tiers: tuple[int, int, bool],
        **changes: str | float | None,
    ) -> None:
        num_host_blocks, num_disk_blocks, host_caching = tiers if has_full else (0, 0, False)
        if caching:
            changes |= {"host_caching": host_caching, "num_disk_blocks": num_disk_blocks}
        changes["num_host_blocks"] = num_host_blocks
        if not (has_full or windows):
            changes["state_blocks"] = 1
        changes["num_speculative_tokens"] = 0 if depth else changes["num_speculative_tokens"]
        sizes = {
            "has_full": has_full,
            "max_num_batched_tokens": budget,
            "enable_prefix_caching": caching,
            "max_model_len": 40,
        }
        self.driver = Driver(config(windows=tuple(windows), **sizes, **changes), depth)  # type: ignore[arg-type]
        self.aborted: set[str] = set()
        add = self.driver.add

        def add_if_it_fits(asked: object) -> None:
            with suppress(NeverFitsError):
                add(asked)  # type: ignore[arg-type]

        self.driver.add = add_if_it_fits  # type: ignore[method-assign, assignment]

    @invariant()
    def books_of_groups_agree(self) -> None:
        if hasattr(self, "driver"):
            check_footprint(self.driver)
            check_findable(self.driver)
            if self.driver.scheduler.config.state_blocks:
                check_held(self.driver)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "driver"):
            assert self.driver.scheduler.kv.pool.num_held == self.driver.scheduler.kv.pool.num_owed == 0


StateMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestStateMachine = StateMachine.TestCase


def run(driver: Driver, name: str, prompt: tuple[int, ...], **changes: object) -> int:
    """Run a request to its end; returns how many positions it was admitted with."""
    driver.add(request(name, prompt, **{"eos_token_ids": END, "max_tokens": 2} | changes))
    while driver.scheduler.has_work:
        driver.step()
        check_held(driver)
    return driver.prompts[name, 0].num_cached_tokens


PROMPT = tuple(range(30))


@pytest.mark.parametrize("state_blocks", [0, 2])
def test_a_model_without_attention_holds_its_states_alone(state_blocks: int) -> None:
    """A pool of twenty blocks, which has no room for K/V of these prompts."""
    driver = Driver(stateful(state_blocks=state_blocks, has_full=False, num_blocks=20))
    driver.add(request("a", tuple(range(60)), eos_token_ids=END, max_tokens=30, n=2, temperature=1.0))
    driver.add(request("b", tuple(range(70)), eos_token_ids=END, max_tokens=30))
    driver.drain()
    driver.check_streams()
    driver.add(request("c", tuple(range(70)), eos_token_ids=END, max_tokens=2))
    driver.drain()
    assert driver.prompts["c", 0].num_cached_tokens == 68
    assert [kind for kind, _ in driver.scheduler.kv.groups] == ["recurrent"] * (state_blocks > 0)
    with pytest.raises(ConfigError, match="nothing is kept below the pool"):
        stateful(has_full=False, num_host_blocks=8)


def test_a_prompt_is_resumed_at_its_last_boundaries() -> None:
    driver = Driver(stateful())
    assert run(driver, "first", PROMPT) == 0
    assert run(driver, "again", PROMPT) == 28
    assert run(driver, "longer", (*PROMPT[:28], 7, 8, 9)) == 28
    driver.check_streams()


@pytest.mark.parametrize(("changes", "ends"), [({}, [28, 32]), ({"writes_midway": True}, [32])])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_of_whole_blocks_has_two_boundaries(
    depth: int, changes: dict[str, bool], ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of an equal prompt is computed, so that one resumes a block earlier than a longer one.

    A chunk ends at the first, unless the runner writes the state there midway.
    """
    driver = Driver(stateful(max_num_batched_tokens=40, **changes), depth)
    prompt, plans, launch = tuple(range(32)), list[StepPlan](), driver.runner.run
    monkeypatch.setattr(driver.runner, "run", lambda plan: (plans.append(plan), launch(plan))[1])
    run(driver, "first", prompt)
    assert [chunk.start + chunk.num_tokens for plan in plans for chunk in plan.chunks] == ends
    assert run(driver, "again", prompt) == 28
    assert run(driver, "longer", (*prompt, 7)) == 32
    driver.check_streams()


def test_a_chunk_that_is_rolled_back_leaves_no_snapshot_midway() -> None:
    driver = Driver(stateful(max_num_batched_tokens=40, writes_midway=True), depth=1)
    prompt = tuple(range(32))
    driver.add(request("a", prompt))
    driver.step()
    driver.run_out_of_memory()
    assert not group_of(driver).has(named(driver, prompt[:28]))
    driver.drain()
    assert group_of(driver).has(named(driver, prompt[:28]))
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", range(6, 16))
def test_an_answer_is_resumed_at_the_last_boundary_it_passed(depth: int, num_tokens: int) -> None:
    """With overlap its end is known a step or two late, and its slot has gone on."""
    driver = Driver(stateful(), depth)
    run(driver, "turn1", PROMPT, max_tokens=num_tokens)
    said = tuple(driver.streams["turn1", 0])
    # The state behind the last computed position is the sequence's own slot, which is never given a name.
    boundary = (len(PROMPT) + num_tokens - 2) // 4 * 4
    assert run(driver, "turn2", (*PROMPT, *said, 1, 2, 3)) == boundary
    driver.check_streams()


def test_an_end_that_is_known_late_names_no_slot_that_has_gone_on() -> None:
    driver = Driver(stateful(), depth=1)
    for seed in range(20):
        prompt = tuple(range(seed, seed + 13))
        run(driver, f"{seed}", prompt, seed=seed, temperature=1.0, max_tokens=30, eos_token_ids=frozenset([EOS, 8, 9]))
        said = tuple(driver.streams[f"{seed}", 0])
        run(driver, f"{seed} next", (*prompt, *said, 1, 2, 3))
    driver.check_streams()


@pytest.mark.parametrize("num_steps", range(2, 14))
def test_an_abort_in_flight_publishes_no_live_slot(num_steps: int) -> None:
    """`retire` publishes while a step is in flight."""
    driver = Driver(stateful(), depth=1)
    driver.add(request("a", PROMPT, max_tokens=40, eos_token_ids=END))
    for _ in range(num_steps):
        driver.step()
    driver.take(driver.scheduler.abort("a", AbortCause.DISCONNECT, driver.now))
    assert driver.launched
    said = tuple(driver.streams.get(("a", 0), ()))
    check_held(driver)
    run(driver, "b", (*PROMPT, *said, 5))
    driver.check_streams({"a"})


def test_a_branch_is_kept_the_second_time_it_is_seen() -> None:
    driver = Driver(stateful())
    common = tuple(range(50, 67))
    assert [run(driver, f"{index}", (*common, *[index] * 10)) for index in range(3)] == [0, 0, 16]
    driver.check_streams()


def talk(driver: Driver, turns: range, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], tuple[int, ...]]:
    """Run turns that drop the last one's answer, and open with 90, 91; returns what was found, and the last history."""
    found = []
    for turn in turns:
        found.append(run(driver, f"turn {turn}", (*prompt, 90, 91), turn_end=len(prompt), max_tokens=7))
        prompt += (90, 1000 + turn, 1001, 1002, 1003, 1004)
    return found, prompt


@pytest.mark.parametrize("length", range(28, 32))
def test_a_turn_is_resumed_before_what_opens_the_answer(length: int) -> None:
    """Whatever the answer is in the next prompt, and wherever the opening stands in its block."""
    driver = Driver(stateful(num_blocks=200))
    found, _ = talk(driver, range(3), tuple(range(100, 100 + length)))
    assert found == [0, length // 4 * 4, (length + 6) // 4 * 4]
    driver.check_streams()


def test_a_conversation_keeps_its_last_snapshot() -> None:
    driver = Driver(tiered(num_blocks=200, num_disk_blocks=400))
    group, pool = group_of(driver), driver.scheduler.kv.pool
    _, prompt = talk(driver, range(1))
    while driver.spill():
        pass
    disk = driver.scheduler.tiers.stores["disk"]
    assert disk.num_findable == 9 + 2 + 2, "keys and values, and two snapshots: before the opening, and the answer's"
    _, prompt = talk(driver, range(1, 4), prompt)
    assert len(disk.pool._passed) == 2, "it is evicted first below the pool, too"
    names = driver.scheduler.kv.first_names(request("names"))
    for index in range(len(prompt) // 4):
        name_block(names, prompt, index, 4)
    kept = [at for at in range(1, len(names)) if group.has(names[at])]
    assert kept == [7, 9, 10, 12], "36, 42 and 48 tokens precede the last three answers"
    passed = [at for at in kept if pool._passed.keys() >= set(group.blocks_of(names[at]))]
    assert passed == [7, 9, 10], "the next turn has its own"
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pool_without_room_keeps_snapshots_in_host_memory(depth: int) -> None:
    """With overlap the step before may still fail."""
    driver = Driver(tiered(num_blocks=17, max_model_len=60), depth)
    found, _ = talk(driver, range(3))
    assert found == ([0, 0, 0] if depth else [0, 28, 36])
    driver.check_streams()


def test_a_snapshot_that_two_prompts_leave_stays() -> None:
    driver = Driver(stateful(num_blocks=200, max_num_batched_tokens=60))
    talk(driver, range(1))
    for other in range(3):
        assert run(driver, f"{other}", (*PROMPT[:28], *[500 + other] * 9, 90, 91), turn_end=37) == 28
    assert not driver.scheduler.kv.pool._passed.keys() & set(group_of(driver).blocks_of(named(driver, PROMPT[:28])))
    driver.check_streams()


def named(driver: Driver, tokens: tuple[int, ...]) -> bytes:
    names = driver.scheduler.kv.first_names(request("names"))
    for index in range(len(tokens) // 4):
        name_block(names, tokens, index, 4)
    return names[-1]


def test_long_prompts_are_kept_every_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "EVERY", 5)
    driver = Driver(stateful())
    prompt = tuple(range(90))
    run(driver, "first", prompt)
    assert run(driver, "branch", (*prompt[:71], 1, 2, 3)) == 64, "every eight blocks: a state takes two"
    driver.check_streams()


def test_the_longest_boundary_from_which_every_group_can_resume() -> None:
    driver = Driver(stateful(windows=(8,), num_blocks=160))
    run(driver, "first", PROMPT, max_tokens=20)
    said = tuple(driver.streams["first", 0])
    whole = (*PROMPT, *said)
    names = driver.scheduler.kv.first_names(request("names", whole))
    driver.scheduler.kv._cache.match(names, whole, 48)
    group, window = group_of(driver), driver.scheduler.kv._windows[0]
    assert group.resumable(names, 12, lambda _: False) == 12
    window.drop(names[12])
    assert run(driver, "no window", (*whole[:48], 1)) == 44
    window.drop(names[12])
    group.drop(names[11])
    assert run(driver, "no state", (*whole[:48], 2)) == 40
    window.drop(names[12])
    group.drop(names[11])
    window.drop(names[9])
    assert run(driver, "neither", (*whole[:48], 3)) == 32, "positions 36 and 40 read block 8"
    driver.check_streams()


@pytest.mark.parametrize("num_tokens", range(2, 14))
def test_a_rolled_back_sequence_resumes_from_its_last_snapshot(num_tokens: int) -> None:
    """What the steps in flight wrote at a boundary has no name: they may have written anything."""
    driver = Driver(stateful(), depth=1)
    driver.add(request("a", PROMPT, max_tokens=20, eos_token_ids=END))
    while len(driver.streams.get(("a", 0), ())) < num_tokens:
        driver.step()
    driver.run_out_of_memory()
    (seq,) = driver.scheduler._queue.waiting
    assert seq.is_resuming
    assert seq.kv.ticket is None
    driver.step()
    assert driver.scheduler.running == [seq]
    assert seq.kv.num_published == (len(PROMPT) + num_tokens - 1) // 4
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_steps", range(3, 20))
def test_a_ticket_has_the_state_of_its_last_position(num_steps: int, caching: bool) -> None:
    driver = Driver(stateful(num_host_blocks=60, enable_prefix_caching=caching), depth=1)
    driver.add(request("a", PROMPT, max_tokens=20, eos_token_ids=END))
    for _ in range(num_steps):
        driver.step()
    (seq,) = driver.scheduler.running
    driver.scheduler._output.preempt(seq)
    driver.commit()
    ticket = seq.kv.ticket
    assert ticket is not None
    assert ticket.num_tokens == seq.kv.num_saved > 0
    assert [len(slot) for slot in ticket.others] == [2]
    driver.drain()
    assert all(driver.scheduler.stats.swapped_blocks.values())
    driver.check_streams()


def test_a_ticket_that_lost_a_block_has_no_state() -> None:
    """A ticket's K/V may hold more positions than its number says; a state is of one position."""
    driver = Driver(stateful(num_host_blocks=60))
    driver.add(request("a", PROMPT, max_tokens=20, eos_token_ids=END))
    for _ in range(8):
        driver.step()
    (seq,) = driver.scheduler.running
    driver.scheduler._output.preempt(seq)
    host = driver.scheduler.tiers.host
    assert seq.kv.ticket is not None
    host._lose(seq.kv.ticket.blocks[4])
    assert seq.kv.ticket.num_tokens == 0
    driver.drain()
    driver.check_streams()


def test_forks_have_a_slot_each_from_admission_on() -> None:
    num = 4
    driver = Driver(stateful(num_blocks=12 + 2 * (num + 2), max_model_len=40))
    driver.add(request("other", (1, 2, 3), max_tokens=30, eos_token_ids=END))
    driver.step()
    driver.add(request("n", tuple(range(9)), n=num, max_tokens=6, eos_token_ids=END, temperature=1.0))
    driver.step()
    seq = next(seq for seq in driver.scheduler.running if seq.request_id == "n")
    held = [block for slot in seq.kv.state.tables for block in slot]
    assert len(held) + seq.kv.num_owed == 2 * (num + 1), "the prompt's, and one for each answer"
    driver.drain()
    assert not any(driver.scheduler.stats.preempted.values())
    driver.check_streams()


def test_forks_that_no_pool_can_hold_are_refused() -> None:
    driver = Driver(stateful(num_blocks=19))
    with pytest.raises(NeverFitsError, match="needs up to"):
        driver.add(request("n", tuple(range(9)), n=6, max_tokens=6))


def test_a_search_that_no_pool_of_windows_can_hold_is_refused() -> None:
    """Without full attention its beams share no blocks of the prompt."""
    driver = Driver(stateful(windows=(4,), has_full=False, num_blocks=22))
    with pytest.raises(NeverFitsError, match="needs up to 46 KV blocks"):
        driver.add(request("b", tuple(range(22)), beam=BeamParams(width=6), max_tokens=14))


def test_beams_write_fresh_slots_wherever_they_go_on() -> None:
    driver = Driver(stateful(num_blocks=120))
    for index in range(6):
        beam = BeamParams(width=4, length_penalty=1.0)
        driver.add(request(f"{index}", (index, 2, 3, 4, 5), beam=beam, n=2, max_tokens=9, eos_token_ids=END))
    while driver.scheduler.has_work:
        driver.step()
        check_held(driver)
    driver.check_streams()


@pytest.mark.parametrize("num_steps", range(6, 14))
def test_beams_leave_snapshots_that_others_named(num_steps: int) -> None:
    """A beam that is left out of the cache has no names itself."""
    driver = Driver(stateful(state_blocks=1, has_full=False, num_blocks=18, max_model_len=40, max_num_batched_tokens=6))
    beam = BeamParams(width=6, length_penalty=1.0)
    driver.add(request("beams", (0, 33), beam=beam, n=3, max_tokens=7, eos_token_ids=END, is_background=True))
    for _ in range(num_steps):
        driver.step()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


def test_what_an_answer_has_passed_is_evicted_first() -> None:
    driver = Driver(stateful(num_blocks=40))
    run(driver, "prompt", PROMPT)
    run(driver, "answer", (40, 41, 42), max_tokens=60)
    assert run(driver, "again", PROMPT) == 28, "an answer's own snapshots made room for each other"
    driver.check_streams()


def test_a_snapshot_is_whole_or_gone() -> None:
    driver = Driver(stateful(state_blocks=3))
    run(driver, "a", PROMPT)
    group, pool = group_of(driver), driver.scheduler.kv.pool
    names = [name[:32] for name in group._block_of]
    slot, taken = group.blocks_of(names[-1]), list[int]()
    pool.weigh(slot, 0.1)
    for block in slot:  # K/V would go before it, and it with that
        pool.fork(block)
    pool.free(*slot)
    while group.has(names[-1]):
        taken.append(pool.alloc())
    assert len(set(slot).intersection(taken)) == 1
    assert not any(group.content(block) for block in slot), "the rest is free"
    pool.free(*taken)
    run(driver, "b", PROMPT)
    driver.check_streams()


def test_pinned_prefixes_keep_their_state() -> None:
    driver = Driver(stateful(pinned_share=0.5, num_blocks=60))
    run(driver, "pinned", PROMPT, pins=(Pin(16, 1000.0),))
    for index in range(8):
        run(driver, f"other{index}", tuple(range(100 * index, 100 * index + 40)), max_tokens=20)
    assert run(driver, "again", (*PROMPT[:18], 1)) == 16
    driver.check_streams()


def test_a_prefix_is_pinned_whose_conversation_has_gone_on() -> None:
    """Its snapshot would be evicted first, here and below."""
    driver = Driver(tiered(num_blocks=200, num_disk_blocks=400, pinned_share=0.5))
    _, prompt = talk(driver, range(2))
    names = driver.scheduler.kv.first_names(request("names"))
    name_block(names, prompt, 6, 4)
    passed = set(group_of(driver).blocks_of(names[7]))
    assert passed <= driver.scheduler.kv.pool._passed.keys()
    run(driver, "pinned", (*prompt, 90, 91), turn_end=len(prompt), pins=(Pin(28, 1000.0),))
    for index in range(12):
        run(driver, f"other{index}", tuple(range(100 * index, 100 * index + 60)), max_tokens=20)
    assert run(driver, "again", (*PROMPT[:28], 1, 2)) == 28
    driver.check_streams()


def crowd(driver: Driver, first: int = 0) -> None:
    """Fill the pool several times with prompts that no request continues."""
    for index in range(first, first + 8):
        run(driver, f"other{index}", tuple(range(100 * index, 100 * index + 60)))


def tiered(**changes: bool | str | float | None) -> SchedulerConfig:
    return stateful(**{"num_host_blocks": 1000, "host_caching": True} | changes)


@pytest.mark.parametrize("windows", [(), (5,)])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_turn_finds_its_state_in_host_memory(depth: int, windows: tuple[int, ...]) -> None:
    driver = Driver(tiered(windows=windows), depth)
    prompt = tuple(range(9000, 9030))
    run(driver, "turn1", prompt, max_tokens=20)
    crowd(driver)
    group = group_of(driver)
    assert not any(group.has(name[:32]) for name in driver.scheduler.tiers.host._block_of if len(name) > 32)
    assert run(driver, "turn2", (*prompt[:28], 7, 8, 9, 10, 11)) == 28
    said = driver.streams["turn1", 0]
    crowd(driver, 8)
    assert run(driver, "turn3", (*prompt, *said, 7, 8, 9)) == 48, "the end of the answer: 49 positions were computed"
    assert driver.scheduler.stats.prefix_hits["host"] == 28 + 48
    assert run(driver, "again", (*prompt, *said, 1)) == 48, "it is a snapshot of the pool again"
    driver.check_streams()


@pytest.mark.parametrize("lost", ["a part of the state", "its other part", "keys and values before it"])
def test_a_state_below_is_nothing_unless_all_that_belongs_to_it_is_there(lost: str) -> None:
    driver = Driver(tiered())
    prompt, names = tuple(range(9000, 9030)), driver.scheduler.kv.first_names(request("names"))
    run(driver, "turn1", prompt)
    for index in range(7):
        name_block(names, prompt, index, 4)
    crowd(driver)
    first, second = group_of(driver).names(names[7])
    gone = {"a part of the state": first, "its other part": second, "keys and values before it": names[3]}
    driver.scheduler.tiers.host.drop(gone[lost])
    assert run(driver, "turn2", (*prompt[:28], 7, 8)) == 0
    driver.check_streams()


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_state_that_did_not_arrive_is_no_snapshot(num_steps: int) -> None:
    driver = Driver(tiered(), depth=1)
    prompt = tuple(range(9000, 9030))
    run(driver, "turn1", prompt)
    crowd(driver)
    driver.add(request("turn2", (*prompt[:28], 7, 8, 9, 10, 11), max_tokens=9, eos_token_ids=END))
    for _ in range(num_steps):
        driver.launch()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("loses", [0, 1, 9])
def test_a_daemon_that_starts_again_finds_states_on_the_disk(loses: int) -> None:
    """Host memory loses them so many times while the prompt waits for room, and what came later waits behind it."""
    settings_ = tiered(num_host_blocks=80, num_disk_blocks=400)
    first, prompt = Driver(settings_), tuple(range(9000, 9030))
    run(first, "turn1", prompt, max_tokens=20)
    while first.spill():
        pass
    second = Driver(settings_)
    second.slots = first.slots
    second.scheduler.tiers.restore("disk", list(first.scheduler.tiers.stores["disk"]._block_of.items()))
    second.add(request("turn2", (*prompt[:28], 7, 8, 9, 10, 11)))
    assert second.scheduler.has_parked
    (seq,) = second.scheduler._queue.waiting
    assert second.scheduler.kv.lookup(seq) == 28, "a state is no position"
    second.transfer()
    second.add(request("later", (3, 4, 5)))
    host, finds = second.scheduler.tiers.host, loses < 9
    while second.scheduler.has_work:
        if loses and not second.launched:
            loses -= 1
            for name in list(host._block_of):
                host.drop(name)
            second.launch()
            assert not (second.scheduler.has_parked and second.launch()), "the later one is admitted first"
        second.step()
    assert second.prompts["turn2", 0].num_cached_tokens == 28 * finds, "a prompt does not wait for ever"
    assert second.scheduler.stats.prefix_hits["disk"] == 28 * finds
    second.check_streams()


def test_a_snapshot_goes_to_the_disk_as_a_whole() -> None:
    """Host memory may lose the rest before the next turn of the loop."""
    driver = Driver(tiered(state_blocks=30, num_blocks=200, num_disk_blocks=400))
    run(driver, "turn1", PROMPT)
    assert driver.spill() == 7 + 30
    assert not driver.spill()


def test_snapshots_are_counted_with_the_groups() -> None:
    driver = Driver(stateful(windows=(4,)))
    run(driver, "a", PROMPT)
    stats = driver.scheduler.stats
    assert stats.findable_blocks.keys() == {"full", "window 4", "recurrent"}
    assert stats.findable_blocks["recurrent"] == 2, "one snapshot of two blocks"
    assert sum(stats.findable_blocks.values()) == stats.blocks_cached


@pytest.mark.parametrize("num_tokens", range(6, 20))
def test_drafts_that_are_accepted_reach_the_state_in_the_next_step(num_tokens: int) -> None:
    driver = Driver(stateful(num_speculative_tokens=3))
    run(driver, "turn1", PROMPT, max_tokens=num_tokens)
    assert driver.scheduler.stats.spec_accepted_tokens
    said = tuple(driver.streams["turn1", 0])
    # A step begins at each boundary, and the last token of an answer is never fed back.
    boundary = (len(PROMPT) + num_tokens - 2) // 4 * 4
    assert run(driver, "turn2", (*PROMPT, *said, 1, 2, 3)) == boundary
    driver.check_streams()


@pytest.mark.parametrize("windows", [(), (5,)])
@pytest.mark.parametrize("num_steps", range(4, 11))
def test_a_sequence_is_preempted_before_its_accepted_drafts(num_steps: int, windows: tuple[int, ...]) -> None:
    """A ticket's state is one of fewer positions than its blocks."""
    driver = Driver(stateful(num_speculative_tokens=3, num_host_blocks=60, windows=windows))
    driver.add(request("a", PROMPT, max_tokens=20, eos_token_ids=END))
    for _ in range(num_steps):
        driver.step()
    (seq,) = driver.scheduler._queue.requests["a"]
    num_computed, num_behind = seq.num_computed, seq.kv.state.num_behind
    driver.scheduler._output.preempt(seq)
    if windows and num_behind:
        assert seq.kv.ticket is None, "its windows may have passed what it computes again"
    else:
        assert seq.kv.ticket is not None
        assert seq.kv.ticket.num_tokens == num_computed - num_behind
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("num_tokens", range(2, 9))
def test_a_slot_that_lacks_its_drafts_is_no_snapshot_yet(num_tokens: int) -> None:
    """Its step may be rolled back before it has taken them in."""
    driver = Driver(stateful(num_speculative_tokens=3))
    driver.add(request("a", PROMPT, max_tokens=20, eos_token_ids=END))
    while len(driver.streams.get(("a", 0), ())) < num_tokens:
        driver.step()
    while driver.scheduler.has_work and not (driver.launch() and driver.launched[-1][0].replays):
        driver.commit()
    driver.run_out_of_memory()
    driver.drain()
    driver.check_streams()


def test_a_draft_that_cannot_be_computed_loses_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The position is computed again, but the state has it."""
    driver = Driver(stateful(num_speculative_tokens=3, num_host_blocks=60))
    draw = driver.runner._draw_drafted
    monkeypatch.setattr(driver.runner, "_draw_drafted", lambda piece, *args: draw(piece, *args)._replace(token_ids=[]))
    run(driver, "a", PROMPT, max_tokens=9)
    assert driver.scheduler.stats.preempted
    driver.check_streams()


def test_beams_that_swap_read_each_other_and_write_fresh_slots() -> None:
    driver = Driver(stateful(num_blocks=120))
    driver.add(request("n", (1, 2, 3), n=3, max_tokens=20, eos_token_ids=END, temperature=1.0))
    for _ in range(3):
        driver.step()
    a, b, c = driver.scheduler.running
    before = {seq: list(seq.kv.state.slot) for seq in (a, b)}
    for number, (seq, other) in enumerate(((c, a), (a, b), (b, c)), start=1000):
        driver.scheduler.kv.reassign(seq, other, number)
        seq.fast_path_until = other.fast_path_until = 0
    assert (a.kv.state.slot, b.kv.state.slot) == (before[b], before[a])
    driver.launch()
    moves = {move.slot: move for move in driver.launched[-1][0].states}
    assert moves[a.slot].read == tuple(before[b])
    assert moves[b.slot].read == moves[c.slot].read == tuple(before[a])
    written = [block for move in moves.values() for block in move.written]
    assert len(set(written)) == 6
    assert not {block for move in moves.values() for block in move.read}.intersection(written)
    driver.drain()


@pytest.mark.parametrize(("windows", "num_blocks"), [((), 15), ((5, 1), 23)])
def test_a_search_starts_again_in_a_pool_that_just_holds_it(windows: tuple[int, ...], num_blocks: int) -> None:
    """Its headroom has the blocks of all groups, some of which are owed to it as well."""
    driver = Driver(stateful(windows=windows, num_blocks=num_blocks), depth=1)
    driver.add(request("a", tuple(range(5)), beam=BeamParams(width=2), max_tokens=2, eos_token_ids=END))
    for _ in range(4):
        driver.step()
    driver.scheduler._output.preempt(driver.scheduler.running[0])
    driver.drain()
    driver.check_streams()


def share_found(num_blocks: int, seed: int) -> float:
    """Chats whose turns are short, and documents that are asked about again: the share of their tokens that is found."""
    settings_ = stateful(state_blocks=16, num_blocks=num_blocks, max_model_len=400, max_num_batched_tokens=200)
    driver, rng, found = Driver(settings_), Random(seed), 0
    driver.runner = FakeRunner(settings_, vocab_size=VOCAB, memory=False)
    chats = {each: tuple(range(1000 * each, 1000 * each + 20)) for each in range(4)}
    for turn in range(150):
        own = tuple(rng.randrange(50) for _ in range(6))
        if is_chat := rng.random() < 0.5:
            each = rng.randrange(4)
            prompt = (*(chats[each] if len(chats[each]) < 200 else chats[each][:20]), *own)
        else:
            start = 5000 + 200 * rng.randrange(3)
            prompt = (*range(start, start + 100), *own)
        found += run(driver, f"{turn}", prompt, max_tokens=4)
        if is_chat:
            chats[each] = (*prompt, *driver.streams[f"{turn}", 0])
    return found / sum(len(asked.prompt) for asked in driver.requests.values())


@pytest.mark.parametrize("num_blocks", [200, 320])
def test_snapshots_are_evicted_by_what_they_save_a_byte(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = [share_found(num_blocks, seed) for seed in range(2)]
    monkeypatch.setattr(BlockPool, "weigh", lambda *_: None)
    by_age = [share_found(num_blocks, seed) for seed in range(2)]
    assert all(a > 1.1 * b for a, b in zip(weighed, by_age, strict=True)), (weighed, by_age)


def test_slots_are_given_back_whatever_else_a_step_reports() -> None:
    """The commit of plain tokens takes a short way, which passed by those that a fork has left."""
    found = []
    for logprobs in (None, 2):
        driver, available = Driver(stateful()), list[int]()
        driver.add(request("a", tuple(range(10)), n=3, max_tokens=30, logprobs=logprobs))
        while driver.scheduler.has_work:
            driver.launch()
            driver.commit()
            available.append(driver.scheduler.kv.pool.num_available)
        found.append(available)
    assert found[0] == found[1]
