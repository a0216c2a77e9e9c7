"""Moves K/V blocks between an engine's prefix cache and a parcel.

Both go piece by piece between steps, so that no stream waits for long. The cache finds an imported block like any block
that this engine computed; blocks that were evicted meanwhile are recomputed. A parcel goes through shared memory, or
over TCP where the other daemon is on another machine. Calls block, so they run on other threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import ConfigError, ParcelError
from engine.core.kv.imports import Place, PrefixImport, places_at
from engine.core.kv.prefix_cache import DIGEST_BYTES, name_block
from engine.core.scheduling.scheduler import Scheduler
from engine.core.step import Runner
from engine.handle import HandoverConfig, Layout, Missing, Offer, Prefix
from engine.inbox import EngineThread
from engine.runtime.stores.folder import KnownPart, Parcels
from engine.runtime.stores.listener import Listener
from engine.runtime.stores.wire import Deadline, PeerFolder
from engine.settings.peer import Peer
from engine.system.calls import T

Rows = NDArray[np.uint8]  # [blocks, bytes of a block]

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
                self._listener = Listener(parcels, listen, self._config.key)
            except OSError as error:
                raise ConfigError(f"--kv-transfer-config: listen is {listen}: {error.strerror or error}.") from error
        self._is_closed = threading.Event()
        threading.Thread(target=self._sweep, name="quire-parcels", daemon=True).start()

    @property
    def port(self) -> int | None:
        """Return the port at which other machines take parcels; None without one."""
        return None if self._listener is None else self._listener.port

    def close(self) -> None:
        """Offer nothing more."""
        self._is_closed.set()
        if self._listener is not None:
            self._listener.close()

    def _sweep(self) -> None:
        """Remove expired parcels even if no further one is made or read: they take memory, and are texts of prompts."""
        while not self._is_closed.wait(self._parcels.expiry_s):
            self._parcels.sweep()

    def count_blocks(self, num_tokens: int) -> int:
        """Return the full blocks of a prompt's parcel; the last token is always computed where the answer is drawn."""
        return (num_tokens - 1) // self._layout.block_size

    def count_missing(self, prefix: Prefix) -> Missing:
        """Return the full blocks of a prompt that the engine's cache lacks. Raises ParcelError."""
        prefix = self._named(prefix)
        num_blocks = self.count_blocks(len(prefix.tokens))

        def count(scheduler: Scheduler, _: Runner) -> Missing:
            num_found = scheduler.kv.imports.find_prefix(prefix.names, prefix.tokens, num_blocks)
            num_missing = num_blocks - num_found
            return Missing(num_missing, scheduler.tiers.compute_s(num_found, num_missing))

        return self._between_steps(count)

    def _named(self, prefix: Prefix) -> Prefix:
        """Return a prompt with the names of all its full blocks: the engine's thread would take 2 us for each."""
        names = prefix.names.copy()
        if num_blocks := self.count_blocks(len(prefix.tokens)):
            name_block(names, prefix.tokens, num_blocks - 1, self._layout.block_size)
        return prefix._replace(names=names)

    def send(self, prefix: Prefix) -> Offer | None:
        """Pack the cached blocks of a prompt's beginning; returns what to ask for. Raises ParcelError and OSError."""
        prefix, most, done = self._named(prefix), self.count_blocks(len(prefix.tokens)), 0
        num_blocks = self._between_steps(lambda each, _: each.kv.imports.find_prefix(prefix.names, prefix.tokens, most))
        if not num_blocks:
            return None
        places = places_at(self._engine.config, num_blocks)
        names = self._names(prefix, places)
        parcel = self._parcels.pack(len(places))
        try:
            while done < len(places):
                rows = self._rows(min(len(places) - done, self._piece))
                found = self._read(prefix, rows, places[done : done + len(rows)])
                for row in rows[:found]:
                    parcel.put(names[done], row.data, done)
                    done += 1
                if found < len(rows):  # the rest was evicted meanwhile
                    done = done if len(places) == num_blocks else 0
                    break
            parcel.resize(done)
        except BaseException:
            done = 0
            raise
        finally:
            parcel.close()
            if not done:
                self._parcels.remove(parcel.name)
        expires_s = time.time() + self._parcels.expiry_s
        return Offer(parcel.name.rpartition(".")[2], min(done, num_blocks), expires_s) if done else None

    def receive(self, name: str, prefix: Prefix, peer: Peer | None = None, timeout_s: float = _PATIENCE_S) -> int:
        """Have the cache hold the blocks of a parcel; returns how many of the prompt's it has.

        Without a peer the parcel is in shared memory. Raises ParcelError and OSError.
        """
        part, fingerprint = self._parcels.part_of(name), self._layout.fingerprint
        far = None if peer is None else PeerFolder(peer, fingerprint, self._config.key, Deadline(timeout_s))
        source = far or self._parcels
        parcel = KnownPart(source, part)
        try:
            parcel.look()
            if not parcel.index.entries:
                raise ParcelError(f"{peer or 'shared memory'} has no such parcel; it has expired or was taken")
            places = self._places(parcel)
            names = self._names(prefix, places)
            if parcel.has(names) < len(parcel.index.entries):
                raise ParcelError("the parcel is of another prompt, or of another tenant's")
            num_taken = self._take(parcel, names, places, self._named(prefix))
            source.remove(part)
            return num_taken
        finally:
            source.close()

    def _places(self, parcel: KnownPart) -> list[Place]:
        """Return the places of a parcel's blocks."""
        num_full = sum(len(entry.name) == DIGEST_BYTES for entry in parcel.index.entries.values())
        return places_at(self._engine.config, num_full)

    def _take(self, parcel: KnownPart, names: Sequence[bytes], places: Sequence[Place], prefix: Prefix) -> int:
        """Write what the cache lacks of a parcel, found once all is there; returns how many of the prompt's blocks it has."""

        def begin(scheduler: Scheduler, _: Runner) -> PrefixImport | None:
            return scheduler.kv.imports.begin(prefix.names, prefix.tokens, places, reserve=len(scheduler.running))

        imported, name_of = self._between_steps(begin), dict(zip(places, names, strict=True))
        if imported is None:
            return 0
        try:
            self._fill(parcel, [name_of[place] for place in imported.places], imported.blocks)
            return self._between_steps(lambda scheduler, _: scheduler.kv.imports.finish(imported))
        finally:
            self._engine.between_steps(lambda scheduler, _: scheduler.kv.imports.cancel(imported))

    def _fill(self, parcel: KnownPart, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy blocks of a parcel in, piece by piece."""
        ends, first = [*range(0, len(names), self._piece), len(names)], 0
        rows = self._rows(min(self._piece, len(names)))
        into = (row.data for begin, stop in pairwise(ends) for row in rows[: stop - begin])
        for done, _ in enumerate(parcel.read(names, into), 1):
            if done in ends:
                self._write(blocks[first:done], rows[: done - first])
                first = done
        if first < len(names):
            raise ParcelError(f"the parcel of {parcel.source} is damaged")

    def _rows(self, num_blocks: int) -> Rows:
        return np.empty((num_blocks, self._layout.block_bytes), np.uint8)

    def _names(self, prefix: Prefix, places: Sequence[Place]) -> list[bytes]:
        """Return the names that a prompt's blocks have in a parcel, without the parts of them that are public."""
        chain = prefix.names.copy()
        chain[:] = [prefix.root]
        if num_blocks := self.count_blocks(len(prefix.tokens)):
            name_block(chain, prefix.tokens, num_blocks - 1, self._layout.block_size)
        return [place.name(chain) for place in places if place.at + 1 < len(chain)]

    def _read(self, prefix: Prefix, rows: Rows, places: Sequence[Place]) -> int:
        """Copy blocks of a prompt out; return how many of them there are."""

        def read(scheduler: Scheduler, runner: Runner) -> int:
            blocks = scheduler.kv.imports.find_places(prefix.names, places)
            runner.read_blocks(blocks, rows[: len(blocks)])
            return len(blocks)

        return self._between_steps(read)

    def _write(self, blocks: Sequence[int], rows: Rows) -> None:
        self._between_steps(lambda _, runner: runner.write_blocks(blocks, rows))

    def _between_steps(self, task: Callable[[Scheduler, Runner], T]) -> T:
        try:
            return self._engine.between_steps(task).result(_PATIENCE_S)
        except futures.CancelledError:
            raise ParcelError("the engine has ended") from None
        except futures.TimeoutError:  # the builtin one from Python 3.11 on
            raise ParcelError(f"the engine made no step for {_PATIENCE_S:g} s") from None
