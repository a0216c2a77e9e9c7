"""The engine thread: every accepted request ends once, whatever happens to the engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from engine.core.errors import (
    ContextLengthError,
    DeviceLostError,
    DeviceMemoryError,
    EngineDeadError,
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
    ShuttingDownError,
)
from engine.core.scheduling.scheduler import Scheduler
from engine.core.stats import FailureCause
from engine.core.step import StepPlan, StepResult
from engine.core.types import AbortCause, FinishReason, Request, StepEvents, TokenEvent
from engine.handle import EngineFacts, TakeSnapshot
from engine.loop import Engine
from engine.overload import MAX_RETRY_S, QueueLimits
from loadtest.fake_runner import FakeRunner, FakeStep
from tests.integrity import check_scheduler
from tests.patience import PATIENCE_S, eventually
from tests.pure.driver import VOCAB, config, once_stopping, request, solo


class Listener:
    """Collects events and lets a test wait for terminal ones."""

    def __init__(self) -> None:
        self.batches: list[StepEvents] = []
        self.ends: dict[tuple[str, int], TokenEvent] = {}
        self.changed = threading.Condition()

    def __call__(self, events: StepEvents) -> None:
        with self.changed:
            self.batches.append(events)
            for event in events:
                if event.finish_reason is not None:
                    assert (event.request_id, event.choice) not in self.ends
                    self.ends[event.request_id, event.choice] = event
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), "it never happened"

    def said(self, request_id: str, choice: int = 0) -> list[int]:
        return [
            token
            for events in self.batches
            for event in events
            if (event.request_id, event.choice) == (request_id, choice)
            for token in event.token_ids
        ]


class LateStep(FakeStep):
    """A step that was launched and did not fit."""

    def wait(self) -> StepResult:
        raise DeviceMemoryError("the device is full")


class GatedRunner(FakeRunner):
    """A FakeRunner whose steps wait for a gate, and which can be told to break."""

    def __init__(self) -> None:
        super().__init__(config(), vocab_size=VOCAB)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.breaks_at: int | None = None  # the step that fails, from 0
        self.cause: Exception = RuntimeError("the device is gone")
        self.fits: Callable[[StepPlan], bool] = lambda plan: True  # the device's memory
        self.fails_late = False  # a step that does not fit is told by wait, not by run
        self.sizes: list[tuple[int, bool]] = []  # tokens of each step, and whether it fitted
        self.num_chores = 0  # for idle moments
        self.chores_done = threading.Event()
        self.closed = False
        self.begun_on: tuple[str, int] | None = None  # the thread, and how many steps there had been

    def begin(self) -> None:
        self.begun_on = (threading.current_thread().name, self.num_steps)

    def use_idle_moment(self) -> bool:
        if not self.num_chores:
            self.chores_done.set()
            return False
        self.num_chores -= 1
        return True

    def run(self, plan: StepPlan) -> FakeStep:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.num_steps == self.breaks_at:
            raise self.cause
        fits = self.fits(plan)
        self.sizes.append((plan.num_tokens, fits))
        if not fits and not self.fails_late:
            raise DeviceMemoryError("the device is full")
        return super().run(plan) if fits else LateStep(super().run(plan)._result, None)

    def close(self) -> None:
        self.closed = True


class Rig:
    """An engine over a gated runner, with a listener."""

    def __init__(self, depth: int = 0, limits: QueueLimits | None = None) -> None:
        self.runner = GatedRunner()
        self.listener = Listener()
        self.engine = Engine(
            Scheduler(config()), self.runner, EngineFacts(VOCAB), depth=depth, limits=limits or QueueLimits()
        )
        self.engine.start(self.listener)

    def block(self) -> None:
        """Hold the engine inside a step."""
        self.runner.gate.clear()
        self.runner.entered.clear()
        self.engine.submit(request("blocker", max_tokens=40, eos_token_ids=frozenset(), arrival_s=0.0))
        assert self.runner.entered.wait(PATIENCE_S)

    def release(self) -> None:
        self.runner.gate.set()

    def close(self) -> None:
        self.release()
        self.engine.stop(0.0)
        assert self.runner.closed
        assert self.engine.stats.integrity_failures == 0


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.close()


def test_requests_from_many_threads_say_what_they_say_alone(rig: Rig) -> None:
    asked = [request(str(i), (i % 50, 2, 3), n=1 + i % 2, seed=i, max_tokens=9) for i in range(40)]
    threads = [
        threading.Thread(target=lambda part: [rig.engine.submit(one) for one in part], args=(asked[i::4],))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 60)
    for one in asked:
        for choice in range(one.params.n):
            assert (
                rig.listener.said(one.request_id, choice),
                rig.listener.ends[one.request_id, choice].finish_reason,
            ) == solo(one, choice)
    assert not rig.engine.health().busy


def test_the_runner_gets_ready_on_the_engines_thread(rig: Rig) -> None:
    rig.engine.submit(request("a"))
    rig.listener.wait_for(lambda: ("a", 0) in rig.listener.ends)
    assert rig.runner.begun_on == ("quire-engine", 0)


def test_events_are_delivered_once_a_step(rig: Rig) -> None:
    rig.block()
    for i in range(5):
        rig.engine.submit(request(str(i), max_tokens=6, eos_token_ids=frozenset()))
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 6)
    assert len(rig.listener.batches) <= rig.engine.stats.steps
    assert max(len(list(events)) for events in rig.listener.batches) == 6


def test_a_request_that_never_fits_is_refused_to_its_sender(rig: Rig) -> None:
    with pytest.raises(NeverFitsError):
        rig.engine.submit(request(n=100))


def test_ids_beyond_the_vocabulary_are_refused_before_a_table_is_read(rig: Rig) -> None:
    for token_id in (-1, VOCAB, 1 << 70):
        with pytest.raises(InvalidRequestError, match=f"{token_id}; ids of this model are 0 to {VOCAB - 1}"):
            rig.engine.submit(request("a", prompt=(VOCAB - 1, token_id, 0), arrival_s=0.0))


def test_an_aborted_request_ends_once_and_late_or_unknown_aborts_are_ignored(rig: Rig) -> None:
    rig.block()
    rig.engine.submit(request("queued", n=2))
    for request_id in ("blocker", "queued", "queued", "unknown"):
        rig.engine.abort(request_id, AbortCause.DISCONNECT)
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 3)
    assert {event.finish_reason for event in rig.listener.ends.values()} == {FinishReason.ABORT}
    rig.engine.submit(request("next"))
    rig.listener.wait_for(lambda: ("next", 0) in rig.listener.ends)
    assert rig.engine.stats.aborted[AbortCause.DISCONNECT] == 3
    assert rig.engine.stats.blocks_held == 0


def test_stopping_lets_open_requests_finish(rig: Rig) -> None:
    rig.block()
    once_stopping(rig.engine, rig.release)
    rig.engine.stop(PATIENCE_S)
    assert rig.listener.ends["blocker", 0].finish_reason is FinishReason.LENGTH
    with pytest.raises(ShuttingDownError):
        rig.engine.submit(request("late"))
    assert not rig.engine.health().alive


def test_stopping_aborts_what_outlives_the_deadline(rig: Rig) -> None:
    rig.block()
    once_stopping(rig.engine, rig.release)
    rig.engine.stop(0.0)
    assert rig.listener.ends["blocker", 0].finish_reason is FinishReason.ABORT
    assert rig.engine.stats.aborted[AbortCause.SHUTDOWN] == 1


def test_death_ends_every_request_with_an_error_and_refuses_the_next(rig: Rig) -> None:
    rig.block()
    rig.engine.submit(request("queued", n=2))
    rig.runner.breaks_at = 0
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 3)
    for event in rig.listener.ends.values():
        assert event.finish_reason is FinishReason.ERROR
        assert event.error.code == "EngineDeadError"
        assert "the device is gone" in str(event.error)
    with pytest.raises(EngineDeadError):
        rig.engine.submit(request("late"))
    health = rig.engine.health()
    assert not health.alive
    assert not health.busy
    assert health.error is not None
    stats = rig.engine.stats
    assert stats.request_prompt_tokens.count == stats.request_generation_tokens.count == sum(stats.finished.values())


def check_nothing_leaked(rig: Rig) -> None:
    """The engine is idle and its books balance."""
    rig.engine.stop(PATIENCE_S)
    check_scheduler(rig.engine._scheduler)
    stats = rig.engine.stats
    assert (stats.blocks_held, stats.num_running, stats.num_waiting, stats.num_preempted) == (0, 0, 0, 0)
    assert sum(stats.failed.values()) == stats.finished[FinishReason.ERROR]
    assert stats.request_prompt_tokens.count == stats.request_generation_tokens.count == sum(stats.finished.values())
    assert stats.request_generation_tokens.sum == stats.generation_tokens


@pytest.mark.parametrize("late", [False, True], ids=["run", "wait"])
def test_a_step_that_does_not_fit_is_taken_back_and_nobody_notices(rig: Rig, late: bool) -> None:
    rig.runner.fails_late, rig.runner.fits = late, lambda plan: plan.num_tokens <= 3
    asked = [request(str(i), (i, 2, 3, 4, 5), n=1 + i % 3, seed=i, max_tokens=9, arrival_s=i) for i in range(8)]
    rig.engine.submit(*asked)
    rig.listener.wait_for(lambda: len(rig.listener.ends) == sum(one.params.n for one in asked))
    for one in asked:
        for choice in range(one.params.n):
            end = rig.listener.ends[one.request_id, choice]
            if end.error is None or end.error.code != "ComputeError":
                assert (rig.listener.said(one.request_id, choice), end.finish_reason) == solo(one, choice)
    sizes = rig.runner.sizes
    failed = [i for i, (_, fitted) in enumerate(sizes) if not fitted]
    assert rig.engine.stats.out_of_memory_steps >= 1
    assert all(sizes[i + 1][0] <= max(sizes[i][0] // 2, 1) for i in failed if not late and i + 1 < len(sizes))
    check_nothing_leaked(rig)


def test_a_second_try_that_fits_ends_nobody(rig: Rig) -> None:
    full = iter([False, True])
    rig.runner.fits = lambda plan: plan.num_tokens <= 6 or next(full, True)
    asked = [request(str(i), (i, 2, 3, 4, 5), seed=i, max_tokens=9) for i in range(8)]
    rig.engine.submit(*asked)
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 8)
    for one in asked:
        assert (rig.listener.said(one.request_id), rig.listener.ends[one.request_id, 0].finish_reason) == solo(one, 0)
    assert rig.engine.stats.out_of_memory_steps == 1
    assert rig.engine.stats.finished[FinishReason.ERROR] == 0
    check_nothing_leaked(rig)


def test_a_request_that_fits_no_step_ends_alone(rig: Rig) -> None:
    rig.runner.fits = lambda plan: all(row.params.top_k != 3 for row in plan.rows)
    rig.block()
    rig.engine.submit(request("too much", (1, 2, 3, 4), n=3, top_k=3))
    rig.engine.submit(good := request("good", (4, 5), max_tokens=20, eos_token_ids=frozenset()))
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 5)
    for choice in range(3):
        end = rig.listener.ends["too much", choice]
        assert end.finish_reason is FinishReason.ERROR
        assert end.error.code == "ComputeError"
        assert "no memory left" in str(end.error)
        assert "the device is full" in str(end.error)
    assert (rig.listener.said("good"), rig.listener.ends["good", 0].finish_reason) == solo(good, 0)
    assert rig.listener.ends["blocker", 0].finish_reason is FinishReason.LENGTH
    assert rig.engine.stats.failed[FailureCause.OUT_OF_MEMORY] == 3
    assert rig.engine.stats.out_of_memory_steps == 2
    assert rig.engine.health().alive
    check_nothing_leaked(rig)


def test_steps_grow_back_to_full_size(rig: Rig) -> None:
    full = iter([False])
    rig.runner.fits = lambda plan: plan.num_tokens < 12 or next(full, True)
    rig.engine.submit(*[request(str(i), (i,) * 20, max_tokens=1) for i in range(12)])
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 12)
    (failed,) = (i for i, (_, fitted) in enumerate(rig.runner.sizes) if not fitted)
    after = [size for size, _ in rig.runner.sizes[failed + 1 :]]
    assert after[0] <= 6
    assert max(after) == 12
    check_nothing_leaked(rig)


def test_an_abort_while_memory_is_short_frees_the_request(rig: Rig) -> None:
    rig.runner.fits = lambda plan: rig.runner.num_steps < 3
    rig.block()
    rig.engine.submit(request("second", n=2))
    rig.engine.abort("second", AbortCause.DISCONNECT)
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 3)
    assert rig.listener.ends["blocker", 0].finish_reason is FinishReason.ERROR
    check_nothing_leaked(rig)


def test_a_lost_device_is_told_in_its_own_words(rig: Rig) -> None:
    rig.block()
    rig.engine.submit(request("queued"))
    rig.runner.breaks_at, rig.runner.cause = 0, DeviceLostError("the device is lost: CUDA error: unspecified")
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 2)
    message = "The engine stopped on an internal error (the device is lost: CUDA error: unspecified)."
    assert {str(end.error) for end in rig.listener.ends.values()} == {message}
    assert rig.engine.health().error == message
    assert rig.engine.stats.failed[FailureCause.ENGINE_DEATH] == 2


def test_a_request_aborted_in_the_very_turn_that_breaks_still_hears_its_end(rig: Rig) -> None:
    rig.block()
    rig.engine.submit(request("queued"))
    rig.engine.abort("blocker", AbortCause.DISCONNECT)
    rig.runner.breaks_at = 1
    rig.release()
    rig.listener.wait_for(lambda: rig.listener.ends.keys() == {("blocker", 0), ("queued", 0)})


def test_a_result_that_breaks_the_commit_leaves_nobody_waiting(rig: Rig) -> None:
    rig.block()
    for name in ("whole", "cut off"):
        rig.engine.submit(request(name, max_tokens=1))
    honest_run = FakeRunner.run

    def cut_short(plan: StepPlan) -> FakeStep:
        step = honest_run(rig.runner, plan)
        if plan.num_samples > 1:
            step._result.token_ids.pop()
        return step

    rig.runner.run = cut_short  # type: ignore[method-assign]
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 3)


def test_an_engine_that_was_never_started_is_released_once() -> None:
    """Its runner may have processes, which nothing else ends."""
    closed: list[str] = []

    class Runner(FakeRunner):
        def close(self) -> None:
            closed.append("runner")

    engine = Engine(Scheduler(config()), Runner(config(), vocab_size=VOCAB), EngineFacts(VOCAB))
    outcome = engine.control(TakeSnapshot())
    engine.stop(0)
    engine.stop(0)
    assert closed == ["runner"]
    assert outcome.cancelled()
    with pytest.raises(ShuttingDownError):
        engine.submit(request("late"))


def test_an_engine_that_has_yet_to_wake_up_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour without work, then a request: health must not count the hour."""
    now, awake = 0.0, threading.Event()
    engine = Engine(Scheduler(config()), GatedRunner(), EngineFacts(VOCAB), clock=lambda: now)
    take = engine._inbox.take
    monkeypatch.setattr(engine._inbox, "take", lambda **how: awake.wait(PATIENCE_S) and take(**how))
    engine.start(lambda events: None)
    now = 3600.0
    engine.submit(request())
    health = engine.health()
    assert health.alive
    assert health.seconds_since_step == 0.0
    awake.set()
    engine.stop(0.0)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_leak_is_found_in_a_quiet_moment_and_when_the_engine_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_idle: bool
) -> None:
    engine = Engine(Scheduler(config()), GatedRunner(), EngineFacts(VOCAB))
    engine._scheduler.kv.pool.alloc_many(3)
    if not is_idle:
        monkeypatch.setattr("engine.arbiter._QUIET_S", PATIENCE_S)
    engine.start(lambda events: None)
    if is_idle:
        eventually(lambda: engine.stats.integrity_failures == 1)
        assert engine.health().alive, "a leak is no reason to stop serving"
    engine.stop(0.0)
    assert engine.stats.integrity_failures == 1 + is_idle
    assert "3 blocks or rows are held by nothing" in caplog.text


def test_the_owner_learns_of_the_end_even_if_something_cannot_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(GatedRunner):
        def close(self) -> None:
            raise OSError("the disk is gone")

    ended = threading.Event()
    engine = Engine(Scheduler(config()), Broken(), EngineFacts(VOCAB))
    engine.start(lambda events: None, ended.set)
    engine.stop(0.0)
    assert ended.is_set()
    assert "Broken could not be closed: OSError: the disk is gone" in caplog.text


def test_an_engine_ends_where_the_system_has_no_thread_for_that(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop.on_thread", Mock(side_effect=RuntimeError("can't start new thread")))
    rig.engine.order_stop(0.0)
    eventually(lambda: rig.runner.closed)
    assert rig.engine.health().error is None


def test_the_runner_gets_quiet_moments_until_it_has_no_use_for_them(rig: Rig) -> None:
    rig.runner.num_chores = 3
    rig.engine.submit(request())
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 1)
    rig.runner.chores_done.clear()
    assert rig.runner.chores_done.wait(PATIENCE_S)
    assert rig.runner.num_chores == 0
    rig.engine.submit(request("later"))
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 2)


def test_a_message_ends_a_quiet_moment(rig: Rig) -> None:
    rig.runner.num_chores = 1 << 60  # never done
    rig.engine.submit(request())
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 1)


def test_a_hanging_step_shows_in_health(rig: Rig) -> None:
    assert rig.engine.health() == (True, False, 0.0, None)
    rig.block()
    before = rig.engine.health()
    assert before.alive
    assert before.busy
    threading.Event().wait(0.02)
    assert rig.engine.health().seconds_since_step > before.seconds_since_step
    rig.release()


def test_a_step_lasts_from_its_launch_to_its_commit(rig: Rig) -> None:
    """Also with a runner that computes inside `run`, as the CPU's does."""
    rig.block()
    threading.Event().wait(0.05)
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 1)
    assert rig.engine.stats.step_s.sum >= 0.05
    assert rig.engine.stats.tokens_per_s > 0


def test_overlapping_steps_share_the_time_they_overlap() -> None:
    """On a clock that ticks at every reading: added up, steps last no longer than the clock says has passed."""
    ticks = itertools.count()
    runner, listener = FakeRunner(config(), vocab_size=VOCAB), Listener()
    engine = Engine(Scheduler(config()), runner, EngineFacts(VOCAB), depth=1, clock=lambda: float(next(ticks)))
    engine.start(listener)
    engine.submit(request(max_tokens=60, eos_token_ids=frozenset()))
    listener.wait_for(lambda: len(listener.ends) == 1)
    assert engine.stats.step_s.count >= 60
    assert engine.stats.step_s.sum <= next(ticks)
    engine.stop(0.0)


def test_a_full_queue_is_refused_at_once_with_a_time_to_come_back() -> None:
    rig = Rig(limits=QueueLimits(max_requests=2, max_tokens=None))
    rig.block()
    for i in range(7):  # five free slots, then two places in the queue
        rig.engine.submit(request(str(i)))
    with pytest.raises(OverloadedError) as refused:
        rig.engine.submit(request("one too many"))
    assert "--max-num-queued-reqs 2" in str(refused.value)
    assert 1.0 <= refused.value.retry_after_s <= MAX_RETRY_S
    assert rig.engine.stats.rejected == 1
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 8)
    rig.engine.submit(request("later"))
    rig.close()


def test_requests_that_belong_together_are_admitted_all_or_none() -> None:
    rig = Rig(limits=QueueLimits(max_requests=2, max_tokens=20))
    many = [request(str(i), (1, 2, 3)) for i in range(9)]
    with pytest.raises(ContextLengthError):
        rig.engine.submit(*many, request("too long", (1,) * 1000))
    rig.engine.submit(*many)  # more than the queue holds, but nobody is ahead of them
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 9)
    rig.block()
    rig.engine.submit(*[request(f"queued {i}") for i in range(7)])
    with pytest.raises(OverloadedError):
        rig.engine.submit(request("one too many"), request("and another"))
    assert rig.engine.stats.rejected == 1
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 17)
    rig.close()


def test_inputs_of_one_client_wait_as_one_request() -> None:
    def inputs(name: str) -> list[Request]:
        return [replace(request(f"{name} {i}"), is_further=i > 0) for i in range(50)]

    rig = Rig(limits=QueueLimits(max_requests=2))
    rig.block()
    for name in "ab":
        rig.engine.submit(*inputs(name))
    with pytest.raises(OverloadedError, match="2 requests wait already"):
        rig.engine.submit(*inputs("c"))
    rig.release()
    rig.listener.wait_for(lambda: len(rig.listener.ends) == 101)
    assert rig.engine.stats.num_further == 0
    rig.close()


def test_too_many_queued_tokens_are_refused() -> None:
    rig = Rig(limits=QueueLimits(max_requests=None, max_tokens=20))
    rig.block()
    for i in range(5):
        rig.engine.submit(request(str(i), (1, 2, 3)))
    with pytest.raises(OverloadedError, match="--max-num-queued-tokens 20"):
        rig.engine.submit(request("wide", (1,) * 12))
    rig.close()
