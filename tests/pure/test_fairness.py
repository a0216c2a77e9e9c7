"""The policy `fair`: the theorem's inequality, measured from outside, and what its second rule promises a newcomer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.queues.fair import INPUT_COST, MAX_IDLE_ACCOUNTS, OUTPUT_COST, YIELD_RATIO, FairQueue
from engine.core.rows import SequenceSlice
from engine.core.sequence import Account, Sequence
from engine.core.step import StepPlan
from engine.core.types import AbortCause, TokenEvent
from tests.pure.driver import Driver, config, request

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
ENDLESS = frozenset[int]()  # no end-of-sequence token
LONGEST_PROMPT = LONGEST_ANSWER = 8


class Metered(Driver):
    """Counts what each tenant is served, from plans and events, and knows no counter of the scheduler's."""

    def __init__(self, **changes: int | bool | str) -> None:
        depth = int(changes.pop("depth", 0))
        super().__init__(config(**{"policy": "fair"} | changes), depth)
        self.served: Counter[str] = Counter()
        self.started: set[str] = set()

    def check_plan(self, plan: StepPlan, slices: list[SequenceSlice]) -> None:
        super().check_plan(plan, slices)
        for piece, seq in zip(slices, self.scheduler._in_flight[-1].sequences, strict=True):
            if seq.request_id not in self.started:
                self.started.add(seq.request_id)
                self.served[seq.request.tenant] += INPUT_COST * (piece.num_prompt - piece.start)

    def take(self, events: list[TokenEvent]) -> None:
        super().take(events)
        for event in events:
            self.served[self.requests[event.request_id].tenant] += OUTPUT_COST * len(event.token_ids)

    def waits(self, tenant: str) -> bool:
        """True if a request of the tenant's has never run."""
        return any(self.requests[name].tenant == tenant for name in self.requests.keys() - self.started)

    def lanes(self) -> list[Account]:
        return list(self.scheduler._queue.foreground._lanes)


def bound(driver: Driver) -> float:
    """The theorem's, for weight 1: 2 max(INPUT_COST * L, OUTPUT_COST * M)."""
    batch_tokens = driver.scheduler.config.max_num_seqs * (LONGEST_PROMPT + LONGEST_ANSWER)
    return 2 * max(INPUT_COST * LONGEST_PROMPT, OUTPUT_COST * batch_tokens)


jobs = st.lists(
    st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER)), min_size=1, max_size=4
)  # (prompt, answer), over and over


def add_jobs(driver: Driver, tenant: str, kinds: list[tuple[int, int]], num: int, **changes: object) -> None:
    for i in range(num):
        prompt, answer = kinds[i % len(kinds)]
        ids = (ord(tenant[0]) % 50, i % 50, *range(prompt))[:prompt]
        named = f"{tenant}{len(driver.requests)}"
        driver.add(request(named, ids, max_tokens=answer, arrival_s=driver.now, tenant=tenant, **changes))


def spread(driver: Metered, weights: dict[str, float]) -> float:
    """The most that one of two tenants was served more than the other, in any interval in which both wait throughout."""
    worst = 0.0
    ranges: dict[tuple[str, str], tuple[float, float]] = {}
    while driver.scheduler.has_work:
        waiting = [tenant for tenant in weights if driver.waits(tenant)]
        for f in waiting:
            for g in waiting:
                ahead = driver.served[f] / weights[f] - driver.served[g] / weights[g]
                low, high = ranges.get((f, g), (ahead, ahead))
                ranges[f, g] = min(low, ahead), max(high, ahead)
                worst = max(worst, ranges[f, g][1] - ranges[f, g][0])
        driver.step()
    return worst


@given(jobs, jobs, jobs, st.integers(0, 1), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([9, 24]))
@settings(max_examples=60)
def test_no_waiting_tenant_is_served_more_than_another_by_more_than_the_bound(
    one: list[tuple[int, int]],
    two: list[tuple[int, int]],
    three: list[tuple[int, int]],
    depth: int,
    weight: float,
    num_blocks: int,
) -> None:
    """Whatever they send, in whatever order it came, with or without preemption for want of memory."""
    driver = Metered(max_num_seqs=2, num_blocks=num_blocks, depth=depth)
    add_jobs(driver, "a", one, 24)
    add_jobs(driver, "b", two, 24, weight=weight)
    for _ in range(20):
        driver.step()
    add_jobs(driver, "c", three, 24)
    assert spread(driver, {"a": 1.0, "b": weight, "c": 1.0}) <= bound(driver) / min(weight, 1.0)
    driver.check_streams()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_no_other_policy_keeps_the_bound(policy: str) -> None:
    """So the inequality above says something."""
    driver = Metered(max_num_seqs=2, policy=policy)
    add_jobs(driver, "a", [(2, 8)], 40)
    add_jobs(driver, "b", [(8, 8)], 40)
    assert spread(driver, {"a": 1.0, "b": 1.0}) > bound(driver)


@given(jobs, jobs, st.lists(st.sampled_from("abcd"), max_size=60))
@settings(max_examples=60)
def test_counters_of_those_that_wait_stay_close(
    heavy: list[tuple[int, int]], light: list[tuple[int, int]], comings: list[str]
) -> None:
    """The lemma behind the theorem, under any comings and goings: half the bound, from the least to the most."""
    driver = Metered(max_num_seqs=3, num_blocks=14)
    add_jobs(driver, "a", heavy, 12)
    for tenant in comings:
        add_jobs(driver, tenant, light if tenant != "a" else heavy, 1)
        driver.step()
        counters = [account.served for account in driver.lanes()]
        assert not counters or max(counters) - min(counters) <= bound(driver) / 2
    driver.drain()
    driver.check_streams()


@given(jobs, st.integers(0, 1))
@settings(max_examples=30)
def test_one_tenant_alone_gets_everything(kinds: list[tuple[int, int]], depth: int) -> None:
    """Step by step what it would get if nobody were told apart."""
    drivers = [Metered(policy=policy, depth=depth, max_num_seqs=3) for policy in ("priority", "fair")]
    for driver in drivers:
        add_jobs(driver, "a", kinds, 20)
        driver.drain()
    assert drivers[0].runner.num_steps == drivers[1].runner.num_steps
    assert drivers[0].streams == drivers[1].streams


def test_idleness_earns_no_credit() -> None:
    """After a long absence a tenant gets its part from now on, not what it left to others before."""
    driver = Metered(max_num_seqs=2)
    add_jobs(driver, "b", [(2, 2)], 1)
    driver.drain()
    add_jobs(driver, "a", [(2, 8)], 60)
    for _ in range(100):
        driver.step()
    before = dict(driver.served)
    add_jobs(driver, "b", [(2, 8)], 60)
    for _ in range(100):
        driver.step()
    gained = [driver.served[tenant] - before[tenant] for tenant in "ab"]
    assert abs(gained[0] - gained[1]) <= bound(driver)
    assert min(gained) > bound(driver)


def test_the_first_to_wait_is_level_with_the_last_that_waited() -> None:
    driver = Metered()
    add_jobs(driver, "a", [(8, 8)], 20)
    driver.drain()
    for tenant in "ba":
        add_jobs(driver, tenant, [(2, 2)], 1)
    idle, busy = driver.lanes()
    assert idle.served == busy.served > 0


def test_weights_divide_what_there_is() -> None:
    driver = Metered(max_num_seqs=4, num_blocks=60, max_num_batched_tokens=24)
    add_jobs(driver, "gold", [(4, 8)], 90, weight=3.0)
    add_jobs(driver, "free", [(4, 8)], 90, weight=1.0)
    while driver.waits("gold"):
        driver.step()
    assert driver.served["gold"] / driver.served["free"] == pytest.approx(3.0, rel=0.1)


@DEPTHS
@pytest.mark.parametrize("num_blocks", [24, 80])
def test_a_newcomer_takes_as_many_steps_as_on_an_idle_engine(depth: int, num_blocks: int) -> None:
    """Long answers of another have every slot, or nearly every block."""
    newcomer = request("new", tuple(range(9)), max_tokens=4, eos_token_ids=ENDLESS, tenant="light")
    alone = Metered(depth=depth, max_num_batched_tokens=24)
    alone.add(newcomer)
    alone.drain()
    driver = Metered(depth=depth, num_blocks=num_blocks, max_num_batched_tokens=24)
    for i in range(9):
        driver.add(request(f"g{i}", (i, 1), max_tokens=50, eos_token_ids=ENDLESS, tenant="greedy"))
    for _ in range(12 if num_blocks == 24 else 40):
        driver.step()
    before = driver.runner.num_steps
    driver.add(newcomer)
    while ("new", 0) not in driver.ends:
        driver.step()
    assert driver.runner.num_steps - before <= alone.runner.num_steps + depth + 1
    assert driver.scheduler.stats.yielded
    driver.drain()
    driver.check_streams()


def test_what_is_taken_by_force_stays_below_what_is_left() -> None:
    """A flood takes slots from another flood until it has a third of them, then waits for answers to end."""
    driver = Metered(max_num_seqs=12, max_num_batched_tokens=40, num_blocks=200)
    for i in range(30):
        driver.add(request(f"a{i}", (i, 1), max_tokens=60, eos_token_ids=ENDLESS, tenant="a"))
    driver.step()
    for i in range(30):
        driver.add(request(f"b{i}", (i, 2), max_tokens=60, eos_token_ids=ENDLESS, tenant="b"))
    yields = []
    for _ in range(40):
        driver.step()
        held = Counter(seq.request.tenant for seq in driver.scheduler._queue.running)
        yields.append(driver.scheduler.stats.yielded)
    assert held == {"a": 8, "b": 4}
    assert YIELD_RATIO * held["b"] <= held["a"]
    assert yields[-1] == yields[5] == 4, "and it comes to an end"


def test_one_that_was_served_more_takes_nothing() -> None:
    driver = Metered(max_num_seqs=4)
    add_jobs(driver, "b", [(8, 8)], 1)
    for i in range(4):  # once `b` has ended they have all slots, and none of them waits
        driver.add(request(f"a{i}", (i,), max_tokens=40, eos_token_ids=ENDLESS, tenant="a"))
    driver.step()
    [b] = [seq.account for seq in driver.scheduler._queue.running if seq.request.tenant == "b"]
    while b.num_running:
        driver.step()
    driver.step()
    assert len(driver.scheduler._queue.running) == 4
    b.served += 1000
    add_jobs(driver, "b", [(2, 2)], 1)
    driver.step()
    assert b.num_running == driver.scheduler.stats.yielded == 0


def test_no_more_is_preempted_than_is_of_use() -> None:
    """The newcomer is so long that it would not fit in all that may be taken: nobody is disturbed, it waits."""
    driver = Metered(max_num_seqs=6, num_blocks=24, max_num_batched_tokens=24)
    for i in range(3):
        driver.add(request(f"a{i}", (i, 1, 2), max_tokens=40, eos_token_ids=ENDLESS, tenant="a"))
    for _ in range(24):
        driver.step()
    driver.add(request("b", tuple(range(60)), max_tokens=2, tenant="b"))
    before = driver.scheduler.stats.preemptions
    for _ in range(3):
        driver.step()
    assert driver.scheduler.stats.preemptions == before
    driver.drain()
    driver.check_streams()


def test_what_others_hold_too_is_not_counted_as_freed() -> None:
    """Three answers continue one prompt: whoever is preempted frees the blocks of its own answer alone."""
    driver = Metered(max_num_batched_tokens=24)
    prompt = tuple(range(24))
    for i in range(3):
        driver.add(request(f"a{i}", prompt, max_tokens=40, eos_token_ids=ENDLESS, arrival_s=driver.now, tenant="a"))
        driver.step()
    while driver.scheduler.kv.pool.num_available > 3:
        driver.step()
    driver.add(request("b", tuple(range(1, 46)), max_tokens=2, arrival_s=driver.now, tenant="b"))
    before = driver.scheduler.stats.preemptions
    driver.step()
    assert driver.scheduler.stats.preemptions == before
    driver.drain()
    driver.check_streams()


@pytest.mark.parametrize("depth", [0, 1])
def test_memory_is_taken_from_whoever_holds_most(depth: int) -> None:
    """The light tenant came last; under any other policy it would be the victim."""
    driver = Metered(depth=depth, num_blocks=24)
    for i in range(5):
        driver.add(request(f"a{i}", (i, 1), max_tokens=40, eos_token_ids=ENDLESS, tenant="a"))
    driver.add(request("b", (9, 9), max_tokens=40, eos_token_ids=ENDLESS, tenant="b"))
    while ("b", 0) not in driver.ends:
        driver.step()
    assert driver.scheduler.stats.preemptions
    [timings] = [event.timings for key, event in driver.ends.items() if key[0] == "b"]
    assert timings is not None
    assert timings.num_preemptions == 0
    driver.drain()
    driver.check_streams()


def crowd(num: int, **changes: int) -> Metered:
    """A greedy tenant's long answers, all running."""
    driver = Metered(max_num_seqs=8, max_num_batched_tokens=24, num_blocks=200, **changes)
    for i in range(num):
        driver.add(request(f"g{i}", (i, 1), max_tokens=60, eos_token_ids=ENDLESS, tenant="greedy"))
    for _ in range(6):
        driver.step()
    return driver


def test_in_the_smallest_of_steps_there_is_somebody() -> None:
    """After a want of memory a step may have one token: whoever the others sit out for has to be among those due."""
    driver = crowd(6)
    for _ in range(8):
        driver.run_out_of_memory()
    driver.add(request("new", (1,), max_tokens=9, arrival_s=driver.now, tenant="light"))
    driver.drain()
    driver.check_streams()


def test_a_stream_of_newcomers_stops_nobody() -> None:
    """One in every step: the crowd goes on as soon as the newcomers' tenant was served as much."""
    driver = crowd(4)
    before = driver.served["greedy"]
    for i in range(40):
        driver.add(request(f"n{i}", (i, 3, 5), max_tokens=1, arrival_s=driver.now, tenant="light"))
        driver.step()
    gained = driver.served["greedy"] - before
    assert gained >= driver.served["light"] - INPUT_COST * 3 - OUTPUT_COST


def test_cached_prompts_and_work_done_anew_are_free() -> None:
    driver = Metered(num_blocks=18, max_num_seqs=4)
    prompt = tuple(range(12))
    for i in range(4):
        driver.add(request(f"a{i}", prompt, max_tokens=20, eos_token_ids=ENDLESS, arrival_s=driver.now, tenant="a"))
        driver.step()
    [account] = {seq.account for siblings in driver.scheduler._queue.requests.values() for seq in siblings}
    driver.drain()
    assert driver.scheduler.stats.preemptions
    cached = sum(info.num_cached_tokens for info in driver.prompts.values())
    assert cached
    assert account.served == INPUT_COST * (4 * 12 - cached) + OUTPUT_COST * 4 * 20


def test_every_choice_is_charged() -> None:
    driver = Metered()
    driver.add(request("r", (1, 2, 3), n=3, max_tokens=1, eos_token_ids=ENDLESS, tenant="a"))
    [account] = {seq.account for seq in driver.scheduler._queue.requests["r"]}
    driver.drain()
    assert account.served == INPUT_COST * 3 + OUTPUT_COST * 3


def test_within_a_tenant_priority_decides() -> None:
    driver = Metered(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", -1)):
        driver.add(request(name, max_tokens=2, priority=priority, tenant="t"))
    order = []
    while driver.scheduler.has_work:
        driver.step()
        order += [key[0] for key in driver.ends if key[0] not in order]
    assert order == ["c", "a", "b"]


def test_priority_buys_nothing_from_others() -> None:
    driver = Metered(max_num_seqs=1)
    driver.add(request("first", max_tokens=2, tenant="a"))
    driver.add(request("second", max_tokens=2, priority=-1000, tenant="b"))
    for i in range(10):
        driver.add(request(f"b{i}", max_tokens=2, priority=-1000, tenant="b"))
    for _ in range(12):
        driver.step()
    assert ("first", 0) in driver.ends


@pytest.mark.parametrize(("weight", "order"), [(1.0, "abaabb"), (4.0, "abbaba")])
def test_the_queue_is_shown_as_it_will_be_served(weight: float, order: str) -> None:
    driver = Metered(max_num_seqs=1)
    driver.add(request("running", max_tokens=9, eos_token_ids=ENDLESS, tenant="z"))
    driver.step()
    add_jobs(driver, "a", [(4, 1)], 3)
    add_jobs(driver, "b", [(8, 1)], 3, weight=weight)
    assert "".join(asked[0] for asked in driver.scheduler.snapshot().queue) == order
    assert driver.scheduler._queue.first_waiting is not None
    assert driver.scheduler._queue.first_waiting.request_id[0] == "a"


def test_tenants_that_are_gone_are_forgotten() -> None:
    driver = Metered()
    for i in range(MAX_IDLE_ACCOUNTS + 500):
        driver.add(request(f"r{i}", (1,), max_tokens=1, tenant=f"t{i}"))
        if i % 2:
            driver.scheduler.abort(f"r{i}", AbortCause.DISCONNECT, driver.now)
        driver.step()
    assert len(driver.scheduler._queue.foreground._accounts) <= MAX_IDLE_ACCOUNTS
    driver.drain()


def test_a_tenant_that_runs_is_not_forgotten() -> None:
    driver = Metered()
    driver.add(request("r", max_tokens=40, eos_token_ids=ENDLESS, tenant="runs"))
    driver.step()
    [running] = driver.scheduler._queue.running
    accounts = driver.scheduler._queue.foreground
    for i in range(MAX_IDLE_ACCOUNTS + 1):
        accounts.account(request(tenant=f"t{i}"))
    assert accounts.account(running.request) is running.account
    driver.drain()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 9)), max_size=20))
def test_the_last_place_is_the_last_of_whoever_holds_most(running: list[tuple[str, float]]) -> None:
    accounts = {name: Account() for name in "abc"}
    sequences = []
    for i, (name, key) in enumerate(running):
        accounts[name].weight = 1.0 + (name == "c")
        accounts[name].num_running += 1
        sequences.append(Sequence(request(str(i)), 0, i, key, 4, [b""], accounts[name]))
    FairQueue().arrange(sequences)
    while sequences:
        last = sequences.pop()
        assert last.account.share == max(account.share for account in accounts.values())
        assert all(seq.order < last.order for seq in sequences if seq.account is last.account)
        last.account.num_running -= 1


@pytest.mark.parametrize("num_running", [1, 2, 3])
@pytest.mark.parametrize("is_older", [False, True])
def test_no_two_tenants_that_were_served_alike_preempt_each_other(num_running: int, is_older: bool) -> None:
    """Once the victims wait as well, the sequence that they made room for is the next to be admitted."""
    queue, holder, newcomer = FairQueue(), Account(), Account()
    holder.weight = 0.1
    running = [Sequence(request(f"r{i}"), 0, i, 1.0, 4, [b""], holder) for i in range(num_running)]
    holder.num_running = num_running
    candidate = Sequence(request("new"), 0, 9, 0.0 if is_older else 2.0, 4, [b""], newcomer)
    victims = queue.victims(running, candidate)
    assert bool(victims) == (is_older or num_running > 1)
    queue.push(candidate)
    for victim in victims:
        queue.stopped(victim)
        queue.push(victim)
    assert queue.peek() is candidate
