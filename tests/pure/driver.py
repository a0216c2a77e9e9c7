"""Drives a Scheduler with a FakeRunner on a virtual clock, and says what every stream must be."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields

from engine.core.config import SchedulerConfig, StoreSize
from engine.core.kv.tiers import Transfer
from engine.core.page_table import blocks_for
from engine.core.rows import Rows, SequenceSlice
from engine.core.scheduling.beams import BeamSearch, row_params
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Sequence, Status, choice_seed
from engine.core.spans import divided
from engine.core.step import StepPlan
from engine.core.types import FinishReason, PromptInfo, Request, SamplingParams, TokenEvent
from engine.inbox import InboxMessage, Stop
from engine.loop import Engine
from loadtest.fake_runner import FakeRunner, FakeStep, likeliest, mix, with_vectors
from tests.integrity import check_scheduler

VOCAB = 50
EOS = 7
FAILS = 13  # a request with this top_k fails once it has generated three tokens


def config(num_disk_blocks: int = 0, **changes: bool | str | float | None) -> SchedulerConfig:
    """A small engine: 24 blocks of 4 tokens, 6 slots, 12 tokens a step; with a disk if that has blocks."""
    values = {
        "num_blocks": 24,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 12,
        "stores": (StoreSize("disk", num_disk_blocks),) if num_disk_blocks else (),
    } | changes
    return SchedulerConfig(**values)  # type: ignore[arg-type]  # mixed value types, checked by the class itself


def request(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> Request:
    """A request with few words: unknown keywords go to SamplingParams."""
    names = {field.name for field in fields(Request)}
    outer = {name: changes.pop(name) for name in names if name in changes}
    params = SamplingParams(**({"max_tokens": 5, "eos_token_ids": frozenset([EOS])} | changes))  # type: ignore[arg-type]
    return Request(request_id=request_id, prompt=prompt, params=params, **({"arrival_s": 0.0} | outer))  # type: ignore[arg-type]


def once_stopping(engine: Engine, then: Callable[[], None]) -> None:
    """Call `then` as soon as the engine has been ordered to stop, which a hanging step does not show."""
    put = engine._inbox.put

    def put_and_call(message: InboxMessage) -> None:
        put(message)
        if isinstance(message, Stop):
            then()

    engine._inbox.put = put_and_call  # type: ignore[assignment, method-assign]


def fail(piece: SequenceSlice) -> str | None:
    """The failure that requests with top_k FAILS carry in them."""
    generated = piece.start + piece.num_tokens - piece.num_prompt
    return "made to fail" if getattr(piece.params, "top_k", 0) == FAILS and generated >= 3 else None


def drawn(asked: Request, tokens: list[int], seed: int) -> int:
    """What follows some tokens."""
    params = asked.params
    is_short = len(tokens) - len(asked.prompt) < params.min_tokens
    banned = params.eos_token_ids | params.stop_token_ids if is_short else frozenset()
    token = mix(seed, len(tokens), *tokens) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def solo(asked: Request, choice: int) -> tuple[list[int], FinishReason]:
    """What a choice must say and how it must end, computed without any scheduler."""
    if asked.params.beam is not None and asked.params.max_tokens:
        return solo_beams(asked)[choice]
    params, tokens = asked.params, with_vectors(asked.prompt, asked.spans)
    seed = choice_seed(params.seed, choice)
    output: list[int] = []
    while len(output) < params.max_tokens:
        if params.top_k == FAILS and len(output) >= 3:
            return output, FinishReason.ERROR
        token = drawn(asked, tokens, seed if params.temperature > 0 else 0)
        tokens.append(token)
        output.append(token)
        if token in params.eos_token_ids | params.stop_token_ids:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def solo_beams(asked: Request) -> list[tuple[list[int], FinishReason]]:
    """What a beam search must find: each beam's whole history is looked at anew for every token."""
    search, most = BeamSearch(asked.params), row_params(asked.params).logprobs
    assert most is not None
    beams = [with_vectors(asked.prompt, asked.spans)]
    while True:
        if asked.params.top_k == FAILS and len(beams[0]) - len(asked.prompt) >= 3:
            return [([], FinishReason.ERROR)] * asked.params.n
        for place, tokens in enumerate(beams):
            search.put(place, likeliest(drawn(asked, tokens, 0), tokens, most, VOCAB))
        if not (continuations := search.advance()):
            break
        beams = [[*beams[parent], token] for parent, token in continuations]
    answers = search.finished[: asked.params.n]
    return [([entry.token_id for entry in answer.logprobs], answer.reason) for answer in answers]


def written(plan: StepPlan) -> bytes:
    """A plan as bytes, with all that it refers to."""
    return pickle.dumps(plan)


class Driver:
    """A scheduler, its runner, and everything they said; `now` advances by 10 ms a step, or by what it costs."""

    def __init__(
        self,
        settings: SchedulerConfig,
        depth: int = 0,
        cost: Callable[[StepPlan], float] | None = None,
        *,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.scheduler = scheduler or Scheduler(settings)
        self.runner = FakeRunner(settings, vocab_size=VOCAB, fail=fail)
        self.depth = depth
        self.cost = cost
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.streams: dict[tuple[str, int], list[int]] = {}
        self.prompts: dict[tuple[str, int], PromptInfo] = {}
        self.ends: dict[tuple[str, int], TokenEvent] = {}
        self.known: dict[int, list[int]] = {}  # by the id under which a runner was told of them
        self.launched: deque[tuple[StepPlan, FakeStep]] = deque()
        self.rows = Rows()
        self.written: dict[int, tuple[bytes, list[SequenceSlice]]] = {}  # by step, as it was when it was launched
        self.transfers: list[Transfer] = []
        self.slots: dict[int, list[int]] = {}  # of the disk

    def add(self, asked: Request) -> None:
        self.scheduler.add(asked)
        self.requests[asked.request_id] = asked

    def take(self, events: Iterable[TokenEvent]) -> None:
        """Note events, holding them to the master invariant: nothing follows a terminal event."""
        for event in events:
            key = (event.request_id, event.choice)
            assert key not in self.ends, f"{key} spoke after its end"
            first = not self.streams.setdefault(key, [])
            self.streams[key] += event.token_ids
            if event.token_ids:
                assert (event.prompt is not None) == first, "prompt info rides on the first tokens, and only there"
            if event.prompt is not None:
                self.prompts[key] = event.prompt
            if event.finish_reason is not None:
                self.ends[key] = event

    def launch(self) -> bool:
        """Plan and launch a step, if the depth allows it and there is one."""
        if len(self.launched) > self.depth:
            return False
        self.now += 0.01 if self.cost is None else 0.0
        first = self.first_in_line()
        plan = self.scheduler.plan(self.now)
        if plan is None:
            may_wait = self.launched or not self.scheduler.has_work or self.scheduler.has_parked
            assert may_wait, "work, nothing in flight, and nothing planned"
            return False
        slices = self.rows.follow(plan)
        self.written[plan.step_id] = written(plan), slices
        self.launched.append((plan, self.runner.run(plan)))
        self.check_plan(plan, slices)
        self.check_progress(plan, slices, first)
        return True

    def commit(self) -> None:
        """Commit the oldest launched step."""
        plan, pending = self.launched.popleft()
        self.now += 0.01 if self.cost is None else self.cost(plan)
        result, (as_launched, slices) = pending.wait(), self.written.pop(plan.step_id)
        self.rows.learn(slices, result)
        self.take(self.scheduler.commit(plan, result, self.now))
        assert written(plan) == as_launched, "a plan in flight has changed"

    def run_out_of_memory(self, failure: str | None = None) -> set[str]:
        """The next step, or else the last one launched, has no memory; returns which requests ended on it."""
        if len(self.launched) <= self.depth and self.scheduler.plan(self.now) is None and not self.launched:
            return set()
        for _, pending in self.launched:
            self.runner._arriving = ()  # what it has loaded is lost, and states that it has written
            for block in pending.uncertain:
                assert self.runner._pages is not None
                self.runner._pages[block] = [-1] * self.runner._block_size
        self.launched.clear()
        events = self.scheduler.roll_back(self.now, failure)
        self.take(events)
        assert all(str(event.error) == failure for event in events)
        return {event.request_id for event in events}

    def step(self) -> None:
        """One turn of the engine's loop; a disk needs some for what it is asked."""
        launched = self.launch()
        if self.launched and (not launched or len(self.launched) > self.depth):
            self.commit()
        self.transfer(num_left=2 if launched else 0)

    def transfer(self, num_left: int = 0, *, is_good: bool = True) -> None:
        """The disk carries out what it was asked, but for the last so many."""
        self.transfers += self.scheduler.tiers.start(self.now)
        while len(self.transfers) > num_left:
            transfer = self.transfers.pop(0)
            if is_good:
                self.runner.transfer(transfer, self.slots)
            self.scheduler.transferred([(transfer, is_good)])

    def spill(self) -> int:
        """An idle moment: how many blocks are on their way to the disk."""
        assert not self.launched
        pairs = self.scheduler.tiers.spill()
        self.runner.run(StepPlan(-1, swap_out=tuple(pairs))).wait()
        self.transfer()
        return len(pairs)

    def drain(self, max_steps: int = 3000) -> None:
        """Run until nothing lives; a bounded number of steps must do."""
        while self.scheduler.has_work:
            self.step()
            max_steps -= 1
            assert max_steps, "requests did not end in a bounded number of steps"

    def check_plan(self, plan: StepPlan, slices: list[SequenceSlice]) -> None:
        """Budgets hold, and every position of a slice has a block."""
        settings = self.scheduler.config
        assert slices or plan.copies or plan.swap_in, "a step for nothing"
        assert plan.num_tokens == sum(piece.num_tokens for piece in slices)
        assert plan.num_tokens + sum(num for _, num in plan.drafts) <= settings.max_num_batched_tokens
        assert plan.num_samples == sum(len(piece.samples) for piece in slices)
        moved = [block for block, _ in plan.swap_out], [host for host, _ in plan.swap_in]
        assert all(
            len(set(ends)) == len(ends) for ends in ([h for _, h in plan.swap_out], [b for _, b in plan.swap_in])
        )
        assert all(0 <= block < settings.num_blocks for block in (*moved[0], *(b for _, b in plan.swap_in)))
        assert all(0 <= host < settings.num_host_blocks for host in (*moved[1], *(h for _, h in plan.swap_out)))
        named = {*(host for host, _ in plan.swap_in), *(host for _, host in plan.swap_out)}
        _, num_cached, num_held = self.scheduler.tiers.host.pool.counts
        assert num_held + num_cached >= len(named), "a host block is given back too early"
        assert len({piece.slot for piece in slices}) == len(slices) == plan.num_slices <= settings.max_num_seqs
        kinds = {seq.is_background for seq in self.scheduler._in_flight[-1].all_sequences}
        assert len(kinds) == 1, "a step is of the background or of all others"
        assert all(0 < num <= settings.num_speculative_tokens for _, num in plan.drafts)
        for index, piece in enumerate(slices):
            known = self.known.setdefault(piece.seq_id, [])
            seen = list(piece.tokens)
            assert seen[: len(known)] == known, "under one id tokens only ever come to those that are there"
            self.known[piece.seq_id] = seen
            assert piece.num_tokens > 0
            num_tokens = piece.num_tokens + dict(plan.drafts).get(index, 0)
            peak = piece.num_prompt + max(piece.params.max_tokens - 1, 0)
            assert piece.start + num_tokens <= peak, "the last token is never fed back"
            seq = self.scheduler._in_flight[-1].sequences[index]
            stop = blocks_for(piece.start + num_tokens, settings.block_size)
            groups = zip((1 << 30, *settings.windows), seq.kv.tables, self.runner.tables[piece.slot], strict=True)
            for window, held, table in list(groups)[not settings.has_full :]:  # the first group may have no blocks
                read = slice(max(piece.start - window + 1, 0) // settings.block_size, stop)
                assert held[read] == table[read], "a block was freed too early, or the runner lacks it"
                assert len(table) >= stop
            assert len(piece.tokens) >= piece.start + piece.num_tokens - max(self.depth, 1)

    def first_in_line(self) -> Sequence | None:
        """Who runs, still has known positions to compute, and stands before all others that have."""
        running = self.scheduler._queue.running
        return next((seq for seq in running if seq.status is Status.PREFILL), None)

    def check_progress(self, plan: StepPlan, slices: list[SequenceSlice], first: Sequence | None) -> None:
        """No starvation: the first in line computes a token in every step that decoding leaves room in."""
        limit = self.scheduler.config.max_num_batched_tokens
        queue = self.scheduler._queue
        if first is None or first.is_background or self.scheduler._budget.is_reduced or queue.may_yield:
            return  # the background waits for others, steps that were taken back are small, places of the fair change
        if divided(first.request.spans, first.num_planned + 1) is not None:
            return  # it waits for a step that has room for all of a span
        is_short = first.kv.tables[1:] and self.scheduler.kv.reach(first) <= first.num_planned
        if is_short or (self.scheduler.config.windows and not first.kv.blocks):
            return  # it waits for a block of each window, or was preempted for one
        num_tokens = sum(piece.num_tokens for piece in slices if piece.seq_id == first.seq_id)
        assert num_tokens or plan.num_tokens == limit or first.is_resuming, "the first in line was passed over"

    def check_totals(self) -> None:
        """All that counts tokens and ends agrees, to the last one, at every moment."""
        stats, requests = self.scheduler.stats, self.scheduler._queue.requests.values()
        living = sum(seq.num_generated for each in requests for seq in each if seq.beam_group is None)
        assert stats.generation_tokens == stats.request_generation_tokens.sum + living
        num_ended = sum(stats.finished.values())
        assert stats.request_generation_tokens.count == stats.request_prompt_tokens.count == num_ended == len(self.ends)
        assert stats.generation_tokens == sum(map(len, self.streams.values()))

    def check_streams(self, aborted: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Every choice of every request ended once and said what it would have said alone."""
        for request_id, asked in self.requests.items():
            for choice in range(asked.params.n):
                said = self.streams[request_id, choice]
                expected, reason = solo(asked, choice)
                if request_id in aborted:
                    assert said == expected[: len(said)]
                else:
                    assert said == expected
                    assert self.ends[request_id, choice].finish_reason == reason
        self.transfer()
        self.check_totals()
        check_scheduler(self.scheduler)
        assert self.scheduler.stats.blocks_held == self.scheduler.stats.host_blocks_held == 0
        assert self.scheduler.stats.num_running == self.scheduler.stats.num_waiting == 0
        assert self.scheduler.stats.num_preempted == self.scheduler.stats.num_waiting_tokens == 0
        assert self.scheduler.stats.num_background_running == self.scheduler.stats.num_background_waiting == 0
