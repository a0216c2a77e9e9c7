"""Moves K/V blocks between an engine's prefix cache and a parcel.

Both go piece by piece between steps, so that no stream waits for long. The cache finds an imported block like any block
that this engine computed; blocks that were evicted meanwhile are recomputed. A parcel goes through shared memory, or
over TCP where the other daemon is on another machine. Calls block, so they run on other threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError, ParcelError
from engine.core.kv.prefix_cache import name_block
from engine.core.page_table import Layout
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner
from engine.handle import HandoverConfig, Missing, Offer, Prefix
from engine.inbox import EngineThread
from engine.runtime.stores import listener
from engine.runtime.stores.folder import KnownPart, Parcels
from engine.runtime.stores.peer import PeerFolder
from engine.runtime.stores.wire import Deadline
from engine.settings.peer import Peer

Rows = NDArray[np.uint8]  # [blocks, bytes of a block]
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
        parcels = Parcels(where, layout.fingerprint, layout.block_bytes, config.max_bytes, config.expiry_s)
    except ParcelError as error:
        raise ConfigError(f"--kv-transfer-config: folder cannot be used: {error}.") from error
    return Handover(engine, parcels, layout, config)


class Handover:
    """Sends and receives the K/V of prompts, for one engine."""

    def __init__(
        self, engine: EngineThread, parcels: Parcels, layout: Layout, config: HandoverConfig | None = None
    ) -> None:
        """Listen, if that is asked for. Raises ConfigError."""
        self._engine, self._parcels, self._layout = engine, parcels, layout
        self._config = config or HandoverConfig()
        self._piece = max(_PIECE_BYTES // layout.block_bytes, 1)
        self._listener = None
        listen = self._config.listen
        if listen is not None:
            try:
                self._listener = listener.offer(parcels, listen, self._config.key)
            except OSError as error:
                raise ConfigError(f"--kv-transfer-config: listen is {listen}: {error.strerror or error}.") from error

    @property
    def port(self) -> int | None:
        """Return the port at which other machines take parcels; None without one."""
        return None if self._listener is None else self._listener.port

    def close(self) -> None:
        """Offer nothing more."""
        if self._listener is not None:
            self._listener.withdraw(self._parcels)

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
        """Pack the cached blocks of a prompt's beginning; returns what to ask for. Raises ParcelError and OSError."""
        num_blocks = self.count_blocks(len(prefix.tokens))
        if not num_blocks:
            return None
        prefix, names, done = self._named(prefix), self._names(prefix), 0
        parcel = self._parcels.pack(num_blocks)
        try:
            while done < num_blocks:
                rows = self._rows(min(num_blocks - done, self._piece))
                found = self._read(prefix, rows, done, done + len(rows))
                for row in rows[:found]:
                    parcel.put(names[done], row.data, done)
                    done += 1
                if found < len(rows):
                    break
            parcel.resize(done)
        except BaseException:
            done = 0
            raise
        finally:
            parcel.close()
            if not done:
                self._parcels.remove(parcel.name)
        return Offer(parcel.name.rpartition(".")[2], done, time.time() + self._parcels.expiry_s) if done else None

    def receive(self, name: str, prefix: Prefix, peer: Peer | None = None, timeout_s: float = _PATIENCE_S) -> int:
        """Have the cache hold the blocks of a parcel; returns how many of the prompt's it has.

        Without a peer the parcel is in shared memory. Raises ParcelError and OSError.
        """
        part, fingerprint = self._parcels.part_of(name), self._layout.fingerprint
        far = None if peer is None else PeerFolder(peer, fingerprint, self._config.key, Deadline(timeout_s))
        parcel = KnownPart(far or self._parcels, part)
        try:
            parcel.look()
            num_blocks = len(parcel.index.entries)
            if not num_blocks:
                raise ParcelError(f"{peer or 'shared memory'} has no such parcel; it has expired or was taken")
            names = self._names(prefix)
            if parcel.has(names) < num_blocks:
                raise ParcelError("the parcel is of another prompt, or of another tenant's")
            num_taken = self._take(parcel, names[:num_blocks], self._named(prefix))
            parcel.drop()
            return num_taken
        finally:
            parcel.source.close()

    def _take(self, parcel: KnownPart, names: Sequence[bytes], prefix: Prefix) -> int:
        """Write a parcel's blocks; returns how many of the prompt's the cache has."""
        for first in range(0, len(names), self._piece):
            asked = names[first : first + self._piece]
            rows = self._rows(len(asked))
            if parcel.get(asked, [row.data for row in rows]) < len(asked):
                raise ParcelError(f"the parcel of {parcel.source} is damaged")
            if not self._write(prefix, rows, first, first + len(asked)):
                return first
        return len(names)

    def _rows(self, num_blocks: int) -> Rows:
        return np.empty((num_blocks, self._layout.block_bytes), np.uint8)

    def _names(self, prefix: Prefix) -> list[bytes]:
        """Return the names that a prompt's full blocks have in a parcel, without the parts of them that are public."""
        chain = [prefix.root]
        for index in range(self.count_blocks(len(prefix.tokens))):
            name_block(chain, prefix.tokens, index, self._layout.block_size)
        return chain[1:]

    def _read(self, prefix: Prefix, rows: Rows, first: int, stop: int) -> int:
        """Copy blocks first .. stop - 1 of a prompt out; return how many there are."""

        def read(scheduler: Scheduler, runner: Runner) -> int:
            blocks = scheduler.kv.find_prefix(prefix.names, prefix.tokens, stop)[first:]
            runner.read_blocks(blocks, rows[: len(blocks)])
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
