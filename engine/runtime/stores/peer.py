"""Reads the parts of folders that a daemon elsewhere offers: a source of folder.py. wire.py has what is said."""

from __future__ import annotations

import socket
import struct
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine.core.errors import ParcelError
from engine.runtime.stores import wire
from engine.settings.peer import Peer

_REPLY_S = 60.0


class PeerFolder:
    """The folders of another daemon. Connects at a look, unless it is connected; an error ends the connection."""

    def __init__(self, peer: Peer, fingerprint: str, key: str, deadline: wire.Deadline | None = None) -> None:
        """`deadline` is for all that is asked; without one each answer may take a while."""
        self._peer, self._fingerprint, self._key = peer, fingerprint, wire.derive_key(key)
        self._deadline = deadline
        self._connection: socket.socket | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return str(self._peer)

    def _connect(self) -> None:
        """Connect, unless that was done before. Raises OSError and ParcelError."""
        if self._connection is None:
            deadline = self._deadline or wire.Deadline(wire.HANDSHAKE_S)
            self._connection = wire.call(self._peer, self._fingerprint, self._key, deadline)

    def indexes(self, known: Mapping[str, bytes], only: str = "") -> dict[str, bytes]:
        """Return the index of each part, or of one. Raises OSError and ParcelError."""
        if self._is_closed:
            return {}
        self._connect()
        with self._asked(wire.LOOK, only, wire.digests_of(known)) as (connection, deadline):
            length = _length(connection, deadline)
            if length > wire.MAX_LOOK:
                raise ParcelError("its index is too long")
            return wire.update(known, memoryview(wire.receive(connection, length, deadline)))

    def read(self, part: str, slots: Sequence[int], rows: Iterable[memoryview]) -> Generator[memoryview | None]:
        """Read blocks of a part, unchecked; none before the next look after an error. Raises OSError and ParcelError."""
        if self._connection is None or not slots:
            return
        with self._asked(wire.READ, part, struct.pack(f"<{len(slots)}Q", *slots)) as (connection, deadline):
            for is_there, row in zip(wire.receive(connection, len(slots), deadline), rows, strict=False):
                if is_there:
                    wire.receive_into(connection, row, deadline)
                yield row if is_there else None

    def remove(self, part: str) -> None:
        """Have a parcel removed that has arrived, or is not wanted. Raises OSError and ParcelError.

        There is no answer to wait for: before it the other daemon would free the pages that it sent.
        """
        self._connect()
        with self._asked(wire.DROP, part, b""):
            pass

    def close(self) -> None:
        """End the connection, also while another thread waits for it."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            wire.shut(connection)
            connection.close()

    @contextmanager
    def _asked(self, kind: int, part: str, rest: bytes) -> Iterator[tuple[socket.socket, wire.Deadline]]:
        """Send a request; the answer follows until the deadline."""
        connection, deadline = self._connection, self._deadline or wire.Deadline(_REPLY_S)
        if connection is None:
            raise ParcelError("the connection was ended")
        try:
            request = wire.pad(part) + rest
            wire.send(connection, wire.REQUEST.pack(kind, len(request)) + request, deadline)
            yield connection, deadline
        except struct.error:
            self._disconnect()
            raise ParcelError("its answer is malformed") from None
        except BaseException:
            self._disconnect()
            raise


def _length(connection: socket.socket, deadline: wire.Deadline) -> int:
    """Return the length of what follows."""
    (length,) = wire.LENGTH.unpack(wire.receive(connection, wire.LENGTH.size, deadline))
    return int(length)
