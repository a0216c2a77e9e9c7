"""Several engines on one thread: whose turn it is, and what they plan beside each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.arbiter import Arbiter
from engine.core.budget import SHARE, Allowance, Beside, StepBudget, decode_load
from engine.core.config import SchedulerConfig
from engine.core.errors import EngineDeadError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import StepPlan, StepResult
from engine.core.types import AbortCause, FinishReason, Pooling, PoolingParams, Request
from engine.handle import EngineFacts
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner, FakeStep
from tests.integrity import check_scheduler
from tests.pure.driver import VOCAB, config, request, solo
from tests.pure.test_loop import GatedRunner, Listener


class World:
    """Engines whose turns take given seconds, on a clock that only they move."""

    def __init__(self, num_turns: int, *engines: Turn) -> None:
        self.now_s, self.num_left, self.said = 0.0, num_turns, list[tuple[Turn, Beside | None]]()
        self.arbiter = Arbiter(lambda: self.now_s)
        for engine in engines:
            engine.world = self
            self.arbiter._engines.append(engine)
        self.arbiter._main()

    def seconds(self, engine: Turn) -> float:
        return sum(each.step_s for each, _ in self.said if each is engine)

    def gaps(self, engine: Turn) -> set[int]:
        """How many turns of others lie between two of an engine."""
        at = [index for index, (each, _) in enumerate(self.said) if each is engine]
        return {after - before - 1 for before, after in pairwise(at)}


class Turn:
    """An engine with endless work."""

    world: World

    def __init__(
        self,
        step_s: float,
        *,
        streams: bool = True,
        share: float = 1.0,
        target_s: float | None = None,
        first: int = 0,
        is_seen: bool = True,
    ) -> None:
        self.step_s, self.share, self.used_s, self.target_itl_s = step_s, share, 0.0, target_s
        self.stream_s = step_s if streams else 0.0
        self.is_urgent, self.first, self.is_seen = True, first, is_seen

    @property
    def is_ready(self) -> bool:
        return len(self.world.said) >= self.first

    def turn(self, beside: Beside | None) -> bool:
        if len(self.world.said) < self.world.num_left:
            self.world.said.append((self, beside))
        self.world.now_s += self.step_s
        return len(self.world.said) < self.world.num_left

    def chores(self) -> Iterator[float]:
        return iter(())


def test_streams_share_the_time_and_not_the_turns() -> None:
    fast, slow, double = Turn(0.01), Turn(0.04), Turn(0.01, share=2.0)
    world = World(2000, fast, slow, double)
    assert world.seconds(fast) == pytest.approx(world.seconds(slow), rel=0.05)
    assert world.seconds(double) == pytest.approx(2 * world.seconds(slow), rel=0.05)


def test_prompts_alternate_with_the_streams_of_another_model() -> None:
    """A step as long as it may be counts as one of theirs; a longer one as more."""
    streams = Turn(0.01)
    assert World(99, streams, Turn(SHARE * 0.01, streams=False)).gaps(streams) <= {0, 1, 2}
    streams, prompts = Turn(0.01), Turn(4 * SHARE * 0.01, streams=False)
    assert World(99, streams, prompts).gaps(streams) <= {0, 1}
    assert World(99, prompts := Turn(4 * SHARE * 0.01, streams=False), Turn(0.01)).gaps(prompts) <= {3, 4, 5}


def test_all_plan_beside_the_streams_of_the_others_for_the_tightest_target() -> None:
    chat, reader, careful = Turn(0.01), Turn(0.02, streams=False, target_s=0.001), Turn(0.03, target_s=0.5)
    said = dict(World(50, chat, reader, careful).said)
    assert said[chat] == Beside(0.03, 0.5)
    assert said[reader] == Beside(0.04, 0.5)  # its own target is for its streams
    assert said[careful] == Beside(0.01, 0.5)
    assert said[careful].prompts_s(0.1) == pytest.approx(0.35)


def test_verdicts_do_not_wait_for_streams_that_wait_for_them() -> None:
    """Neither sends its tokens one by one, so a long step of one makes no gap in the other."""
    guarded, verdicts = Turn(0.01, is_seen=False, target_s=0.02), Turn(0.01, streams=False, is_seen=False)
    said = dict(World(50, guarded, verdicts).said)
    assert {*said.values()} == {Beside(0.0, None)}
    chat, texts = Turn(0.03, target_s=0.5), Turn(0.02, streams=False)
    said = dict(World(50, guarded, verdicts, chat, texts).said)
    assert said[verdicts] == said[guarded] == Beside(0.03, 0.5)
    assert said[texts] == Beside(0.04, 0.02)
    assert said[chat] == Beside(0.01, 0.02)


def test_who_comes_late_has_no_claim_on_the_past_and_nothing_is_shared_alone() -> None:
    early, late = Turn(0.01), Turn(0.01, first=100)
    world = World(300, early, late)
    assert {beside for _, beside in world.said[:100]} == {None}
    assert world.seconds(late) == pytest.approx(1.0, abs=0.02)


def test_background_work_waits_for_other_models() -> None:
    clients, batch = Turn(0.01), Turn(0.01)
    batch.is_urgent = False
    assert World(100, batch, clients).seconds(batch) == 0


def test_prompts_beside_streams_of_another_model_are_held_to_a_share_of_their_time() -> None:
    budget = StepBudget(replace(config(), max_num_batched_tokens=64))
    load = decode_load(())
    for count in (8, 16, 24, 32, 40, 48, 56, 64) * 20:
        budget.observe(load.with_chunk(0, count), [0], 0, 0.001 + 0.001 * count)
    assert Allowance(budget, budget.limit(has_foreground=True)).prompt(0, 64, ()) == 64
    budget.beside = Beside(0.05, None)
    allowance = Allowance(budget, budget.limit(has_foreground=True))
    allowance.begin_prompts(holds_back=False)
    assert 10 <= allowance.prompt(0, 64, ()) <= 20  # 0.32 of 51 ms
    budget.beside = Beside(0.05, 0.1)
    allowance = Allowance(budget, budget.limit(has_foreground=True))
    allowance.begin_prompts(holds_back=False)
    assert 33 <= allowance.prompt(0, 64, ()) <= 42  # 90 ms less 51


@pytest.mark.parametrize("depth", [0, 1])
def test_two_engines_on_a_thread_say_what_they_say_alone_and_one_ends_without_the_other(depth: int) -> None:
    arbiter, threads = Arbiter(), set[int]()
    engines, listeners, runners = list[Engine](), [Listener(), Listener()], [GatedRunner(), GatedRunner()]
    for runner, listener in zip(runners, listeners, strict=True):
        runner.begin = lambda: threads.add(threading.get_ident())  # type: ignore[method-assign]
        engines.append(Engine(Scheduler(config()), runner, EngineFacts(VOCAB), depth=depth, arbiter=arbiter))
        engines[-1].start(listener)
    asked = [request(str(i), (i, 2, 3), n=1 + i % 2, seed=i, max_tokens=9) for i in range(20)]
    for index, one in enumerate(asked):
        engines[index % 2].submit(one)
    for index, one in enumerate(asked):
        listener = listeners[index % 2]
        for choice in range(one.params.n):
            listener.wait_for(lambda: (one.request_id, choice) in listener.ends)  # noqa: B023 - called here
            end = listener.ends[one.request_id, choice].finish_reason
            assert (listener.said(one.request_id, choice), end) == solo(one, choice)
    assert len(threads) == 1
    runners[0].breaks_at = runners[0].num_steps
    engines[0].submit(request("last"))
    listeners[0].wait_for(lambda: ("last", 0) in listeners[0].ends)
    assert listeners[0].ends["last", 0].finish_reason is FinishReason.ERROR
    with pytest.raises(EngineDeadError, match="the device is gone"):
        engines[0].submit(request("later"))
    engines[1].submit(request("after"))
    listeners[1].wait_for(lambda: ("after", 0) in listeners[1].ends)
    assert engines[1].health().alive
    assert not engines[0].health().alive
    for engine in engines:
        engine.stop(0.0)
    assert all(runner.closed for runner in runners)
    third = Engine(Scheduler(config()), FakeRunner(config(), vocab_size=VOCAB), EngineFacts(VOCAB), arbiter=arbiter)
    third.start(listener := Listener())  # the thread has ended, and another begins
    third.submit(request("again"))
    listener.wait_for(lambda: ("again", 0) in listener.ends)
    third.stop(0.0)


class PausingRunner(FakeRunner):
    """Its steps take as many turns as `num_left` says, whose seconds pass on `clock`."""

    def __init__(self, settings: SchedulerConfig | None = None) -> None:
        super().__init__(settings or config(), vocab_size=VOCAB)
        self.now_s, self.took_s, self.num_left, self.asked, self.closed = 1.0, 0.0, 0, list[float](), 0

    def clock(self) -> float:
        return self.now_s

    def run(self, plan: StepPlan) -> FakeStep:
        return PausingStep(super().run(plan)._result, self)


class PausingStep(FakeStep):
    may_pause = True

    def __init__(self, result: StepResult, runner: PausingRunner) -> None:
        super().__init__(result, lambda: None)
        self.runner = runner

    def advance(self, seconds: float) -> bool:
        self.runner.asked.append(seconds)
        if self.runner.closed or not self.runner.num_left:
            return True
        self.runner.num_left -= 1
        self.runner.now_s += seconds
        self.runner.took_s += seconds
        return False

    def close(self) -> None:
        self.runner.closed += 1
        self._result = StepResult(token_ids=[])


def test_a_step_that_pauses_goes_on_between_the_steps_of_others_and_ends_if_nothing_needs_it() -> None:
    runner, scheduler = PausingRunner(), Scheduler(config())
    engine = Engine(scheduler, runner, EngineFacts(VOCAB), clock=runner.clock)
    engine._deliver = listener = Listener()
    streams, targeted = Beside(0.05, None), Beside(0.05, 0.1)

    def turn(beside: Beside | None = streams) -> None:
        engine.turn(beside)
        runner.now_s += 10.0  # of others' turns
        check_scheduler(scheduler)

    def submit(name: str) -> None:
        engine.submit(
            Request(request_id=name, prompt=(1, 2, 3), params=PoolingParams(pooling=Pooling.MEAN), arrival_s=0.0)
        )

    runner.num_left = 3
    submit("one")
    turn()
    submit("two")  # which waits
    turn(targeted)
    turn(None)
    turn()
    share_s = 1.2 * SHARE * 0.05  # nothing is known of how long the step takes
    assert runner.asked == [pytest.approx(each) for each in (share_s, 0.048, 0.024, share_s)]
    assert runner.num_steps == 1
    assert engine.stats.step_s.sum == pytest.approx(sum(runner.asked[:3]))  # without the others' turns
    assert listener.ends["one", 0].finish_reason is FinishReason.LENGTH
    runner.num_left = 3
    turn()
    assert runner.asked[-1] == pytest.approx(SHARE * 0.05)  # a step like the first, which would take several turns
    submit("three")
    engine.abort("two", AbortCause.DISCONNECT)
    turn()
    assert runner.closed == 1
    assert engine.stats.step_s.sum == pytest.approx(sum(runner.asked[:3]))  # nothing is learned of a part
    runner.closed = runner.num_left = 0
    turn()
    assert set(listener.ends) == {("one", 0), ("two", 0), ("three", 0)}
    assert not scheduler.has_work
    engine.stop(0.0)


def test_short_texts_pass_a_long_one_that_has_paused_and_then_it_goes_on_for_as_long() -> None:
    settings = config(whole_step=12, max_num_batched_tokens=64)
    runner, scheduler = PausingRunner(settings), Scheduler(settings)
    engine = Engine(scheduler, runner, EngineFacts(VOCAB), clock=runner.clock)
    engine._deliver = listener = Listener()

    def submit(name: str, num_tokens: int) -> None:
        params = PoolingParams(pooling=Pooling.MEAN)
        engine.submit(Request(request_id=name, prompt=(1,) * num_tokens, params=params, arrival_s=0.0))

    def turn() -> set[str]:
        engine.turn(Beside(0.05, None))
        runner.now_s += 10.0  # of others' turns
        check_scheduler(scheduler)
        return {name for name, _ in listener.ends}

    runner.num_left = 3
    submit("long", 40)
    turn()
    submit("longer", 41)
    submit("short", 3)
    assert turn() == set(), "a short step pauses as well"
    submit("shorter", 2)
    assert [turn() for _ in range(2)] == [set(), {"short"}]
    short_s = runner.took_s - runner.asked[0]
    runner.num_left, runner.took_s = 100, 0.0
    while runner.num_steps == 2:
        turn()
    assert short_s <= runner.took_s - runner.asked[-1] < short_s + runner.asked[-1]
    runner.num_left = 0
    runner.took_s += short_s + runner.asked[0]
    assert turn() == {"short", "shorter"}
    assert turn() == {"short", "shorter", "long"}
    assert turn() == {"short", "shorter", "long", "longer"}
    assert engine.stats.step_s.sum == pytest.approx(runner.took_s)
    assert not scheduler.has_work
    engine.stop(0.0)
