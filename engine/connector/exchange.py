"""An engine's side of a KV connector: blocks go from its prefix cache into a parcel, or from a parcel into its cache.

Both go piece by piece between steps, so that no stream waits for long. What a parcel brings can be found like anything
the engine computed itself; what has been evicted meanwhile is computed again. Blocking calls, for threads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from engine.connector.base import KVConnector, Layout, ParcelError, Rows
from engine.core.scheduler import Scheduler
from engine.core.step import Runner
from engine.loop import Engine

T = TypeVar("T")

_PIECE_BYTES = 16 << 20  # a copy of milliseconds
_PATIENCE_S = 60.0  # for the engine to come to the end of a step


class Prefix(NamedTuple):
    """What a run of blocks is of: how its chain of digests begins (Scheduler.first_names), and the tokens."""

    names: Sequence[bytes]
    tokens: Sequence[int]


class Exchange:
    """One engine, one connector."""

    def __init__(self, engine: Engine, connector: KVConnector, layout: Layout) -> None:
        self._engine, self._connector, self._layout = engine, connector, layout
        self._piece = max(_PIECE_BYTES // layout.block_bytes, 1)

    def count_blocks(self, num_tokens: int) -> int:
        """Full blocks that a parcel of a prompt has; the last token is always computed where the answer is drawn."""
        return (num_tokens - 1) // self._layout.block_size

    def count_missing(self, prefix: Prefix) -> int:
        """Full blocks of a prompt that the engine's cache has not got. Raises ParcelError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        return num_blocks - self._between_steps(_Count(prefix, num_blocks))

    def send(self, prefix: Prefix) -> tuple[str, int] | None:
        """Pack what the cache has of a prompt's beginning: the parcel's name and its blocks. Raises ParcelError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        if not num_blocks:
            return None
        parcel = self._connector.pack(self._layout, num_blocks)
        try:
            done = 0
            while done < num_blocks:
                stop = min(done + self._piece, num_blocks)
                found = self._between_steps(_Read(prefix, parcel.rows, done, stop))
                done += found
                if not found:
                    break
            return (parcel.send(done), done) if done else None
        finally:
            parcel.drop()

    def receive(self, name: str, prefix: Prefix) -> int:
        """Have the cache hold what a parcel brings of a prompt; how many blocks. Raises ParcelError."""
        rows = self._connector.open(name, self._layout)
        num_blocks = min(len(rows), self.count_blocks(len(prefix.tokens)))
        for first in range(0, num_blocks, self._piece):
            stop = min(first + self._piece, num_blocks)
            if not self._between_steps(_Write(prefix, rows, stop)):
                return first
        return num_blocks

    def _between_steps(self, task: Callable[[Scheduler, Runner], T]) -> T:
        try:
            return self._engine.between_steps(task).result(_PATIENCE_S)
        except futures.CancelledError:
            raise ParcelError("the engine has ended") from None
        except futures.TimeoutError:  # the builtin one from Python 3.11 on
            raise ParcelError(f"the engine made no step for {_PATIENCE_S:g} s") from None


@dataclass(frozen=True, slots=True)
class _Count:
    """How many of a prompt's first blocks are cached."""

    prefix: Prefix
    num_blocks: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> int:  # noqa: ARG002 - a task's parameters
        return len(scheduler.find_prefix(self.prefix.names, self.prefix.tokens, self.num_blocks))


@dataclass(frozen=True, slots=True)
class _Read:
    """Copy blocks first .. stop - 1 of a prompt out; how many there are."""

    prefix: Prefix
    rows: Rows
    first: int
    stop: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> int:
        blocks = scheduler.find_prefix(self.prefix.names, self.prefix.tokens, self.stop)[self.first :]
        runner.read_blocks(blocks, self.rows[self.first : self.first + len(blocks)])
        return len(blocks)


@dataclass(frozen=True, slots=True)
class _Write:
    """Copy in what the cache lacks of a prompt's first `stop` blocks; whether all of them are there then."""

    prefix: Prefix
    rows: Rows
    stop: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> bool:
        def fill(first: int, blocks: list[int]) -> None:
            runner.write_blocks(blocks, self.rows[first : first + len(blocks)])

        return scheduler.adopt_prefix(self.prefix.names, self.prefix.tokens, self.stop, fill) == self.stop
