"""Shares the event loop among requests: one works in each turn of the loop, and callers are served in rotation.

Without this, all requests that arrived in one turn would be worked on in that turn, and every probe and stream would wait for
their sum. Probes and the events of streams wait for no turn. Event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Hashable
from contextvars import ContextVar
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Generic, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.middleware import RequestState
from server.protocol.errors import STATE

SMALL_BYTES = 4096  # of a body; a caller's smaller requests do not wait for its larger ones

CALLER: ContextVar[str] = ContextVar("caller", default="")  # of this request: its account or, without keys, its address
_QUEUE: ContextVar[Hashable] = ContextVar("queue", default="")

Item = TypeVar("Item")


class Rotation(Generic[Item]):
    """Items in queues, one of which has the next turn."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Item]] = {}

    def put(self, queue: Hashable, item: Item) -> None:
        """Add an item to the end of a queue."""
        self._queues.setdefault(queue, deque()).append(item)

    def take(self) -> Item | None:
        """Remove and return the next item; its queue goes behind the others."""
        for queue, items in self._queues.items():
            del self._queues[queue]
            item = items.popleft()
            if items:
                self._queues[queue] = items
            return item
        return None


class Turns:
    """The turns of the event loop, each for one request."""

    def __init__(self) -> None:
        self._holder: object = None  # the task whose turn it is
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()

    async def take(self) -> None:
        """Wait for a turn; this task has it until its next wait for anything else."""
        task = asyncio.current_task()
        if self._holder is task:
            return
        loop = asyncio.get_running_loop()
        if self._holder is not None:
            granted = loop.create_future()
            self._waiting.put(_QUEUE.get(), granted)
            await granted
        else:
            loop.call_soon(self._pass_on)
        self._holder = task

    def _pass_on(self) -> None:
        """Give the loop's next turn to a task that waits."""
        self._holder = None
        while granted := self._waiting.take():
            if not granted.done():  # else its task was cancelled
                self._holder = granted
                granted.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)  # runs behind the task
                return


class TurnTaker:
    """ASGI middleware: names the caller of a request, and begins it in a turn."""

    def __init__(self, app: ASGIApp, turns: Turns, open_paths: Collection[str]) -> None:
        """Requests of `open_paths` wait for nothing."""
        self._app, self._turns, self._open_paths = app, turns, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request when its turn has come."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = _caller(scope)
            CALLER.set(caller)
            _QUEUE.set((caller, _is_small(scope)))
            await self._turns.take()
        await self._app(scope, receive, send)


def _caller(scope: Scope) -> str:
    """Return the account's name or, without one, the client's address."""
    state: RequestState = scope[STATE]
    account = state.account
    return _network((scope.get("client") or ("",))[0]) if account is None else account.tenant.name


@lru_cache(maxsize=1024)
def _network(host: str) -> str:
    """Return an address, of IPv6 its network, all of which one client may have."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))


def _is_small(scope: Scope) -> bool:
    """Return whether a request announces a small body, or none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return bool(value.isdigit() and len(value) < 9 and int(value) <= SMALL_BYTES)
        if name == b"transfer-encoding":
            return False
    return True
