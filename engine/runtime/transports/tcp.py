"""Hands parcels to daemons of other machines over TCP: the daemon that has one offers it, the other pulls it.

    server   magic, a nonce
    client   magic, a nonce, the parcel's name, HMAC of both nonces and the name
    server   status, HMAC of both nonces, the name and the status; then, if the status is 0:
             the parcel's header, its checksums, its blocks, as they lie in shared memory (shared_memory.py)

Both prove that they have the key; the nonces make a proof good for one connection. Nothing is encrypted, and the blocks
are checked against accidents only. The sender sends straight from the parcel's pages, and the receiver reads a piece at
a time into one buffer, so neither holds a parcel twice. Every wait is bounded by an idle limit and each transfer by a
deadline. Threads of this module, and the caller's in `pull`.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import socket
import struct
import threading
import time
from contextlib import suppress

import numpy as np

from engine.core.errors import ParcelError
from engine.core.kv.page_table import Layout
from engine.peer import Peer
from engine.runtime.transports.shared_memory import (
    HEADER_BYTES,
    MAX_NAME,
    Header,
    Rows,
    SharedMemory,
    check_layout,
    check_of,
    read_header,
)

log = logging.getLogger("quire.kv_tcp")

_MAGIC = b"quiretcp1"
_NONCE = _MAC = 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s")
_ASK = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s{MAX_NAME}s{_MAC}s")
_REPLY = struct.Struct(f"<B{_MAC}s")
_TIMEVAL = struct.Struct("@ll")
_GIVEN, _GONE, _REFUSED = range(3)

MAX_CONNECTIONS = 32  # a further one is closed; its daemon computes the prompt
HANDSHAKE_S = 5.0
IDLE_S = 10.0  # without a byte
_TRANSFER_S = 300.0
_SWEEP_S = 5.0
_SEND_BYTES = 1 << 20  # between two looks at the deadline


class ParcelServer:
    """Offers the parcels of a folder, on threads of its own."""

    def __init__(self, memory: SharedMemory, address: Peer, key: bytes) -> None:
        """Listen. Raises OSError."""
        self._memory, self._key = memory, key
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=MAX_CONNECTIONS)
        self._listener.settimeout(_SWEEP_S)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and stop to listen."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                _shut(connection)
        _shut(self._listener)  # wakes the thread
        self._thread.join()
        self._listener.close()

    @property
    def num_open(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._sweep()
                continue
            except OSError:  # closed, or out of file descriptors
                time.sleep(0 if self._is_closed else 0.05)
                continue
            with self._lock:
                is_welcome = not self._is_closed and len(self._open) < MAX_CONNECTIONS
                if is_welcome:
                    self._open.add(connection)
            if not is_welcome:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="quire-kv-give", daemon=True).start()

    def _sweep(self) -> None:
        with suppress(OSError):
            self._memory.sweep()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                _tune(connection)
                self._give(connection)
        except (OSError, ParcelError) as error:  # the other daemon computes the prompt
            log.debug("a parcel was not given: %s", error)
        except Exception:
            log.exception("a parcel was not given")
        finally:
            with self._lock:
                self._open.discard(connection)

    def _give(self, connection: socket.socket) -> None:
        mine, deadline = os.urandom(_NONCE), _Deadline(HANDSHAKE_S)
        _send(connection, _HELLO.pack(_MAGIC, mine), deadline)
        magic, theirs, padded, mac = _ASK.unpack(_receive(connection, _ASK.size, deadline))
        if magic != _MAGIC:
            return
        nonces = mine + theirs
        if not hmac.compare_digest(mac, _prove(self._key, b"pull", nonces, padded)):
            _send(connection, _REPLY.pack(_REFUSED, bytes(_MAC)), deadline)
            return
        name = padded.rstrip(b"\0").decode("ascii", "replace")
        try:
            file = self._memory.open_file(name)
        except (OSError, ParcelError):
            _send(connection, _REPLY.pack(_GONE, _prove(self._key, b"gone", nonces, padded)), deadline)
            return
        with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
            header = read_header(view[:HEADER_BYTES].tobytes(), name)
            _send(connection, _REPLY.pack(_GIVEN, _prove(self._key, b"give", nonces, padded)), deadline)
            deadline = _Deadline(_TRANSFER_S)
            _send_pieces(connection, view, 0, HEADER_BYTES + header.num_check_bytes, deadline)
            _send_pieces(connection, view, header.first_block, header.num_block_bytes, deadline)
            connection.shutdown(socket.SHUT_WR)
            deadline = _Deadline(IDLE_S)
            if _receive(connection, 1, deadline):  # it has arrived
                self._memory.remove(name)


def pull(peer: Peer, name: str, layout: Layout, key: bytes, timeout_s: float) -> Pulled:
    """Return a parcel that another daemon offers, to be read. Raises ParcelError and OSError."""
    deadline = _Deadline(timeout_s)
    try:
        padded = name.encode("ascii").ljust(MAX_NAME, b"\0")
    except UnicodeEncodeError:
        padded = b""
    if len(padded) != MAX_NAME:
        raise ParcelError("the name is not that of a parcel")
    connection = socket.create_connection(peer, timeout=min(HANDSHAKE_S, timeout_s))
    try:
        _tune(connection)
        magic, theirs = _HELLO.unpack(_receive(connection, _HELLO.size, deadline))
        if magic != _MAGIC:
            raise ParcelError(f"{peer} does not offer parcels of this version of Quire")
        mine = os.urandom(_NONCE)
        nonces = theirs + mine
        _send(connection, _ASK.pack(_MAGIC, mine, padded, _prove(key, b"pull", nonces, padded)), deadline)
        status, mac = _REPLY.unpack(_receive(connection, _REPLY.size, deadline))
        if status == _REFUSED:
            raise ParcelError(f"{peer} refused the key; give both daemons the same one")
        if not hmac.compare_digest(mac, _prove(key, b"give" if status == _GIVEN else b"gone", nonces, padded)):
            raise ParcelError(f"{peer} does not have the key")
        if status != _GIVEN:
            raise ParcelError(f"{peer} has no such parcel; it has expired or was taken")
        return Pulled(connection, layout, deadline, str(peer))
    except BaseException:
        connection.close()
        raise


class Pulled:
    """A parcel that comes through a connection."""

    def __init__(self, connection: socket.socket, layout: Layout, deadline: _Deadline, where: str) -> None:
        self._connection, self._deadline, self._where = connection, deadline, where
        self.header: Header = read_header(_receive(connection, HEADER_BYTES, deadline), f"the parcel of {where}")
        check_layout(self.header, layout, f"the parcel of {where}")
        self._checks: list[int] = []
        self._buffer: Rows = np.empty((0, layout.block_bytes), np.uint8)
        self._next = 0

    def read(self, first: int, stop: int) -> Rows:
        """Receive the next blocks and return them, checked. Raises ParcelError and OSError."""
        assert first == self._next, "a stream is read in order"
        if not first:
            checks = _receive(self._connection, self.header.num_check_bytes, self._deadline)
            self._checks = np.frombuffer(checks, "<u4").tolist()
        if len(self._buffer) < stop - first:
            self._buffer = np.empty((stop - first, self.header.layout.block_bytes), np.uint8)
        rows = self._buffer[: stop - first]
        for index, row in enumerate(rows, first):
            _receive_into(self._connection, memoryview(row.data), self._deadline)
            if check_of(index, row) != self._checks[index]:
                raise ParcelError(f"the parcel of {self._where} is damaged")
        self._next = stop
        if stop == self.header.num_blocks:
            _send(self._connection, b"\1", self._deadline)
        return rows

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


class _Deadline:
    """The end of a conversation; each wait in it also has the idle limit."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    def wait_s(self) -> float:
        """Return how long to wait for the next byte. Raises TimeoutError."""
        left = self._end_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("the transfer took too long")
        return min(left, IDLE_S)

    def timeval(self) -> bytes:
        """Return `wait_s` as a socket's option has it. Raises TimeoutError."""
        seconds, rest = divmod(self.wait_s(), 1)
        return _TIMEVAL.pack(int(seconds), max(int(rest * 1e6), 1))


def _prove(key: bytes, what: bytes, nonces: bytes, padded: bytes) -> bytes:
    return hmac.digest(key, what + nonces + padded, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, content: bytes, deadline: _Deadline) -> None:
    view = memoryview(content)
    while view:
        connection.settimeout(deadline.wait_s())
        view = view[connection.send(view) :]


def _receive(connection: socket.socket, length: int, deadline: _Deadline) -> bytes:
    content = bytearray(length)
    _receive_into(connection, memoryview(content), deadline)
    return bytes(content)


def _receive_into(connection: socket.socket, view: memoryview, deadline: _Deadline) -> None:
    """Fill memory: the kernel waits for all of it, which is a call a block instead of three a packet."""
    connection.settimeout(None)
    while view:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline.timeval())
        try:
            length = connection.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("the other daemon is silent") from None
        if not length:
            raise ParcelError("the connection was cut")
        view = view[length:]


def _send_pieces(connection: socket.socket, view: memoryview, offset: int, length: int, deadline: _Deadline) -> None:
    """Send a part of a parcel; sendfile is a third slower from shared memory, page by page."""
    connection.settimeout(None)
    end = offset + length
    while offset < end:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline.timeval())
        with view[offset : min(offset + _SEND_BYTES, end)] as piece:
            try:
                offset += connection.send(piece)
            except BlockingIOError:
                raise TimeoutError("the other daemon does not read") from None
