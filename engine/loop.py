"""The engine: turns requests into token events, on the engine thread.

    inbox -> scheduler.add / abort -> plan -> runner.run -> commit -> deliver, once a step

The thread (arbiter.py) owns the scheduler and the runner. Other threads hold the engine as an EngineHandle (handle.py). It
knows no HTTP and no tensors: the runner is an argument. `depth` is how many further steps are planned and launched before it
waits for the oldest one (overlap); 0 takes them one at a time, and so do engines that have work beside others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from engine.arbiter import Arbiter
from engine.control import Control
from engine.core.budget import SHARE, Beside, image_share
from engine.core.errors import (
    CopyError,
    DeviceLostError,
    DeviceMemoryError,
    EngineDeadError,
    ErrorValue,
    HeadlessModelError,
    QuireError,
    ShuttingDownError,
)
from engine.core.kv.tiers import Transport
from engine.core.page_table import waste
from engine.core.scheduling.admission import check_ids, check_request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.spans import Span
from engine.core.stats import FailureCause
from engine.core.step import PendingStep, Runner, StepPlan
from engine.core.types import AbortCause, FinishReason, Request, StepEvents, TokenEvent
from engine.handle import Command, Deliver, EngineFacts, EngineHealth, LoadedAdapter
from engine.inbox import Abort, EngineCall, Fail, Inbox, InboxMessage, Stop, Submission
from engine.outbound.offload import Offload
from engine.overload import NO_LIMITS, OverloadControl, QueueLimits
from engine.resources import EngineResources
from engine.system.calls import T, on_thread

if TYPE_CHECKING:
    from engine.images import VectorMaker
    from engine.outbound.contents import Contents
    from engine.outbound.kv_events import KVEvents

log = logging.getLogger("quire.engine")

_RATE_MEMORY = 0.95  # weight of the past in the moving average of tokens per second
_GROWTH = 1.05  # of what a step of decodes is thought to take, at most, from one to the next
_LITTLE = 1.2  # times what a step was planned to take: it goes on so long before it is cut
_PIECE_S = 0.02  # of work that may pause, where no step runs: a message waits no longer
_WAIT_S = 0.002  # for a message, where requests wait for blocks that imports hold: engines beside it wait no longer


class Outbound(NamedTuple):
    """What takes K/V, or news of it, out of the process."""

    transports: Mapping[str, Transport] = MappingProxyType({})
    kv_events: KVEvents | None = None


@dataclass(slots=True)
class _Launched:
    """A step between its plan and its commit."""

    plan: StepPlan
    step: PendingStep
    begun_s: float
    paused_at_s: float | None = None  # when it last stopped, of one that may


class _Open(NamedTuple):
    """A choice without a terminal event."""

    num_prompt: int
    held: tuple[object, ...]  # keeps what its request names


class Engine:
    """The EngineHandle of an engine in this process."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        facts: EngineFacts,
        *,
        depth: int = 0,
        limits: QueueLimits = NO_LIMITS,
        resources: EngineResources | None = None,
        vision: VectorMaker | None = None,
        outbound: Outbound = Outbound(),  # noqa: B008 - immutable
        clock: Callable[[], float] = time.monotonic,
        arbiter: Arbiter | None = None,
        share: float = 1.0,
    ) -> None:
        """`arbiter` has the thread, of which this engine has a `share`; without one, it has a thread alone."""
        self.config = scheduler.config
        self.stats = scheduler.stats
        self.clock = clock
        self._resources = resources or EngineResources()
        self._resources.grammars.observe = self.stats.grammar_s.observe
        transports, kv_events = outbound
        self.facts = replace(
            facts,
            max_loras=self._resources.adapters.max_loras,
            kv_events=None if kv_events is None else kv_events.config,
        )
        self._scheduler = scheduler
        self._runner = runner
        self._vision = vision
        if vision is not None:
            scheduler.missing.has = vision.has
        self._image_s = 0.0  # for work on an image behind the last step; 0 if none ran
        self._owed_s = 0.0  # that a paused step is to go on for before another one is launched beside it
        self._offload = Offload(scheduler, runner, transports, clock) if transports else None
        self._depth = depth
        self._kv_events = kv_events
        self._contents: Contents | None = None
        if kv_events is not None:
            from engine.outbound.contents import Contents

            contents = self._contents = Contents(scheduler.kv, kv_events.put)
            kv_events.ask_snapshot = partial(self.between_steps, lambda *_: contents.send_snapshot())
        self._overload = OverloadControl(scheduler.config, scheduler.stats, limits)
        self._arbiter = arbiter or Arbiter()
        self.share, self.used_s = share, 0.0
        self._beside: Beside | None = None
        self._decode_s = 0.0  # of steps with decodes alone; 0 if the last step had none
        self._inbox = Inbox(self._arbiter.changed)
        self._launched: deque[_Launched] = deque()
        self._control = Control(self, self._resources)
        self._open: dict[tuple[str, int], _Open] = {}  # by (request id, choice); engine thread only
        self._deliver: Deliver | None = None
        self._on_end: Callable[[], None] = lambda: None
        self._is_second_try = False  # the last step was rolled back, out of memory; engine thread only
        self._stop_at_s: float | None = None  # engine thread only
        self._is_started = self._has_begun = False
        self._ended = threading.Event()
        self._progress_s = clock()
        self._error: QuireError | None = None

    # -- any thread --------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Return the adapters that requests may name."""
        return self._resources.adapters.loaded

    def start(self, deliver: Deliver, on_end: Callable[[], None] = lambda: None) -> None:
        """Have the thread drive this engine."""
        self._deliver = deliver
        self._on_end = on_end
        if self._kv_events is not None:
            self._kv_events.start()
        self._is_started = True
        self._arbiter.add(self)

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none; see EngineHandle."""
        if self.config.whole_step:  # each token of a prompt attends to all others
            wholes = [replace(each, spans=(Span(0, len(each.prompt), b"", is_atomic=True),)) for each in requests]
            requests = tuple(wholes)
        for request in requests:
            asks_head = request.params.max_tokens or request.params.prompt_logprobs is not None
            if asks_head and not self.facts.generates:
                raise HeadlessModelError(self.facts.vectors.served)
            check_ids(request.prompt, self.facts.vocab_size, "prompt")
            check_request(request, self.config)
        self._overload.check(
            self.clock(),
            sum(len(request.prompt) for request in requests),
            num_unseen=self._inbox.num_requests,
            num_unseen_further=self._inbox.num_further,
            num_unseen_tokens=self._inbox.num_tokens,
        )
        # Images are held apart until a request ends, and no longer.
        bare = [replace(request, images=()) if request.images else request for request in requests]
        self._inbox.put_requests(list(map(Submission, bare, map(self._resources.hold, requests))))

    def abort(self, request_id: str, cause: AbortCause, choice: int | None = None) -> None:
        """End a request (or one of its choices) early."""
        self._inbox.put(Abort(request_id, cause, choice))

    def fail(self, error: QuireError) -> None:
        """End the engine, because of something that its thread cannot notice."""
        self._inbox.put(Fail(error))

    def control(self, command: Command[T]) -> Future[T]:
        """Carry out a command."""
        return self._control(command)

    def between_steps(self, task: Callable[[Scheduler, Runner], T]) -> Future[T]:
        """Run a quick task on the engine's thread, for a part of the engine; cancelled if the engine ends first."""
        outcome: Future[T] = Future()
        self._inbox.put(EngineCall(task, outcome))
        return outcome

    def health(self) -> EngineHealth:
        """Return whether the engine lives and moves, without waiting for it."""
        error = None if self._error is None else str(self._error)
        alive = error is None and self.is_running and self._arbiter.is_alive
        busy = alive and self._scheduler.has_work  # what is in the inbox waits for a wake-up, not for a step
        since = max(self.clock() - self._progress_s, 0.0) if busy else 0.0
        return EngineHealth(alive, busy, since, error)

    @property
    def is_running(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._is_started and not self._ended.is_set()

    def order_stop(self, drain_s: float) -> None:
        """Refuse new requests; let open ones finish for `drain_s`, then abort them and end the thread."""
        end_s = self.clock() + drain_s
        self._inbox.refuse(
            lambda: ShuttingDownError(
                "The server is shutting down; send the request to another one.",
                retry_after_s=max(end_s - self.clock(), 1.0),
            )
        )
        self._inbox.put(Stop(end_s))

    def stop(self, drain_s: float) -> None:
        """Order the thread to end and wait for it, forever if a step hangs; release an engine that was never started."""
        self.order_stop(drain_s)
        if self._is_started:
            self._ended.wait()
        elif not self._ended.is_set():
            self._release()

    # -- engine thread -----------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Return whether there are messages or work, or the runner has to begin."""
        return self._scheduler.has_work or self._inbox.has_messages or not self._has_begun

    @property
    def is_urgent(self) -> bool:
        """Return whether some of that is not background work."""
        return self._scheduler.has_foreground or self._inbox.has_messages

    @property
    def stream_s(self) -> float:
        """Return the seconds of a step of its streams; 0 while it has none."""
        return self._decode_s if self._scheduler.has_foreground else 0.0

    @property
    def is_seen(self) -> bool:
        """Return whether there is any request but those that are held."""
        return self._scheduler.is_seen

    @property
    def target_itl_s(self) -> float | None:
        """Return the gap between two tokens that its streams aim at."""
        return self.config.target_itl_s

    def turn(self, beside: Beside | None) -> bool:
        """Take a turn beside other engines; return whether there will be another. An error ends this engine alone."""
        try:
            if not self._has_begun:
                self._has_begun = True
                self._runner.begin()
            if beside is not self._beside:
                self._beside = beside
                self._scheduler.plan_beside(beside)
            self._turn()
            if self._stop_at_s is None or self._scheduler.has_work:
                return True
        except Exception as error:  # any: open requests end with an event
            log.critical("The engine died: %s: %s", type(error).__name__, error)
            log.debug("The engine died here:", exc_info=True)
            self._die(error)
        try:
            on_thread("quire-engine-end", self._end)
        except RuntimeError:  # the system has no thread left
            self._end()
        return False

    # -- a thread that ends it ---------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Keep what outlives the engine, and close everything that it has been given."""
        try:
            if self._error is None:
                self._count_leaks()
                if self._offload is not None:
                    self._offload.flush()
        except Exception as error:  # any: as in a turn
            self._die(error)
        finally:
            self._release()
            self._on_end()

    def _release(self) -> None:
        """Close what the engine has been given; an error of one keeps none of the others open."""
        self._inbox.close()
        for part in (self._offload, self._kv_events, self._vision, self._runner, self._control):
            if part is not None:
                _close(part)
        self._ended.set()

    # -- engine thread, a turn ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Take in messages, launch a step, commit the oldest, deliver the events."""
        messages, events = self._inbox.take(), StepEvents()
        if self._offload is not None:
            self._offload.learn()  # before new requests look for their blocks
        if messages or self._stop_at_s is not None:
            events.entries += self._take_in(messages)
        try:
            self._step(events)
        except DeviceMemoryError as error:
            self._roll_back(error, events)
        self._tell(events)
        if self._vision is not None and (digests := self._scheduler.missing.digests):
            self._vision.advance(list(digests), self._image_s or _PIECE_S)
        if self._offload is not None:
            self._offload.exchange()
        if self._contents is not None:
            self._contents.flush()

    def _step(self, events: StepEvents) -> None:
        """Launch a step, commit the oldest."""
        if self._scheduler.deadlines is not None:
            events.entries += self._scheduler.drop_hopeless(self.clock())
        self._image_s = 0.0
        plan = self._scheduler.plan(self.clock()) if not self._launched or self._has_room() else None
        if plan is not None:
            if self._contents is not None:
                self._contents.flush()  # blocks are lost before they are written again
            begun_s = self.clock()  # before run: without a device queue, run itself is the step
            try:
                self._launched.append(_Launched(plan, self._runner.run(plan), begun_s))
            except DeviceMemoryError:
                while self._launched:  # what was launched before it is good
                    events.entries += self._commit(self._launched.popleft()).entries
                raise
        if self._launched and (plan is None or len(self._launched) > self._depth):
            if self._launched[0].step.may_pause:
                self._go_on(events)
                return
            events.entries += self._commit(self._launched.popleft()).entries
            while self._launched and self._beside is not None:
                events.entries += self._commit(self._launched.popleft()).entries
        elif plan is None and self._scheduler.has_work and not self._is_waiting():
            raise RuntimeError("requests wait, nothing runs, and the scheduler plans nothing")

    def _has_room(self) -> bool:
        """Return whether one more step may be planned: beside one that has paused in a long text, one with others.

        Then that goes on for as long as the other one took, so it takes at most twice its time.
        """
        if not self._launched[0].step.may_pause:
            return True
        return self._scheduler.has_long and len(self._launched) == 1 and self._owed_s <= 0

    def _go_on(self, events: StepEvents) -> None:
        """Let the newest step go on for a turn's time, and commit it if it is complete, or not needed."""
        newest, beside, now = self._launched[-1], self._beside, self.clock()
        if newest.paused_at_s is not None:
            is_needed = self._scheduler.awaits_newest
            away_s = now - (newest.paused_at_s if is_needed else newest.begun_s)
            newest.begun_s += away_s
            self._scheduler.paused(away_s)
            if not is_needed:
                newest.step.close()
        piece_s = beside.prompts_s(beside.streams_s) if beside and beside.streams_s else _PIECE_S
        # One that was planned to fit, and takes a little longer, is not cut: its rest would take another turn.
        is_done = newest.step.advance(piece_s if self._scheduler.newest_s > _LITTLE * piece_s else _LITTLE * piece_s)
        newest.paused_at_s = self._progress_s = self.clock()
        if len(self._launched) > 1:
            self._owed_s = newest.paused_at_s - newest.begun_s
        else:
            self._owed_s -= newest.paused_at_s - now
        if is_done:
            events.entries += self._commit(self._launched.pop()).entries

    def _is_waiting(self) -> bool:
        """Return whether requests wait for vectors, or have waited a moment for blocks that are filled or held."""
        if self._scheduler.missing.digests or (self._offload and self._offload.wait_for_loads()):
            return True
        is_importing = bool(self._scheduler.kv.imports.held)
        if is_importing:  # other threads fill the blocks, and free them by a message
            self._inbox.wait(_WAIT_S)
        return is_importing

    def _roll_back(self, error: DeviceMemoryError, events: StepEvents) -> None:
        """Try a smaller step after one did not fit the device's memory; if that fails, end a request."""
        while self._launched:  # they built on it; the device has to be done with them before they are planned again
            with suppress(DeviceMemoryError):
                self._launched.popleft().step.wait()
        if isinstance(error, CopyError):
            log.error("K/V could not be copied (%s): from now on it is recomputed instead", error)
            events.entries += self._scheduler.roll_back(self.clock())
            self._scheduler.give_up_copies()
            return
        self.stats.out_of_memory_steps += 1
        failure = None
        if self._is_second_try:
            failure = f"The device has no memory left to compute this request, even in a smaller step ({error})."
        log.warning("A step did not fit the device's memory (%s): %s", error, failure or "a smaller one is tried")
        self._is_second_try = True
        events.entries += self._scheduler.roll_back(self.clock(), failure)

    def chores(self) -> Iterator[None]:
        """Let the runner prepare and look for leaks, in parts between which messages are looked for."""
        self.stats.blocks_waste = waste(self._scheduler.recent_lengths, self.config.block_size)
        while (self._offload and self._offload.spill()) or self._runner.use_idle_moment():
            yield
        self._count_leaks()
        if self._contents is not None:
            self._contents.flush()

    def _tell(self, events: StepEvents) -> None:
        for event in events.entries:
            if isinstance(event, TokenEvent) and event.finish_reason is not None:
                self._open.pop((event.request_id, event.choice), None)
                if self._vision is not None and not self._scheduler.has_spans:
                    self._vision.close()  # who waited for it has left
        if events.entries and self._deliver is not None:
            self._deliver(events)

    def _take_in(self, messages: list[InboxMessage]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        if not self._scheduler.has_work:
            self._progress_s = self.clock()
        self._note_open(messages)
        for message in messages:
            if isinstance(message, Submission):
                self._scheduler.add(message.request)
            elif isinstance(message, Abort):
                events += self._scheduler.abort(message.request_id, message.cause, self.clock(), message.choice)
            elif isinstance(message, EngineCall):
                message.run(self._scheduler, self._runner)
            elif isinstance(message, Fail):
                raise message.error
            else:
                self._stop_at_s = message.deadline_s
        if self._stop_at_s is not None and self.clock() >= self._stop_at_s:
            events += self._scheduler.abort_all(AbortCause.SHUTDOWN, self.clock())
        return events

    def _commit(self, launched: _Launched) -> StepEvents:
        plan, begun_s = launched.plan, launched.begun_s
        result = launched.step.wait()
        self._is_second_try = False
        now = self.clock()
        # With overlap a step begins, as far as the device goes, when the one before it ends.
        seconds = now - (begun_s if launched.paused_at_s else max(begun_s, self.stats.last_step_s))
        self.stats.step_s.observe(seconds)
        if not (plan.slots and plan.chunks):
            # The least of late: others that take cores for a moment make a step longer.
            self._decode_s = min(seconds, _GROWTH * self._decode_s or seconds) if plan.slots else 0.0
        if self._scheduler.missing.digests:
            self._image_s = self._beside_s(plan, seconds) if plan.slots else seconds
        if seconds > 0:
            rate, memory = plan.num_tokens / seconds, _RATE_MEMORY if self.stats.tokens_per_s else 0.0
            self.stats.tokens_per_s = memory * self.stats.tokens_per_s + (1 - memory) * rate
        self.stats.last_step_s = self._progress_s = now
        return self._scheduler.commit(plan, result, now)

    def _beside_s(self, plan: StepPlan, seconds: float) -> float:
        """Return how long to work on an image behind a step.

        A target ITL is kept as with prompts. Behind a step that prompts make longer, an image has a share of what they take.
        """
        beside = self._beside or Beside(0.0, self.config.target_itl_s)
        if beside.target_itl_s is not None:
            return beside.prompts_s(seconds + beside.streams_s)
        least_s = SHARE * (seconds - self._decode_s if plan.chunks else self._decode_s)
        return max((1 + image_share(len(plan.slots))) * self._decode_s - seconds, least_s)

    def _count_leaks(self) -> None:
        """Count, without work, what is held all the same. A leak is a bug, but no reason to stop serving."""
        num_leaked = self._scheduler.kv.num_leaked
        if num_leaked:
            self.stats.integrity_failures += 1
            log.error("%d blocks or rows are held by nothing (please report this)", num_leaked)

    def _note_open(self, messages: list[InboxMessage]) -> None:
        """Note the choices that must get a terminal event, whatever happens."""
        for message in messages:
            if isinstance(message, Submission):
                request, held = message
                keys = [(request.request_id, choice) for choice in range(request.params.n)]
                self._open.update(dict.fromkeys(keys, _Open(len(request.prompt), held)))

    def _die(self, cause: Exception) -> None:
        """Fail every open request and refuse new ones, without the scheduler, which may have failed."""
        reason = str(cause) if isinstance(cause, DeviceLostError) else f"{type(cause).__name__}: {cause}"
        self._error = EngineDeadError(f"The engine stopped on an internal error ({reason}).")
        self._inbox.refuse(lambda: EngineDeadError(str(self._error)))
        self._note_open(self._inbox.close())
        for each in self._open.values():
            self.stats.end(FinishReason.ERROR, 1, each.num_prompt, 0)
        self.stats.failed[FailureCause.ENGINE_DEATH] += len(self._open)
        error = ErrorValue.of(self._error)
        self._tell(
            StepEvents(
                TokenEvent(request_id, choice, (), finish_reason=FinishReason.ERROR, error=error)
                for request_id, choice in sorted(self._open)
            )
        )


def _close(part: Offload | KVEvents | VectorMaker | Runner | Control) -> None:
    try:
        part.close()
    except Exception as error:  # any: the other parts are closed too
        log.error("%s could not be closed: %s: %s", type(part).__name__, type(error).__name__, error)  # noqa: TRY400 - one line
