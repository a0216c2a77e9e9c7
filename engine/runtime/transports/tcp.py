"""Hands parcels to daemons of other machines over TCP: the daemon that has one offers it, the other pulls it.

After the handshake (connection.py) the parcel's header, its checksums and its blocks follow, as they lie in shared memory
(shared_memory.py). Blocks are checked against accidents only. The sender sends straight from the parcel's pages, and the
receiver reads a piece at a time into one buffer, so neither holds a parcel twice. Threads of the server, and the caller's
in `pull`.
"""

from __future__ import annotations

import mmap
import socket
from contextlib import suppress

import numpy as np

from engine.core.errors import ParcelError
from engine.core.page_table import Layout
from engine.runtime.transports.connection import IDLE_S, Caller, Deadline, Server, call, receive, receive_into, send
from engine.runtime.transports.shared_memory import (
    HEADER_BYTES,
    Header,
    Rows,
    SharedMemory,
    check_layout,
    check_of,
    read_header,
)
from engine.settings.peer import Peer

_TRANSFER_S = 300.0
_SEND_BYTES = 1 << 20  # between two looks at the deadline


class ParcelServer(Server):
    """Offers the parcels of a folder."""

    def __init__(self, memory: SharedMemory, address: Peer, key: bytes) -> None:
        """Listen. Raises OSError."""
        self._memory = memory
        super().__init__(address, key)

    def _sweep(self) -> None:
        with suppress(OSError):
            self._memory.sweep()

    def _give(self, caller: Caller) -> None:
        connection, name = caller.connection, caller.name
        try:
            file = self._memory.open_file(name)
        except (OSError, ParcelError):
            caller.decline()
            return
        with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
            header = read_header(view[:HEADER_BYTES].tobytes(), name)
            caller.accept()
            deadline = Deadline(_TRANSFER_S)
            _send_pieces(connection, view, 0, HEADER_BYTES + header.num_check_bytes, deadline)
            _send_pieces(connection, view, header.first_block, header.num_block_bytes, deadline)
            connection.shutdown(socket.SHUT_WR)
            deadline = Deadline(IDLE_S)
            if receive(connection, 1, deadline):  # it has arrived
                self._memory.remove(name)


def pull(peer: Peer, name: str, layout: Layout, key: bytes, timeout_s: float) -> Pulled:
    """Return a parcel that another daemon offers, to be read. Raises ParcelError and OSError."""
    connection, deadline = call(peer, name, key, timeout_s, "has no such parcel; it has expired or was taken")
    try:
        return Pulled(connection, layout, deadline, str(peer))
    except BaseException:
        connection.close()
        raise


class Pulled:
    """A parcel that comes through a connection."""

    def __init__(self, connection: socket.socket, layout: Layout, deadline: Deadline, where: str) -> None:
        self._connection, self._deadline, self._where = connection, deadline, where
        self.header: Header = read_header(receive(connection, HEADER_BYTES, deadline), f"the parcel of {where}")
        check_layout(self.header, layout, f"the parcel of {where}")
        self._checks: list[int] = []
        self._buffer: Rows = np.empty((0, layout.block_bytes), np.uint8)
        self._next = 0

    def read(self, first: int, stop: int) -> Rows:
        """Receive the next blocks and return them, checked. Raises ParcelError and OSError."""
        assert first == self._next, "a stream is read in order"
        if not first:
            checks = receive(self._connection, self.header.num_check_bytes, self._deadline)
            self._checks = np.frombuffer(checks, "<u4").tolist()
        if len(self._buffer) < stop - first:
            self._buffer = np.empty((stop - first, self.header.layout.block_bytes), np.uint8)
        rows = self._buffer[: stop - first]
        for index, row in enumerate(rows, first):
            receive_into(self._connection, memoryview(row.data), self._deadline)
            if check_of(index, row) != self._checks[index]:
                raise ParcelError(f"the parcel of {self._where} is damaged")
        self._next = stop
        if stop == self.header.num_blocks:
            send(self._connection, b"\1", self._deadline)
        return rows

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _send_pieces(connection: socket.socket, view: memoryview, offset: int, length: int, deadline: Deadline) -> None:
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
