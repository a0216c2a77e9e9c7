"""The only way into the engine thread: requests, aborts, calls and the order to stop.

Messages keep their order. Any thread may put; only the engine thread takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from engine.core.config import SchedulerConfig
from engine.core.errors import QuireError
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner
from engine.core.types import AbortCause, Request
from engine.handle import EngineFacts
from engine.system.calls import T, settle


class Abort(NamedTuple):
    """End a request, or one of its choices."""

    request_id: str
    cause: AbortCause
    choice: int | None


class Stop(NamedTuple):
    """Finish open requests, until `deadline_s` at the latest (engine's clock), then end."""

    deadline_s: float


class EngineCall(NamedTuple):
    """Call a function with the engine's parts between two steps, and return its result."""

    task: Callable[[Scheduler, Runner], Any]
    outcome: Future[Any]

    def run(self, scheduler: Scheduler, runner: Runner) -> None:
        """Run the call on the engine thread; an exception goes to the caller."""
        if self.outcome.set_running_or_notify_cancel():
            settle(self.outcome, partial(self.task, scheduler, runner))


class EngineThread(Protocol):
    """The part of an engine that commands and what they open use."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def facts(self) -> EngineFacts: ...

    def between_steps(self, task: Callable[[Scheduler, Runner], T]) -> Future[T]:
        """Run a quick task on the engine's thread."""


class Fail(NamedTuple):
    """End the engine with an error that another thread has noticed."""

    error: QuireError


class Submission(NamedTuple):
    """Add a request, which names what `held` keeps alive."""

    request: Request
    held: tuple[object, ...]


InboxMessage = Submission | Abort | EngineCall | Stop | Fail


class Inbox:
    """A queue that can refuse requests; so many of them, further inputs and tokens are not taken yet."""

    def __init__(self, changed: threading.Condition) -> None:
        """`changed` is what the engine thread waits for."""
        self._changed = changed
        self._messages: deque[InboxMessage] = deque()
        self._refusal: Callable[[], QuireError] | None = None
        self._is_closed = False
        self.num_requests = self.num_further = self.num_tokens = 0

    def put_requests(self, submissions: Sequence[Submission]) -> None:
        """Queue all of these requests, or raise the reason for refusing them."""
        with self._changed:
            if self._refusal is not None:
                raise self._refusal()
            self.num_requests += len(submissions)
            self.num_further += sum(request.is_further for request, _ in submissions)
            self.num_tokens += sum(len(request.prompt) for request, _ in submissions)
            self._messages.extend(submissions)
            self._changed.notify()

    def put(self, message: Abort | EngineCall | Stop | Fail) -> None:
        """Queue a message; it is never refused, but after the end a call is cancelled."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()
        if self._is_closed:
            self.close()

    def close(self) -> list[InboxMessage]:
        """Note that the engine has ended; return the remaining messages, with calls cancelled."""
        self._is_closed = True
        messages = self.take()
        for message in messages:
            if isinstance(message, EngineCall):
                message.outcome.cancel()
        return messages

    def refuse(self, why: Callable[[], QuireError]) -> None:
        """Refuse requests from now on, each with a new `why()`; the latest call applies."""
        with self._changed:
            self._refusal = why

    @property
    def has_messages(self) -> bool:
        """Return whether there are some to take."""
        return bool(self._messages)

    def wait(self, timeout_s: float) -> None:
        """Wait so long at most until there are some."""
        with self._changed:
            if not self._messages:
                self._changed.wait(timeout_s)

    def take(self) -> list[InboxMessage]:
        """Return all messages."""
        if not self._messages:
            return []
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            self.num_requests = self.num_further = self.num_tokens = 0
            return messages
