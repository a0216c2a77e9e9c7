"""The event loop's side of the engine: requests go in, each answer has one mailbox, leaving aborts.

The engine thread calls `_deliver` once a step and touches nothing else here; all other code runs on the event loop.
A mailbox keeps what its reader has not taken yet, at most the tokens that were asked for: a slow reader finds several
steps merged, and the engine never waits for it. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.core.errors import QuireError
from engine.core.types import AbortCause, FinishReason, Request, TokenEvent
from engine.loop import Engine


class PromptEvent(NamedTuple):
    """An event and which of the answer's prompts it belongs to."""

    prompt: int
    event: TokenEvent


class Answer:
    """The mailbox of one or more requests that are answered together, as a scope: leaving it ends what still runs."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._client = client
        self._prompts = {request.request_id: index for index, request in enumerate(requests)}
        self._alive = {(request.request_id, choice) for request in requests for choice in range(request.params.n)}
        self._events: list[PromptEvent] = []
        self._reader: asyncio.Future[None] | None = None  # who waits for the next event
        self.has_begun = False  # something has been heard

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close(AbortCause.DISCONNECT)

    def close(self, cause: AbortCause) -> None:
        """Nobody waits any more: end what still runs. The one way out, whatever the reason; the first one counts."""
        self._client.forget(self._prompts)
        for request_id in {request_id for request_id, _ in self._alive}:
            self._client.engine.abort(request_id, cause)
        self._alive.clear()

    async def take(self) -> list[PromptEvent]:
        """Wait until something has happened and return all of it, in order."""
        if not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        events, self._events = self._events, []
        return events

    def put(self, event: TokenEvent) -> None:
        """One more event for the reader."""
        if event.finish_reason is not None:
            self._alive.discard((event.request_id, event.choice))
        self.has_begun = True
        self._events.append(PromptEvent(self._prompts[event.request_id], event))
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def fail(self, error: QuireError) -> None:
        """End what still runs on an error, in the engine's place."""
        for request_id, choice in sorted(self._alive):
            self.put(TokenEvent(request_id, choice, (), finish_reason=FinishReason.ERROR, error=error))

    def stop(self, event: TokenEvent) -> None:
        """A stop string was found in this event's choice; its other choices go on."""
        self._client.engine.abort(event.request_id, AbortCause.STOP_STRING, event.choice)


class EngineClient:
    """Submits requests and hands every event to the answer that waits for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_draining = False
        self.is_abandoned = False  # the engine did not stop in time, and nothing it does counts any more
        self._answers: dict[str, Answer] = {}  # by request id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Engine requests that somebody waits for."""
        return len(self._answers)

    def start(self) -> None:
        """Start the engine and listen to it on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start(self._deliver, self._on_end)

    async def stop(self, drain_s: float) -> None:
        """Refuse new work, let open answers finish for `drain_s`, end the rest. Returns when the engine has stopped.

        No thread waits for it: if a step hangs, whoever awaits this may give up, and the process can end.
        """
        self.is_draining = True
        self.engine.order_stop(drain_s)
        if self.engine.is_running and not self.is_abandoned:
            await self._ended.wait()

    def abandon(self, error: QuireError) -> None:
        """End every open answer on `error`, since the engine does not; what it still says is ignored."""
        self.is_abandoned = True
        for answer in set(self._answers.values()):
            answer.fail(error)

    def submit(self, requests: Sequence[Request]) -> Answer:
        """Hand requests to the engine, all or none, and return their answer, to be entered as a scope.

        Raises what Engine.submit raises.
        """
        self.engine.submit(*requests)
        answer = Answer(self, requests)
        self._answers.update((request.request_id, answer) for request in requests)  # before the loop can deliver
        return answer

    def forget(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        for request_id in request_ids:
            self._answers.pop(request_id, None)

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        """Engine thread: one crossing a step."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._dispatch, events)

    def _on_end(self) -> None:
        """Engine thread, at its end."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ended without the engine
            self._loop.call_soon_threadsafe(self._ended.set)

    def _dispatch(self, events: Iterable[TokenEvent]) -> None:
        if self.is_abandoned:
            return
        for event in events:
            answer = self._answers.get(event.request_id)
            if answer is not None:
                answer.put(event)
