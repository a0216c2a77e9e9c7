"""Moves K/V blocks between an engine's prefix cache and a parcel.

Both go piece by piece between steps, so that no stream waits for long. The cache finds an imported block like any block
that this engine computed; blocks that were evicted meanwhile are recomputed. Calls block, so they run on other threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent import futures
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

        def count(scheduler: Scheduler, _: Runner) -> int:
            return len(scheduler.kv.find_prefix(prefix.names, prefix.tokens, num_blocks))

        return num_blocks - self._between_steps(count)

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
                found = self._read(prefix, parcel.rows, done, stop)
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
            if not self._write(prefix, rows, stop):
                return first
        return num_blocks

    def _read(self, prefix: Prefix, rows: Rows, first: int, stop: int) -> int:
        """Copy blocks first .. stop - 1 of a prompt out; return how many there are."""

        def read(scheduler: Scheduler, runner: Runner) -> int:
            blocks = scheduler.kv.find_prefix(prefix.names, prefix.tokens, stop)[first:]
            runner.read_blocks(blocks, rows[first : first + len(blocks)])
            return len(blocks)

        return self._between_steps(read)

    def _write(self, prefix: Prefix, rows: Rows, stop: int) -> bool:
        """Copy in the blocks that the cache lacks of a prompt's first `stop`; return True if it then has all of them."""

        def write(scheduler: Scheduler, runner: Runner) -> bool:
            imported = scheduler.kv.import_prefix(prefix.names, prefix.tokens, stop, reserve=len(scheduler.running))
            try:
                runner.write_blocks(imported.to_fill, rows[imported.num_found : len(imported.blocks)])
            except BaseException:
                scheduler.kv.cancel(imported)
                raise
            return scheduler.kv.finish(imported) == stop

        return self._between_steps(write)

    def _between_steps(self, task: Callable[[Scheduler, Runner], T]) -> T:
        try:
            return self._engine.between_steps(task).result(_PATIENCE_S)
        except futures.CancelledError:
            raise ParcelError("the engine has ended") from None
        except futures.TimeoutError:  # the builtin one from Python 3.11 on
            raise ParcelError(f"the engine made no step for {_PATIENCE_S:g} s") from None
