"""Conversations between daemons of several machines over TCP: the proof of a key, bounded waits, and the client's end.

    server   magic, a nonce
    client   magic, a nonce, the fingerprint of its blocks, HMAC of both nonces and the fingerprint
    server   status, HMAC of both nonces, the fingerprint and the status

Both prove that they have the key; the nonces make a proof good for one connection. Nothing is encrypted. Requests follow
until the client ends the connection: a kind, the length of what follows, and this.

    LOOK    a parcel's name -> a length, and its index
    READ    a parcel's name, and slots -> for each whether it is there; the blocks that are
    DROP    a parcel's name; no answer

Every wait is bounded by an idle limit and by a deadline. Any thread.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256

from engine.core.errors import ParcelError
from engine.settings.peer import Peer

_MAGIC = b"quiretcp4"
_NONCE = _MAC = 32
_NAME = 80
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s")
_ASK = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s{_NAME}s{_MAC}s")
_REPLY = struct.Struct(f"<B{_MAC}s")
_TIMEVAL = struct.Struct("@ll")
_GIVEN, _GONE, _REFUSED = range(3)

LOOK, READ, DROP = range(3)
REQUEST = struct.Struct("<BI")  # kind, bytes that follow
LENGTH = struct.Struct("<I")
NAME = struct.Struct(f"<{_NAME}s")
MAX_LOOK = 1 << 28  # bytes of an index

HANDSHAKE_S = 5.0
IDLE_S = 10.0  # without a byte
SENT_BYTES = 1 << 20  # between two looks at the deadline


class Deadline:
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


# -- the handshake -----------------------------------------------------------------------------------------------------


class Caller:
    """A daemon that has the key, and the fingerprint of what it asks for."""

    def __init__(self, connection: socket.socket, key: bytes, nonces: bytes, padded: bytes, deadline: Deadline) -> None:
        self.connection, self._key, self._nonces, self._padded = connection, key, nonces, padded
        self._deadline = deadline  # of the handshake
        self.fingerprint = unpad(padded)

    def reply(self, *, is_here: bool) -> None:
        """Say whether blocks with its fingerprint are here; if so, its requests follow. Raises OSError."""
        status, what = (_GIVEN, b"give") if is_here else (_GONE, b"gone")
        mac = _prove(self._key, what, self._nonces, self._padded)
        send(self.connection, _REPLY.pack(status, mac), self._deadline)


def meet(connection: socket.socket, key: bytes) -> Caller | None:
    """Return the daemon that calls; None without the key. Raises OSError and ParcelError."""
    _tune(connection)
    mine, deadline = os.urandom(_NONCE), Deadline(HANDSHAKE_S)
    send(connection, _HELLO.pack(_MAGIC, mine), deadline)
    magic, theirs, padded, mac = _ASK.unpack(receive(connection, _ASK.size, deadline))
    if magic != _MAGIC:
        return None
    nonces = mine + theirs
    if not hmac.compare_digest(mac, _prove(key, b"pull", nonces, padded)):
        send(connection, _REPLY.pack(_REFUSED, bytes(_MAC)), deadline)
        return None
    return Caller(connection, key, nonces, padded, deadline)


def call(peer: Peer, fingerprint: str, key: bytes, deadline: Deadline) -> socket.socket:
    """Return a connection for requests. Raises ParcelError and OSError."""
    padded = pad(fingerprint)
    connection = socket.create_connection(peer, timeout=min(HANDSHAKE_S, deadline.wait_s()))
    try:
        _tune(connection)
        magic, theirs = _HELLO.unpack(receive(connection, _HELLO.size, deadline))
        if magic != _MAGIC:
            raise ParcelError(f"{peer} does not offer K/V of this version of Quire")
        mine = os.urandom(_NONCE)
        nonces = theirs + mine
        send(connection, _ASK.pack(_MAGIC, mine, padded, _prove(key, b"pull", nonces, padded)), deadline)
        status, mac = _REPLY.unpack(receive(connection, _REPLY.size, deadline))
        if status == _REFUSED:
            raise ParcelError(f"{peer} refused the key; give both daemons the same one")
        if not hmac.compare_digest(mac, _prove(key, b"give" if status == _GIVEN else b"gone", nonces, padded)):
            raise ParcelError(f"{peer} does not have the key")
        if status != _GIVEN:
            raise ParcelError(f"{peer} runs another model, or has other settings of the KV pool")
    except BaseException:
        connection.close()
        raise
    return connection


def derive_key(key: str) -> bytes:
    """Return the key of proofs from that of the settings."""
    return sha256(b"quire-kv" + key.encode()).digest()


def _prove(key: bytes, what: bytes, nonces: bytes, padded: bytes) -> bytes:
    return hmac.digest(key, what + nonces + padded, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# -- bytes -------------------------------------------------------------------------------------------------------------


def shut(connection: socket.socket) -> None:
    """End a connection; a thread that waits for it goes on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def send(connection: socket.socket, content: bytes | memoryview, deadline: Deadline) -> None:
    """Send all of it: the kernel waits until it has taken a piece, but not for long. Raises OSError."""
    connection.settimeout(None)
    view = memoryview(content)
    while view:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline.timeval())
        try:
            view = view[connection.send(view[:SENT_BYTES]) :]
        except BlockingIOError:
            raise TimeoutError("the other daemon does not read") from None


def receive(connection: socket.socket, length: int, deadline: Deadline) -> bytes:
    """Return so many bytes. Raises OSError and ParcelError."""
    content = bytearray(length)
    receive_into(connection, memoryview(content), deadline)
    return bytes(content)


def receive_into(connection: socket.socket, view: memoryview, deadline: Deadline) -> None:
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


def pad(name: str) -> bytes:
    """Return a name as the wire has it. Raises ParcelError for one that is too long."""
    padded = name.encode("latin-1", "replace").ljust(_NAME, b"\0")
    if len(padded) != _NAME:
        raise ParcelError("the name is too long")
    return padded


def unpad(padded: bytes) -> str:
    """Return the name that was padded."""
    return padded.rstrip(b"\0").decode("latin-1")


class PeerFolder:
    """The parcels of another daemon. Connects when it is asked first; an error ends the connection."""

    def __init__(self, peer: Peer, fingerprint: str, key: str, deadline: Deadline) -> None:
        """`deadline` is for all that is asked."""
        self._peer, self._fingerprint, self._key = peer, fingerprint, derive_key(key)
        self._deadline = deadline
        self._connection: socket.socket | None = None

    def __str__(self) -> str:
        return str(self._peer)

    def index(self, part: str) -> bytes:
        """Return the index of a part; an empty one if it is not there. Raises OSError and ParcelError."""
        with self._asked(LOOK, part, b"") as connection:
            length = _length(connection, self._deadline)
            if length > MAX_LOOK:
                raise ParcelError("its index is too long")
            return receive(connection, length, self._deadline)

    def read(self, part: str, slots: Sequence[int], rows: Iterable[memoryview]) -> Generator[memoryview | None]:
        """Read blocks of a part, unchecked. Raises OSError and ParcelError."""
        if not slots:
            return
        with self._asked(READ, part, struct.pack(f"<{len(slots)}Q", *slots)) as connection:
            for is_there, row in zip(receive(connection, len(slots), self._deadline), rows, strict=False):
                if is_there:
                    receive_into(connection, row, self._deadline)
                yield row if is_there else None

    def remove(self, part: str) -> None:
        """Have a parcel removed that has arrived, or is not wanted. Raises OSError and ParcelError.

        There is no answer to wait for: before it the other daemon would free the pages that it sent.
        """
        with self._asked(DROP, part, b""):
            pass

    def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            shut(connection)
            connection.close()

    @contextmanager
    def _asked(self, kind: int, part: str, rest: bytes) -> Iterator[socket.socket]:
        """Send a request; the answer follows until the deadline."""
        if self._connection is None:
            self._connection = call(self._peer, self._fingerprint, self._key, self._deadline)
        try:
            request = pad(part) + rest
            send(self._connection, REQUEST.pack(kind, len(request)) + request, self._deadline)
            yield self._connection
        except struct.error:
            self.close()
            raise ParcelError("its answer is malformed") from None
        except BaseException:
            self.close()
            raise


def _length(connection: socket.socket, deadline: Deadline) -> int:
    """Return the length of what follows."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    return int(length)
