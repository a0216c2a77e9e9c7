"""Moves K/V blocks between an engine's prefix cache and a parcel.

Both go piece by piece between steps, so that no stream waits for long. The cache finds what a parcel brings like any
block that this engine computed; what was evicted meanwhile is recomputed. Blocking calls, for threads of their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from engine.core.errors import ConfigError, ParcelError
from engine.core.kv.page_table import Layout
from engine.core.scheduler import Scheduler
from engine.core.step import Runner
from engine.loop import Engine
from engine.runtime.transports.shared_memory import Rows, SharedMemory

T = TypeVar("T")

_PIECE_BYTES = 16 << 20  # a copy of milliseconds
_PATIENCE_S = 60.0  # for the engine to reach the end of a step


class Prefix(NamedTuple):
    """What blocks are of: how their chain of names begins (Scheduler.first_names), and the prompt's tokens."""

    names: Sequence[bytes]
    tokens: Sequence[int]


def open_handover(engine: Engine, folder: Path | None, max_bytes: int) -> Handover:
    """Open the folder in shared memory through which K/V is handed over. Raises ConfigError."""
    if engine.layout is None or not engine.config.enable_prefix_caching:
        raise ConfigError(
            "--kv-transfer-config hands blocks over through the prefix cache; leave --enable-prefix-caching on."
        )
    try:
        where = folder or Path(f"/dev/shm/quire-kv-{os.getuid()}")  # noqa: S108 - for this user alone
        return Handover(engine, SharedMemory(where, max_bytes), engine.layout)
    except ParcelError as error:
        raise ConfigError(f"--kv-transfer-config: folder cannot be used: {error}.") from error


class Handover:
    """Sends and receives the K/V of prompts, for one engine."""

    def __init__(self, engine: Engine, memory: SharedMemory, layout: Layout) -> None:
        self._engine, self._memory, self._layout = engine, memory, layout
        self._piece = max(_PIECE_BYTES // layout.block_bytes, 1)

    def count_blocks(self, num_tokens: int) -> int:
        """Return the full blocks of a prompt's parcel; the last token is always computed where the answer is drawn."""
        return (num_tokens - 1) // self._layout.block_size

    def count_missing(self, prefix: Prefix) -> int:
        """Return the full blocks of a prompt that the engine's cache lacks. Raises ParcelError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        return num_blocks - self._between_steps(_Count(prefix, num_blocks))

    def send(self, prefix: Prefix) -> tuple[str, int] | None:
        """Pack the cached blocks of a prompt's beginning; returns the parcel's name and size. Raises ParcelError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        if not num_blocks:
            return None
        parcel = self._memory.pack(self._layout, num_blocks)
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
        """Have the cache hold the blocks of a parcel; returns how many of the prompt's it has. Raises ParcelError."""
        rows = self._memory.open(name, self._layout)
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
    """Count the first blocks of a prompt that are cached."""

    prefix: Prefix
    num_blocks: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> int:  # noqa: ARG002 - a task's parameters
        return len(scheduler.kv.find_prefix(self.prefix.names, self.prefix.tokens, self.num_blocks))


@dataclass(frozen=True, slots=True)
class _Read:
    """Copy blocks first .. stop - 1 of a prompt out; returns how many there are."""

    prefix: Prefix
    rows: Rows
    first: int
    stop: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> int:
        blocks = scheduler.kv.find_prefix(self.prefix.names, self.prefix.tokens, self.stop)[self.first :]
        runner.read_blocks(blocks, self.rows[self.first : self.first + len(blocks)])
        return len(blocks)


@dataclass(frozen=True, slots=True)
class _Write:
    """Copy in what the cache lacks of a prompt's first `stop` blocks; returns True if it has all of them then."""

    prefix: Prefix
    rows: Rows
    stop: int

    def __call__(self, scheduler: Scheduler, runner: Runner) -> bool:
        imported = scheduler.kv.import_prefix(
            self.prefix.names, self.prefix.tokens, self.stop, reserve=len(scheduler.running)
        )
        try:
            runner.write_blocks(imported.to_fill, self.rows[imported.num_found : len(imported.blocks)])
        except BaseException:
            scheduler.kv.cancel(imported)
            raise
        return scheduler.kv.finish(imported) == self.stop
