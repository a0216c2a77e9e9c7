"""Moves K/V blocks between an engine's prefix cache and a parcel.

Both go piece by piece between steps, so that no stream waits for long. The cache finds an imported block like any block
that this engine computed; blocks that were evicted meanwhile are recomputed. A parcel goes through shared memory, or
over TCP where the other daemon is on another machine. Calls block, so they run on other threads.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from concurrent import futures
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from engine.core.errors import ConfigError, ParcelError
from engine.core.kv.prefix_cache import name_block
from engine.core.page_table import Layout
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner
from engine.handle import HandoverConfig, Missing, Offer, Prefix
from engine.inbox import EngineThread
from engine.runtime.transports.connection import derive_key
from engine.runtime.transports.shared_memory import Incoming, Rows, SharedMemory
from engine.runtime.transports.tcp import ParcelServer, pull
from engine.settings.peer import Peer

T = TypeVar("T")

_PIECE_BYTES = 16 << 20  # a copy of milliseconds
_PATIENCE_S = 60.0  # for the engine to reach the end of a step


def open_handover(engine: EngineThread, config: HandoverConfig) -> Handover:
    """Open the folder in shared memory through which K/V is handed over, and the port. Raises ConfigError."""
    layout = engine.facts.layout
    if layout is None or not engine.config.enable_prefix_caching:
        raise ConfigError(
            "--kv-transfer-config hands blocks over through the prefix cache; leave --enable-prefix-caching on."
        )
    try:
        where = config.folder or Path(f"/dev/shm/quire-kv-{os.getuid()}")  # noqa: S108 - for this user alone
        memory = SharedMemory(where, config.max_bytes, config.expiry_s)
    except ParcelError as error:
        raise ConfigError(f"--kv-transfer-config: folder cannot be used: {error}.") from error
    return Handover(engine, memory, layout, config)


class Handover:
    """Sends and receives the K/V of prompts, for one engine."""

    def __init__(
        self, engine: EngineThread, memory: SharedMemory, layout: Layout, config: HandoverConfig | None = None
    ) -> None:
        """Listen, if that is asked for. Raises ConfigError."""
        self._engine, self._memory, self._layout = engine, memory, layout
        self._config = config or HandoverConfig()
        self._piece = max(_PIECE_BYTES // layout.block_bytes, 1)
        self._key = derive_key(self._config.key)
        self._server = None
        listen = self._config.listen
        if listen is not None:
            try:
                self._server = ParcelServer(memory, listen, self._key)
            except OSError as error:
                raise ConfigError(f"--kv-transfer-config: listen is {listen}: {error.strerror or error}.") from error

    @property
    def port(self) -> int | None:
        """Return the port at which other machines pull parcels; None without one."""
        return None if self._server is None else self._server.port

    def close(self) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.close()

    def count_blocks(self, num_tokens: int) -> int:
        """Return the full blocks of a prompt's parcel; the last token is always computed where the answer is drawn."""
        return (num_tokens - 1) // self._layout.block_size

    def count_missing(self, prefix: Prefix) -> Missing:
        """Return the full blocks of a prompt that the engine's cache lacks. Raises ParcelError."""
        prefix = self._named(prefix)
        num_blocks = self.count_blocks(len(prefix.tokens))

        def count(scheduler: Scheduler, _: Runner) -> Missing:
            num_found = len(scheduler.kv.find_prefix(prefix.names, prefix.tokens, num_blocks))
            num_missing = num_blocks - num_found
            return Missing(num_missing, scheduler.tiers.compute_s(num_found, num_missing))

        return self._between_steps(count)

    def _named(self, prefix: Prefix) -> Prefix:
        """Return a prompt with the names of all its full blocks: the engine's thread would take 2 us for each."""
        names = list(prefix.names)
        for index in range(self.count_blocks(len(prefix.tokens))):
            name_block(names, prefix.tokens, index, self._layout.block_size)
        return prefix._replace(names=names)

    def send(self, prefix: Prefix) -> Offer | None:
        """Pack the cached blocks of a prompt's beginning; returns what to ask for. Raises ParcelError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        if not num_blocks:
            return None
        prefix = self._named(prefix)
        parcel = self._memory.pack(self._layout, num_blocks)
        try:
            done = 0
            while done < num_blocks:
                stop = min(done + self._piece, num_blocks)
                found = self._read(prefix, parcel.rows, done, stop)
                done += found
                if not found:
                    break
            if not done:
                return None
            name = parcel.send(done, self._content(prefix, done))
            return Offer(name, done, time.time() + self._memory.expiry_s)
        finally:
            parcel.drop()

    def receive(self, name: str, prefix: Prefix, peer: Peer | None = None, timeout_s: float = _PATIENCE_S) -> int:
        """Have the cache hold the blocks of a parcel; returns how many of the prompt's it has.

        Without a peer the parcel is in shared memory. Raises ParcelError and OSError.
        """
        with closing(self._open(name, peer, timeout_s)) as parcel:
            num_blocks = parcel.header.num_blocks
            if num_blocks > self.count_blocks(len(prefix.tokens)) or (
                parcel.header.content != self._content(prefix, num_blocks)
            ):
                raise ParcelError("the parcel is of another prompt, or of another tenant's")
            prefix = self._named(prefix)
            for first in range(0, num_blocks, self._piece):
                stop = min(first + self._piece, num_blocks)
                if not self._write(prefix, parcel.read(first, stop), first, stop):
                    return first
            return num_blocks

    def _open(self, name: str, peer: Peer | None, timeout_s: float) -> Incoming:
        if peer is None:
            return self._memory.open(name, self._layout)
        return pull(peer, name, self._layout, self._key, timeout_s)

    def _content(self, prefix: Prefix, num_blocks: int) -> bytes:
        """Return the digest of a prompt's first blocks: their tokens, and whose they are."""
        tokens = array("q", prefix.tokens[: num_blocks * self._layout.block_size])
        return blake2b(tokens.tobytes(), digest_size=32, key=prefix.root, person=b"quire.parcel").digest()

    def _read(self, prefix: Prefix, rows: Rows, first: int, stop: int) -> int:
        """Copy blocks first .. stop - 1 of a prompt out; return how many there are."""

        def read(scheduler: Scheduler, runner: Runner) -> int:
            blocks = scheduler.kv.find_prefix(prefix.names, prefix.tokens, stop)[first:]
            runner.read_blocks(blocks, rows[first : first + len(blocks)])
            return len(blocks)

        return self._between_steps(read)

    def _write(self, prefix: Prefix, rows: Rows, first: int, stop: int) -> bool:
        """Copy in what the cache lacks of a prompt's blocks first .. stop - 1; return True if it then has the first `stop`."""

        def write(scheduler: Scheduler, runner: Runner) -> bool:
            imported = scheduler.kv.import_prefix(prefix.names, prefix.tokens, stop, reserve=len(scheduler.running))
            try:
                if imported.num_found < first:  # those before were evicted meanwhile
                    scheduler.kv.cancel(imported)
                    return False
                runner.write_blocks(imported.to_fill, rows[imported.num_found - first : len(imported.blocks) - first])
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
