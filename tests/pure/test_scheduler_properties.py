"""A state machine over the scheduler: any history of arrivals, steps, aborts, failures and steps that are taken back keeps
every invariant."""

from __future__ import annotations

from contextlib import nullcontext, suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.core.errors import NeverFitsError
from engine.core.types import AbortCause, BeamParams, EarlyStopping, Pin
from loadtest.fake_runner import CostModel
from tests.integrity import check_scheduler
from tests.pure.driver import EOS, FAILS, Driver, config, request

prompts = st.builds(
    lambda shared, own: tuple(range(shared)) + tuple(own),
    st.integers(0, 14),
    st.lists(st.integers(0, 49), min_size=1, max_size=8),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Whatever happens, each stream is a prefix of its solo stream, and what is not aborted is all of it."""

    @initialize(
        depth=st.integers(0, 3),
        num_blocks=st.integers(10, 24),
        budget=st.integers(6, 30),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority", "fair", "fair"]),
        num_host_blocks=st.sampled_from([0, 3, 12, 60]),
        host_caching=st.booleans(),
        num_disk_blocks=st.sampled_from([0, 0, 5, 40]),
        num_speculative_tokens=st.sampled_from([0, 1, 4]),
        target_itl_s=st.sampled_from([None, None, 0.001, 0.03]),
        target_ttft_s=st.sampled_from([None, 0.5]),
        cost=st.sampled_from([None, CostModel(0.01, 0.002), CostModel(0.001, 0.01, 0.001)]),
    )
    def start(
        self,
        depth: int,
        budget: int,
        caching: bool,
        num_speculative_tokens: int,
        cost: CostModel | None,
        **changes: str | float | None,
    ) -> None:
        changes["num_speculative_tokens"] = 0 if depth else num_speculative_tokens
        changes["num_disk_blocks"] = changes["num_disk_blocks"] if changes["host_caching"] else 0
        self.driver = Driver(
            config(max_num_batched_tokens=budget, enable_prefix_caching=caching, max_model_len=40, **changes),
            depth,
            cost and cost.seconds,
        )
        self.aborted: set[str] = set()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(0, 15),
        n=st.integers(1, 3),
        seed=st.integers(0, 5),
        greedy=st.booleans(),
        ending=st.sampled_from([frozenset(), frozenset([EOS]), frozenset(range(10))]),
        min_tokens=st.integers(0, 3),
        top_k=st.sampled_from([0, 0, 0, FAILS]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        priority=st.integers(-2, 2),
        is_background=st.booleans(),
        tenant=st.sampled_from(["a", "a", "b", "c"]),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        cache_owner=st.sampled_from(["", "", "a"]),
        pinned=st.sampled_from([0, 0, 0, 4, 9]),
        open_tokens=st.sampled_from([None, None, 1, 3]),
        extra_beams=st.sampled_from([None, None, 0, 1, 3]),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from(EarlyStopping),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        greedy: bool,
        ending: frozenset[int],
        n: int,
        pinned: int,
        open_tokens: int | None,
        extra_beams: int | None,
        length_penalty: float,
        early_stopping: EarlyStopping,
        **params: object,
    ) -> None:
        name = str(len(self.driver.requests))
        beam = (
            None
            if extra_beams is None
            else BeamParams(width=n + extra_beams, length_penalty=length_penalty, early_stopping=early_stopping)
        )
        asked = request(
            name,
            prompt,
            eos_token_ids=ending,
            temperature=0.0 if greedy else 1.0,
            arrival_s=self.driver.now,
            n=n,
            beam=beam,
            pins=(Pin(min(pinned, len(prompt)), 5.0),) if pinned else (),
            turn_end=0 if open_tokens is None else max(len(prompt) - open_tokens, 0),
            **params,
        )
        with suppress(NeverFitsError) if beam is not None else nullcontext():
            self.driver.add(asked)

    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @rule()
    def commit(self) -> None:
        if self.driver.launched:
            self.driver.commit()

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule(
        which=st.integers(0, 30),
        choice=st.sampled_from([None, None, 0, 1]),
        cause=st.sampled_from([AbortCause.DISCONNECT, AbortCause.STOP_STRING]),
    )
    def abort(self, which: int, choice: int | None, cause: AbortCause) -> None:
        name = str(which)
        if name in self.driver.requests:
            events = self.driver.scheduler.abort(name, cause, self.driver.now, choice)
            if events:
                self.aborted.add(name)
            self.driver.take(events)

    @rule(failure=st.sampled_from([None, None, "no memory"]))
    def run_out_of_memory(self, failure: str | None) -> None:
        self.aborted |= self.driver.run_out_of_memory(failure)

    @rule(num_left=st.integers(0, 3), is_good=st.booleans())
    def transfer(self, num_left: int, is_good: bool) -> None:
        """Some of what the disk was asked ends, well or not."""
        self.driver.transfer(num_left, is_good=is_good)

    @rule()
    def spill(self) -> None:
        if not self.driver.launched and not self.driver.scheduler.has_work:
            self.driver.spill()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        check_scheduler(driver.scheduler)
        driver.check_totals()
        stats = driver.scheduler.stats
        assert stats.num_running <= driver.scheduler.config.max_num_seqs
        assert stats.num_waiting >= 0
        assert stats.num_preempted >= 0

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check_streams(self.aborted)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
