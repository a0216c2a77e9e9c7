"""The event loop's side of the engine: submits requests, delivers events.

The engine thread calls `_deliver` once a step and nothing else here; all other code runs on the event loop. Each answer
has a mailbox, which holds at most the tokens that were asked for: a slow reader finds several steps merged, and the
engine never waits for it. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from engine.core.errors import ErrorValue, QuireError
from engine.core.types import AbortCause, FinishReason, Request, TokenEvent
from engine.handle import EngineHandle

TURN_READERS = 64  # that are woken in a turn of the loop, which then takes 2 ms

TakeNow = Callable[[list[TokenEvent]], bool]  # takes events out, or leaves all; returns whether the reader may sleep on


class Answer:
    """The mailbox of requests that are answered together, as a scope.

    Leaving the scope aborts the requests that have not ended.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._request_ids = [request.request_id for request in requests]
        self._alive = {(request.request_id, choice) for request in requests for choice in range(request.params.n)}
        self._events: list[TokenEvent] = []
        self._reader: asyncio.Future[None] | None = None  # set when it is to take events
        self._is_waking = False  # the reader waits for its turn
        self.take_now: TakeNow | None = None  # for a reader that waits
        self.has_begun = False  # an event has come

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close(AbortCause.DISCONNECT)

    def close(self, cause: AbortCause) -> None:
        """Abort the requests that have not ended. The first cause counts."""
        self._client.forget(self._request_ids)
        for request_id in {request_id for request_id, _ in self._alive}:
            self._client.engine.abort(request_id, cause)
        self._alive.clear()

    async def take(self) -> list[TokenEvent]:
        """Wait for events and return all of them, in order; [] if `take_now` took the last that matter."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        return events

    def put(self, event: TokenEvent) -> None:
        """Add an event."""
        if event.finish_reason is not None:
            self._alive.discard((event.request_id, event.choice))
        self.has_begun = True
        self._events.append(event)
        if self._reader is not None and not self._is_waking:
            self._is_waking = True
            self._client.wake(self)

    def wake(self) -> None:
        """Have the events read: where they are, if nothing has to wait for it, else by the reader's task."""
        self._is_waking = False
        reader = self._reader
        if reader is None or reader.done():  # its request was cancelled
            return
        try:
            if self.take_now is not None and self.take_now(self._events):
                return
        except Exception as error:  # any: it ends this answer alone
            reader.set_exception(error)
        else:
            reader.set_result(None)
        self._reader = None

    def fail(self, error: QuireError) -> None:
        """End open requests on an error, in the engine's place."""
        value = ErrorValue.of(error)
        for request_id, choice in sorted(self._alive):
            self.put(TokenEvent(request_id, choice, (), finish_reason=FinishReason.ERROR, error=value))

    def stop(self, request_id: str, choice: int, cause: AbortCause) -> None:
        """End a choice, for what is in its text."""
        self._client.engine.abort(request_id, cause, choice)


class EngineClient:
    """Submits requests and hands every event to its answer."""

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.is_abandoned = False  # the engine did not stop in time; its events are ignored
        self._answers: dict[str, Answer] = {}  # by request id
        self._loop: asyncio.AbstractEventLoop  # that `start` is called in
        self._ended = asyncio.Event()
        self._waking: deque[Answer] = deque()  # whose readers have events

    @property
    def num_open(self) -> int:
        """Return the number of open requests of the engine."""
        return len(self._answers)

    def start(self) -> None:
        """Start the engine and listen to it on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver, self._on_end)

    async def stop(self, drain_s: float) -> None:
        """Refuse new work, let open answers finish for `drain_s`, abort the rest; return when the engine has stopped.

        No thread waits for it: if a step hangs, the awaiting task may be cancelled and the process can end.
        """
        self.engine.order_stop(drain_s)
        if self.engine.is_running and not self.is_abandoned:
            await self._ended.wait()

    def abandon(self, error: QuireError) -> None:
        """End every open answer on `error`, and ignore the engine from now on."""
        self.is_abandoned = True
        for answer in set(self._answers.values()):
            answer.fail(error)

    def submit(self, requests: Sequence[Request]) -> Answer:
        """Submit requests, all or none, and return their answer, to be entered.

        Raises what Engine.submit raises.
        """
        self.engine.submit(*requests)
        answer = Answer(self, requests)
        self._answers.update((request.request_id, answer) for request in requests)  # before the loop can deliver
        return answer

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop events of these requests from now on."""
        for request_id in request_ids:
            self._answers.pop(request_id, None)

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        """Engine thread: schedule the delivery of a step's events."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _on_end(self) -> None:
        """Engine thread: report its end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ended without the engine
            self._loop.call_soon_threadsafe(self._ended.set)

    def _dispatch(self, events: Iterable[TokenEvent]) -> None:
        if self.is_abandoned:
            return
        for event in events:
            answer = self._answers.get(event.request_id)
            if answer is not None:
                answer.put(event)

    def wake(self, answer: Answer) -> None:
        """Wake an answer's reader, behind those that wait for it already."""
        self._waking.append(answer)
        if len(self._waking) == 1:
            self._loop.call_soon(self._wake_some)

    def _wake_some(self) -> None:
        """Wake the readers of this turn; the events of the others gather meanwhile, and other requests have the loop."""
        for _ in range(min(len(self._waking), TURN_READERS)):
            self._waking.popleft().wake()
        if self._waking:
            self._loop.call_soon(self._wake_some)
