"""Offers parcels to daemons of other machines that have the key.

wire.py has what is said. Threads of this module.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections import Counter

from engine.core.errors import ParcelError
from engine.runtime.stores import parts, wire
from engine.runtime.stores.folder import Parcels
from engine.settings.peer import Peer

log = logging.getLogger("quire.kv_store")

MAX_CONNECTIONS = 32  # that have proven the key; a further one is closed, and its daemon computes the prompt
MAX_STRANGERS = 64  # that have not yet; for a further one the oldest is closed, of the address that has the most
_SWEEP_S = 5.0
_REPLY_S = 60.0
_MAX_REQUEST = 1 << 20
_SLOT = struct.Struct("<Q")


class Listener:
    """Accepts connections, and gives to those that have the key, on threads of its own."""

    def __init__(self, parcels: Parcels, address: Peer, key: str) -> None:
        """Listen. Raises OSError."""
        self._parcels, self._key = parcels, wire.derive_key(key)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=MAX_STRANGERS + MAX_CONNECTIONS)
        self._listener.settimeout(_SWEEP_S)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: dict[socket.socket, str] = {}  # and their addresses, oldest first
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.is_closed = False
        self._thread = threading.Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and stop to listen."""
        with self._lock:
            self.is_closed = True
            for connection in (*self._strangers, *self._open):
                wire.shut(connection)
        wire.shut(self._listener)  # wakes the thread
        self._thread.join()
        self._listener.close()

    @property
    def num_open(self) -> int:
        """Return the number of connections that have proven the key."""
        return len(self._open)

    def _accept(self) -> None:
        while not self.is_closed:
            self._accept_next()

    def _accept_next(self) -> None:
        """Serve the next connection; no error ends the server."""
        try:
            self._welcome(*self._listener.accept())
        except TimeoutError:
            self._parcels.sweep()  # raises nothing
        except OSError:  # closed, or out of file descriptors
            time.sleep(0 if self.is_closed else 0.05)
        except RuntimeError as error:  # the system has no thread left
            log.warning("A connection for K/V was not served: %s: %s", type(error).__name__, error)
            time.sleep(0.05)

    def _welcome(self, connection: socket.socket, address: tuple[str, int]) -> None:
        with self._lock:
            if self.is_closed:
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._push_out()
            self._strangers[connection] = address[0]
        try:
            threading.Thread(target=self._serve, args=(connection,), name="quire-kv-give", daemon=True).start()
        except BaseException:
            self._forget(connection)
            connection.close()
            raise

    def _push_out(self) -> None:
        """End the oldest connection without a proof; a daemon needs milliseconds for it."""
        [(crowded, _)] = Counter(self._strangers.values()).most_common(1)
        oldest = next(each for each, address in self._strangers.items() if address == crowded)
        del self._strangers[oldest]
        wire.shut(oldest)

    def _admit(self, connection: socket.socket) -> bool:
        """Give a place to a connection that has proven the key; False if there is none."""
        with self._lock:
            if self._strangers.pop(connection, None) is None or len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open.add(connection)
            return True

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)
            self._open.discard(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                caller = wire.meet(connection, self._key)
                if caller is not None and self._admit(connection):
                    is_here = caller.fingerprint == self._parcels.fingerprint
                    caller.reply(is_here=is_here)
                    while is_here:
                        _answer(connection, self._parcels)
        except (OSError, ParcelError, ValueError) as error:  # the other daemon computes the prompt
            log.debug("K/V was not given: %s", error)
        finally:
            self._forget(connection)


def _answer(connection: socket.socket, parcels: Parcels) -> None:
    """Answer a request. Raises OSError and ParcelError."""
    deadline = wire.Deadline(wire.IDLE_S)
    kind, length = wire.REQUEST.unpack(wire.receive(connection, wire.REQUEST.size, deadline))
    if length > _MAX_REQUEST:
        raise ParcelError("a request is too long")
    request = memoryview(wire.receive(connection, length, deadline))
    deadline = wire.Deadline(_REPLY_S)
    try:
        name, rest = wire.unpad(wire.NAME.unpack_from(request)[0]), request[wire.NAME.size :]
        if kind == wire.LOOK:
            index = parcels.index(name)
            wire.send(connection, wire.LENGTH.pack(len(index)) + index, deadline)
        elif kind == wire.READ:
            _give(connection, parcels, name, [slot for (slot,) in _SLOT.iter_unpack(rest)])
        elif kind == wire.DROP:
            parcels.remove(name)
        else:
            raise ParcelError("a request is of no kind")
    except (struct.error, OverflowError):
        raise ParcelError("a request is malformed") from None


def _give(connection: socket.socket, parcels: Parcels, name: str, slots: list[int]) -> None:
    """Send which blocks of a parcel are there, and these, straight from the file's pages. Raises OSError.

    Blocks that are adjacent go together. sendfile would halve this side's work, but on one machine the other side, which
    also checks the blocks, would take 0.22 s for a GB that lies in single pages, instead of 0.14.
    """
    size, stride = parcels.block_bytes, parts.stride(parcels.block_bytes)
    with parcels.opened(name) as file:
        length = 0 if file is None else os.fstat(file).st_size
        are_there = [slot * stride + size <= length for slot in slots]
        wire.send(connection, bytes(are_there), wire.Deadline(_REPLY_S))
        if file is None or not any(are_there):
            return
        view = memoryview(mmap.mmap(file, length, access=mmap.ACCESS_READ))
        begin = end = 0
        for slot in itertools.compress(slots, are_there):
            if slot * stride != end:
                _send_pages(connection, view, begin, end)
                begin = slot * stride
            end = slot * stride + size
        _send_pages(connection, view, begin, end)


def _send_pages(connection: socket.socket, view: memoryview, begin: int, end: int) -> None:
    """Send a part of a mapped file; an OSError if the file is shorter by now."""
    for at in range(begin, end, wire.SENT_BYTES):
        wire.send(connection, view[at : min(at + wire.SENT_BYTES, end)], wire.Deadline(_REPLY_S))
