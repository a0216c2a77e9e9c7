"""Promised deadlines are kept: by the model's own clock whatever else arrives, under every policy; and nobody starves by it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.beam_search import BeamParams
from engine.core.fake_runner import FakeRunner
from engine.core.flight import FREE
from engine.core.forecast import seconds_left, work_of
from engine.core.plan import StepPlan
from engine.core.policies import POLICIES
from engine.core.stats import Target
from engine.core.step_time import Load, decode_load
from engine.core.types import AbortCause, FinishReason
from tests.pure.driver import VOCAB, Driver, config, request

# Seconds of a step: fixed, for the presence of prompts, a decode, its context, a prompt's token, its context.
WEIGHTS = (4e-3, 0.5e-3, 0.5e-3, 1e-6, 0.25e-3, 1e-7)
LIMIT = 64
LONGEST_STEP_S = 0.04  # with overlap a promise may be missed by a step


class Exact:
    """An engine whose steps take what its own model of them says."""

    def __init__(self, depth: int = 0, **changes: str | float | None) -> None:
        sizes = {"num_blocks": 200, "block_size": 4, "max_model_len": 800, "max_num_seqs": 8}
        sizes |= {"max_num_batched_tokens": LIMIT, "enable_prefix_caching": False}
        settings = config(**sizes | changes)  # type: ignore[arg-type]  # checked by the class itself
        self.driver = Driver(settings, depth, cost=self.seconds)
        self.is_fair = settings.policy == "fair"
        self.driver.runner = FakeRunner(settings, vocab_size=VOCAB, memory=False)
        self.times = self.driver.scheduler._pacing.times
        for _ in range(8):
            self.times.learn(Load(1, 1, 1, 1.0), 1.0)
        self.times.weights, self.times.error = list(WEIGHTS), 0.0
        self.started_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.unpromised: set[str] = set()  # as they started

    def seconds(self, plan: StepPlan) -> float:
        flight = self.driver.scheduler._flights[0]
        return self.times.seconds(flight.load if flight.load.num_prompt_tokens else decode_load(flight.slices))

    def add(self, name: str, num_prompt: int, num_tokens: int, **changes: object) -> None:
        known = {"max_tokens": num_tokens, "min_tokens": num_tokens, "arrival_s": self.driver.now}
        self.driver.add(request(name, (1,) * num_prompt, **known | changes))

    def step(self) -> None:
        driver, now = self.driver, self.driver.now
        events = driver.scheduler.drop_hopeless(now)
        assert self.started_s.keys().isdisjoint(event.request_id for event in events), "dropped after its start"
        driver.take(events)
        if driver.scheduler.has_work:
            driver.step()
        for seq in driver.scheduler._roster.running:
            if seq.request_id not in self.started_s and not seq.promised_total:
                self.unpromised.add(seq.request_id)
            self.started_s.setdefault(seq.request_id, now)
        for name, _ in driver.ends:
            self.ended_s.setdefault(name, driver.now)
        self.times.weights = list(WEIGHTS)  # what little was learned from rounding

    def drain(self, most: int = 20_000) -> None:
        while self.driver.scheduler.has_work:
            self.step()
            most -= 1
            assert most, "starved"
        self.driver.scheduler.check_integrity()

    def abort(self, name: str) -> None:
        self.driver.take(self.driver.scheduler.abort(name, AbortCause.DISCONNECT, self.driver.now))

    def check_promises(self, most_late_s: float = 1e-6) -> None:
        """Whoever was started with a deadline and a known length kept it; all others were told why not.

        With `fair` a tenant that has its part already is promised nothing; with overlap a search is not.
        """
        for name, asked in self.driver.requests.items():
            event = self.driver.ends[name, 0]
            is_exempt = asked.is_background or event.finish_reason is FinishReason.ABORT
            if name in self.unpromised:
                is_exempt |= self.is_fair or (self.driver.depth > 0 and asked.params.beam is not None)
            if asked.deadline_s is None:
                assert event.finish_reason is not FinishReason.DROPPED
            elif event.finish_reason is FinishReason.DROPPED:
                assert "The answer cannot be there in time: deadline_ms is" in str(event.error)
            elif asked.params.min_tokens == asked.params.max_tokens and not is_exempt:
                late_s = self.ended_s[name] - asked.arrival_s - asked.deadline_s
                assert late_s < most_late_s, f"{name} was started, and is {late_s} s late"


class Ask(NamedTuple):
    """One request, and how many steps pass before the next."""

    num_prompt: int
    num_tokens: int
    deadline_s: float | None
    is_certain: bool
    n: int
    is_search: bool
    is_background: bool
    tenant: str
    priority: int
    pause: int
    aborts: int | None
    is_out_of_memory: bool


ASKS = st.builds(
    Ask,
    num_prompt=st.one_of(st.integers(1, 60), st.integers(60, 400)),
    num_tokens=st.one_of(st.integers(1, 12), st.integers(12, 120)),
    deadline_s=st.one_of(st.none(), st.floats(0.01, 0.4), st.floats(0.2, 4.0)),
    is_certain=st.booleans(),
    n=st.sampled_from((1, 1, 1, 2, 3)),
    is_search=st.sampled_from((False, False, False, True)),
    is_background=st.sampled_from((False, False, False, True)),
    tenant=st.sampled_from("abc"),
    priority=st.integers(-1, 1),
    pause=st.one_of(st.just(0), st.integers(0, 40)),
    aborts=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 25)),
    is_out_of_memory=st.sampled_from((False,) * 30 + (True,)),
)


@settings(max_examples=120, derandomize=True)
@given(
    asks=st.lists(ASKS, max_size=25),
    policy=st.sampled_from(tuple(POLICIES)),
    num_blocks=st.sampled_from((200, 260, 400, 2000)),
    num_seats=st.sampled_from((3, 8, 30)),
    target_itl_s=st.sampled_from((None, None, 0.01, 0.05)),
    num_layers=st.sampled_from((1, 1, 6)),
    depth=st.sampled_from((0, 0, 1)),
)
def test_whoever_is_started_with_a_deadline_keeps_it(
    asks: list[Ask],
    policy: str,
    num_blocks: int,
    num_seats: int,
    target_itl_s: float | None,
    num_layers: int,
    depth: int,
) -> None:
    sizes = {"num_blocks": num_blocks, "max_num_seqs": num_seats, "num_layers": num_layers}
    world = Exact(depth, **sizes, policy=policy, target_itl_s=target_itl_s)
    for index, ask in enumerate(asks):
        changes: dict[str, object] = {"n": ask.n, "tenant": ask.tenant, "priority": ask.priority}
        if ask.is_search and ask.n > 1:
            changes["beam"] = BeamParams(width=ask.n)
        if not ask.is_certain:
            changes |= {"min_tokens": 0}
        changes |= {"deadline_s": ask.deadline_s, "is_background": ask.is_background}
        world.add(f"r{index}", ask.num_prompt, ask.num_tokens, **changes)
        if ask.aborts is not None:
            world.abort(f"r{ask.aborts}")
        if ask.is_out_of_memory:
            world.driver.run_out_of_memory()
        for _ in range(ask.pause):
            world.step()
    world.drain()
    if not any(ask.is_out_of_memory for ask in asks):
        world.check_promises(LONGEST_STEP_S if depth else 1e-6)


def test_a_forecast_of_those_who_decode_is_exact() -> None:
    world = Exact()
    for index, num_tokens in enumerate((5, 40, 17, 40)):
        world.add(f"r{index}", 10 + index, num_tokens)
    world.step()
    works = [work_of(seq, world.times.costs) for seq in world.driver.scheduler._roster.running]
    begun_s = world.driver.now
    world.drain()
    for left_s, work in seconds_left(works, world.times.costs, LIMIT):
        assert work.owner is not None
        assert begun_s + left_s == pytest.approx(world.ended_s[work.owner.request_id])


def test_who_could_not_be_in_time_beside_those_who_run_is_passed_over_until_somebody_leaves() -> None:
    world = Exact()
    for index in range(4):
        world.add(f"stream{index}", 10, 40)
    for _ in range(3):
        world.step()
    # Alone it takes 20 steps of 4.5 ms, beside the four 20 of 6.5.
    world.add("urgent", 10, 20, deadline_s=0.125)
    world.add("ordinary", 10, 5)
    world.add("patient", 10, 20, deadline_s=1.0)
    world.step()
    assert {"ordinary", "patient"} <= world.started_s.keys()
    assert "urgent" not in world.started_s
    for index in range(4):
        world.driver.take(world.driver.scheduler.abort(f"stream{index}", AbortCause.DISCONNECT, world.driver.now))
    world.driver.take(world.driver.scheduler.abort("patient", AbortCause.DISCONNECT, world.driver.now))
    world.driver.take(world.driver.scheduler.abort("ordinary", AbortCause.DISCONNECT, world.driver.now))
    world.step()
    assert "urgent" in world.started_s
    world.drain()
    assert world.ended_s["urgent"] - world.driver.requests["urgent"].arrival_s < 0.125


def test_nobody_starts_who_would_make_a_promise_late() -> None:
    world = Exact()
    world.add("promised", 10, 20, deadline_s=0.105)
    world.step()
    world.add("ordinary", 60, 50)
    world.add("behind", 1, 1)
    world.step()
    assert "ordinary" not in world.started_s
    assert "behind" not in world.started_s, "the line was jumped"
    world.drain()
    world.check_promises()
    assert world.started_s["ordinary"] > 0.08, "as soon as it can, with three of 20 tokens to go"


def test_promised_work_does_not_give_way_for_want_of_blocks() -> None:
    world = Exact(num_blocks=40, max_model_len=160)
    world.add("promised", 40, 60, deadline_s=60.0, priority=9)
    for index in range(3):
        world.add(f"other{index}", 20, 60)
    world.drain()
    world.check_promises()
    assert world.driver.scheduler.stats.preemptions > 0
    assert world.driver.ends["promised", 0].timings is not None
    assert world.driver.ends["promised", 0].timings.num_preemptions == 0


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("num_prompt", [10, 60])
def test_those_without_deadlines_wait_for_no_more_than_was_promised_before(policy: str, num_prompt: int) -> None:
    """However many deadlines follow: one a step, each to be met only by the engine's full attention."""
    world, longest_s = Exact(policy=policy), 0.5
    for index in range(400):
        if index == 100:
            world.add("ordinary", 10, 40)
        world.add(f"urgent{index}", num_prompt, 40, deadline_s=longest_s)
        world.step()
    arrived_s = world.driver.requests["ordinary"].arrival_s
    assert world.started_s["ordinary"] - arrived_s < longest_s
    # Once it runs, promises hold it back for as long as those take that were given before.
    assert world.ended_s["ordinary"] - world.started_s["ordinary"] < 2 * longest_s
    world.drain()
    world.check_promises()


def test_an_answer_of_unknown_length_is_promised_what_is_usual() -> None:
    world = Exact()
    world.add("first", 10, 300, min_tokens=0, deadline_s=1.0)
    roster = world.driver.scheduler._roster
    world.step()
    assert not roster.promised, "nothing is known of it, and 300 tokens take 1.3 s"
    world.drain()
    for index in range(40):
        world.add(f"learn{index}", 10 + index, 300, min_tokens=0)  # one token in fifty ends it
        world.drain()
    world.add("again", 10, 300, min_tokens=0, deadline_s=1.0)
    world.step()
    assert [seq.request_id for seq in roster.promised] == ["again"]
    assert 10 + 30 < roster.promised[0].promised_total < 10 + 200
    world.drain()


def test_a_promise_that_is_outlived_or_broken_holds_nobody_back() -> None:
    world = Exact()
    world.add("promised", 10, 20, deadline_s=0.105)
    world.step()
    world.add("ordinary", 10, 5)
    world.driver.now += 0.05  # the machine stood still
    world.step()
    assert not world.driver.scheduler._roster.has_promised
    assert "ordinary" in world.started_s
    world.drain()
    assert world.driver.scheduler.stats.missed[Target.DEADLINE] == 1


def test_a_search_loses_its_promise_with_all_beams() -> None:
    world = Exact()
    world.add("search", 10, 20, n=3, deadline_s=1.0, beam=BeamParams(width=3))
    for _ in range(4):
        world.step()
    roster = world.driver.scheduler._roster
    assert len(roster.promised) == 3
    roster.dismiss(roster.promised[1])
    assert not roster.has_promised
    world.drain()


def test_promised_work_alone_is_cut_to_a_step_that_is_small_for_want_of_memory() -> None:
    world = Exact()
    for index in range(4):
        world.add(f"short{index}", 10, 20, deadline_s=0.2)
    world.add("long", 200, 20, deadline_s=60.0)
    world.step()
    scheduler = world.driver.scheduler
    assert scheduler._promises.room(world.driver.now).is_alone
    scheduler._step_limit = 2
    world.driver.launch()
    assert world.driver.launched[-1][0].num_tokens == 2
    world.drain()


def test_one_that_has_no_blocks_yet_takes_no_step_for_itself() -> None:
    world = Exact(num_blocks=40, max_model_len=160)
    world.add("holder", 100, 40)
    for _ in range(4):
        world.step()
    world.add("urgent", 80, 10, deadline_s=0.1)
    world.driver.launch()
    scheduler = world.driver.scheduler
    assert scheduler._promises._is_tight
    assert scheduler._flights[-1].room == FREE
    world.drain()
    world.check_promises()


def test_a_step_examines_a_few_deadlines_however_many_wait_and_forgets_none() -> None:
    world = Exact(num_blocks=2000, max_num_seqs=30)
    world.add("stream", 10, 100)
    world.step()
    for index in range(20):
        world.add(f"urgent{index}", 10, 100, deadline_s=0.46)  # of 100 steps, which take 4.5 ms alone
    world.add("possible", 10, 10, deadline_s=2.0)
    world.add("ordinary", 10, 10)
    world.step()
    assert "ordinary" in world.started_s
    assert "possible" not in world.started_s, "it was examined behind twenty others"
    for _ in range(8):
        world.step()
    assert "possible" in world.started_s, "nobody has left, and yet it was examined"
    world.drain()
    world.check_promises()


def test_with_fair_a_tenant_that_has_its_part_is_promised_nothing_more() -> None:
    world = Exact(policy="fair", num_blocks=2000)
    world.add("light", 10, 100, tenant="light")
    world.step()
    for index in range(6):
        world.add(f"greedy{index}", 10, 50, deadline_s=60.0, tenant="greedy")
    for _ in range(4):
        world.step()
    promised = [seq.request_id for seq in world.driver.scheduler._roster.promised]
    assert len(promised) == 4, "half of eight seats"
    assert len(world.started_s) == 7, "the others are served as anybody's"
    world.drain()
