"""Finds accesses to memory that nothing orders, whatever the device would have made of them.

Every stream, and the host, has a clock: a vector that says how much of every other's work has certainly ended. A launch
happens after all that its stream knows of; an event carries a stream's knowledge to whatever waits for it. Each byte
remembers its last write and its last reads. An access is a fault if the one before it is not known to have ended: one run
therefore speaks for every order in which the device could do the same work.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

HOST = 0  # the actor that is no stream
_MOST_ACTORS = 64
ROOT = Path(__file__).parents[1]
Clock = NDArray[np.int64]
Region = slice | NDArray[np.int64] | NDArray[np.bool_]  # bytes of one memory


class OrderError(AssertionError):
    """Two accesses that may happen in either order, or a call that a graph's recording forbids."""


class Ticket(NamedTuple):
    """One launch: its actor, and its number among the actor's."""

    actor: int
    tick: int


class Memory:
    """The bytes of one allocation."""

    def __init__(self, num_bytes: int, actor: int, place: str) -> None:
        """`actor` allocates it, and gets it back."""
        self.actor, self.place = actor, place
        self.writer = np.zeros(num_bytes, np.uint8)
        self.written = np.zeros(num_bytes, np.int64)
        self.reads: dict[int, NDArray[np.int64]] = {}  # ticks, by actor
        self.last: dict[int, int] = {}  # tick of the last access, by actor


class Order:
    """The clocks of one process."""

    def __init__(self) -> None:
        self.clocks: list[Clock] = [np.zeros(_MOST_ACTORS, np.int64)]
        self._places: dict[Ticket, str] = {}

    def add_actor(self) -> int:
        """Return a new stream's number; it begins after what the host has done."""
        self.clocks.append(self.clocks[HOST].copy())
        return len(self.clocks) - 1

    def launch(self, actor: int, place: str) -> Ticket:
        """Return a ticket for work that the host launches on a stream, or does."""
        clock = self.clocks[actor]
        if actor != HOST:
            np.maximum(clock, self.clocks[HOST], out=clock)
        clock[actor] += 1
        ticket = Ticket(actor, int(clock[actor]))
        self._places[ticket] = place
        return ticket

    def join(self, actor: int, known: Clock) -> None:
        """Have an actor go on after all that a clock knows."""
        np.maximum(self.clocks[actor], known, out=self.clocks[actor])

    def knows(self, actor: int, other: Ticket) -> bool:
        """Return whether an actor goes on after another's launch."""
        return bool(self.clocks[actor][other.actor] >= other.tick)

    def access(self, ticket: Ticket, memory: Memory, region: Region, *, is_write: bool) -> None:
        """Note an access. Raises OrderError if one before it may still be under way."""
        actor, tick = ticket
        clock = self.clocks[actor]
        if any(last > clock[other] for other, last in memory.last.items()):
            self._compare(ticket, memory, region, is_write=is_write)
        memory.last[actor] = tick
        if is_write:
            memory.writer[region], memory.written[region] = actor, tick
            return
        if actor not in memory.reads:
            memory.reads[actor] = np.zeros(len(memory.written), np.int64)
        memory.reads[actor][region] = tick

    def _compare(self, ticket: Ticket, memory: Memory, region: Region, *, is_write: bool) -> None:
        clock = self.clocks[ticket.actor]
        writers, ticks = memory.writer[region], memory.written[region]
        early = ticks > clock[writers]
        if early.any():
            other = Ticket(int(writers[early][0]), int(ticks[early].max()))
            self._refuse(ticket, "writes" if is_write else "reads", other, "writes", memory)
        for actor, reads in memory.reads.items() if is_write else ():
            if actor != ticket.actor and reads[region].max(initial=0) > clock[actor]:
                self._refuse(ticket, "writes", Ticket(actor, int(reads[region].max())), "reads", memory)

    def _refuse(self, ticket: Ticket, does: str, other: Ticket, did: str, memory: Memory) -> None:
        raise OrderError(
            f"{self.describe(ticket)} {does} what {self.describe(other)} {did}, and does not wait for it; the memory is "
            f"that of {memory.place}"
        )

    def describe(self, ticket: Ticket) -> str:
        """Return what a launch is and where it was made."""
        name = "the host" if ticket.actor == HOST else f"stream {ticket.actor}"
        return f"{self._places[ticket]} ({name})"

    def others_use(self, memory: Memory) -> Iterator[Ticket]:
        """Yield launches on other streams that the allocating one does not know to have ended."""
        clock = self.clocks[memory.actor]
        yield from (Ticket(actor, tick) for actor, tick in memory.last.items() if tick > clock[actor])


def place(what: str) -> str:
    """Return the innermost line of the engine, or of a test, that leads here."""
    return f"{what} at {call_site()}"


def call_site() -> str:
    """Return the innermost file and line outside of the fake device and of libraries."""
    frame = sys._getframe(1)
    outermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_ROOTS) and not name.startswith(_OWN):
            return f"{name[len(_PREFIX) :]}:{frame.f_lineno}"
        outermost = outermost or f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


_PREFIX = f"{ROOT}/"
_ROOTS = tuple(f"{_PREFIX}{name}/" for name in ("engine", "tests", "loadtest"))
_OWN = (f"{_PREFIX}tests/fake_", f"{_PREFIX}tests/kernels/conftest.py")
