"""Conversations between daemons of several machines over TCP: the proof of a key, bounded waits, and the client's end.

    server   magic, a nonce
    client   magic, a nonce, the fingerprint of its blocks, HMAC of both nonces and the fingerprint
    server   status, HMAC of both nonces, the fingerprint and the status

Both prove that they have the key; the nonces make a proof good for one connection. Nothing is encrypted. Requests follow
until the client ends the connection: a kind, the length of what follows, and this.

    LOOK    a part's name, or none for all; for each part that the client knows: its name, and a checksum of each piece of
            its index -> a length; for each part there is: its name, the length of its index, and the pieces that differ
    READ    a part's name, and slots -> for each whether it is there; the blocks that are
    DROP    a parcel's name; no answer

Every wait is bounded by an idle limit and by a deadline. Any thread.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b, sha256

from engine.core.errors import ParcelError
from engine.runtime.stores import parts
from engine.settings.peer import Peer

_MAGIC = b"quiretcp3"
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
_PART = struct.Struct(f"<{_NAME}sII")  # name, bytes of the index, pieces that follow
_PIECE_BYTES = 64 * parts.ENTRY_BYTES
_CHECK_BYTES = 8
MAX_LOOK = 1 << 28

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


# -- indexes, as far as they differ ------------------------------------------------------------------------------------


def digests_of(known: Mapping[str, bytes]) -> bytes:
    """Return the checksums of the indexes that a reader knows."""
    found = []
    for name, index in known.items():
        checks = [_check(piece) for piece in _pieces(index)]
        found += [_PART.pack(pad(name), len(index), len(checks)), *checks]
    return b"".join(found)


def read_digests(request: memoryview) -> dict[str, list[bytes]]:
    """Return the checksums by name. Raises struct.error and ParcelError."""
    known: dict[str, list[bytes]] = {}
    at = 0
    while at < len(request):
        padded, _, count = _PART.unpack_from(request, at)
        at += _PART.size
        end = at + count * _CHECK_BYTES
        if end > len(request):
            raise ParcelError("a request is malformed")
        known[unpad(padded)] = [bytes(request[each : each + _CHECK_BYTES]) for each in range(at, end, _CHECK_BYTES)]
        at = end
    return known


def changes_of(indexes: Mapping[str, bytes], known: Mapping[str, list[bytes]]) -> bytes:
    """Return the pieces of indexes that a reader does not know."""
    found = []
    for name, index in indexes.items():
        checks = known.get(name, [])
        pieces = [
            LENGTH.pack(number) + piece
            for number, piece in enumerate(_pieces(index))
            if number >= len(checks) or _check(piece) != checks[number]
        ]
        found += [_PART.pack(pad(name), len(index), len(pieces)), *pieces]
    return b"".join(found)


def update(known: Mapping[str, bytes], answer: memoryview) -> dict[str, bytes]:
    """Return the indexes that `known` and the pieces of an answer make. Raises struct.error and ParcelError."""
    found: dict[str, bytes] = {}
    at = total = 0
    while at < len(answer):
        padded, size, count = _PART.unpack_from(answer, at)
        at += _PART.size
        total += size
        if total > MAX_LOOK:
            raise ParcelError("its indexes are too long")
        name = unpad(padded)
        index = bytearray(known.get(name, b"")[:size].ljust(size, b"\0"))
        for _ in range(count):
            (number,) = LENGTH.unpack_from(answer, at)
            at += LENGTH.size
            start = number * _PIECE_BYTES
            length = max(min(_PIECE_BYTES, size - start), 0)
            index[start : start + length] = answer[at : at + length]
            at += length
        found[name] = bytes(index)
    return found


def _pieces(index: bytes) -> list[bytes]:
    return [index[at : at + _PIECE_BYTES] for at in range(0, len(index), _PIECE_BYTES)]


def _check(piece: bytes) -> bytes:
    """Return a short digest. A CRC does not do: entries end with their own, so the CRC of all good pieces is the same."""
    return blake2b(piece, digest_size=_CHECK_BYTES).digest()


_REPLY_S = 60.0


class PeerFolder:
    """The folders of another daemon. Connects at a look, unless it is connected; an error ends the connection."""

    def __init__(self, peer: Peer, fingerprint: str, key: str, deadline: Deadline | None = None) -> None:
        """`deadline` is for all that is asked; without one each answer may take a while."""
        self._peer, self._fingerprint, self._key = peer, fingerprint, derive_key(key)
        self._deadline = deadline
        self._connection: socket.socket | None = None
        self._is_closed = False

    def __str__(self) -> str:
        return str(self._peer)

    def _connect(self) -> None:
        """Connect, unless that was done before. Raises OSError and ParcelError."""
        if self._connection is None:
            deadline = self._deadline or Deadline(HANDSHAKE_S)
            self._connection = call(self._peer, self._fingerprint, self._key, deadline)

    def indexes(self, known: Mapping[str, bytes], only: str = "") -> dict[str, bytes]:
        """Return the index of each part, or of one. Raises OSError and ParcelError."""
        if self._is_closed:
            return {}
        self._connect()
        with self._asked(LOOK, only, digests_of(known)) as (connection, deadline):
            length = _length(connection, deadline)
            if length > MAX_LOOK:
                raise ParcelError("its index is too long")
            return update(known, memoryview(receive(connection, length, deadline)))

    def read(self, part: str, slots: Sequence[int], rows: Iterable[memoryview]) -> Generator[memoryview | None]:
        """Read blocks of a part, unchecked; none before the next look after an error. Raises OSError and ParcelError."""
        if self._connection is None or not slots:
            return
        with self._asked(READ, part, struct.pack(f"<{len(slots)}Q", *slots)) as (connection, deadline):
            for is_there, row in zip(receive(connection, len(slots), deadline), rows, strict=False):
                if is_there:
                    receive_into(connection, row, deadline)
                yield row if is_there else None

    def remove(self, part: str) -> None:
        """Have a parcel removed that has arrived, or is not wanted. Raises OSError and ParcelError.

        There is no answer to wait for: before it the other daemon would free the pages that it sent.
        """
        self._connect()
        with self._asked(DROP, part, b""):
            pass

    def close(self) -> None:
        """End the connection, also while another thread waits for it."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            shut(connection)
            connection.close()

    @contextmanager
    def _asked(self, kind: int, part: str, rest: bytes) -> Iterator[tuple[socket.socket, Deadline]]:
        """Send a request; the answer follows until the deadline."""
        connection, deadline = self._connection, self._deadline or Deadline(_REPLY_S)
        if connection is None:
            raise ParcelError("the connection was ended")
        try:
            request = pad(part) + rest
            send(connection, REQUEST.pack(kind, len(request)) + request, deadline)
            yield connection, deadline
        except struct.error:
            self._disconnect()
            raise ParcelError("its answer is malformed") from None
        except BaseException:
            self._disconnect()
            raise


def _length(connection: socket.socket, deadline: Deadline) -> int:
    """Return the length of what follows."""
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    return int(length)
