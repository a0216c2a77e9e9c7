"""Offers a K/V folder to daemons of other machines over TCP, and reads that of another daemon.

After the handshake (connection.py), in which the fingerprint is asked for, the reader sends requests: a kind, the length
of what follows, and this. The answer is a length and so many bytes.

    LOOK    for each part the reader knows: its name, and a checksum of each piece of its index
            -> for each part there is: its name, the length of its index, and the pieces that differ
    READ    a part's name and a slot
            -> the block, or nothing

Blocks are checked by the reader, as those of a local folder (shared_folder.py). Threads of the server; the store's thread
reads.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from engine.core.errors import ParcelError
from engine.runtime.transports import parts
from engine.runtime.transports.connection import (
    HANDSHAKE_S,
    IDLE_S,
    Caller,
    Deadline,
    Server,
    call,
    derive_key,
    receive,
    receive_into,
    send,
    shut,
)
from engine.settings.peer import Peer

log = logging.getLogger("quire.kv_store")

_LOOK, _READ = range(2)
_REQUEST = struct.Struct("<BI")  # kind, bytes that follow
_LENGTH = struct.Struct("<I")
_PART = struct.Struct("<48sII")  # name, bytes of the index, pieces that follow
_SLOT = struct.Struct("<48sQ")
_PIECE_BYTES = 64 * parts.ENTRY_BYTES
_CHECK_BYTES = 8
_MAX_REQUEST, _MAX_LOOK = 1 << 20, 1 << 28
_REPLY_S = 60.0
_OTHER = "runs another model, or has other settings of the KV pool"
_NAME = re.compile(r"[0-9a-f]+(\.[0-9]+)?")


class FolderServer(Server):
    """Offers the parts of a folder that have one fingerprint."""

    def __init__(self, folder: Path, fingerprint: str, block_bytes: int, address: Peer, key: str) -> None:
        """Listen. Raises OSError."""
        self._folder, self._fingerprint, self._block_bytes = folder, fingerprint, block_bytes
        super().__init__(address, derive_key(key))

    def _give(self, caller: Caller) -> None:
        if caller.name != self._fingerprint:
            caller.decline()
            return
        caller.accept()
        connection = caller.connection
        while True:
            deadline = Deadline(IDLE_S)
            kind, length = _REQUEST.unpack(receive(connection, _REQUEST.size, deadline))
            if length > _MAX_REQUEST:
                raise ParcelError("a request is too long")
            request = receive(connection, length, deadline)
            try:
                answer = self._look(request) if kind == _LOOK else self._read(request)
            except (struct.error, OverflowError):
                raise ParcelError("a request is malformed") from None
            deadline = Deadline(_REPLY_S)
            send(connection, _LENGTH.pack(len(answer)) + answer, deadline)

    def _look(self, request: bytes) -> bytes:
        known: dict[str, list[bytes]] = {}
        at = 0
        while at < len(request):
            padded, _, count = _PART.unpack_from(request, at)
            at += _PART.size
            end = at + count * _CHECK_BYTES
            if end > len(request):
                raise ParcelError("a request is malformed")
            known[_unpad(padded)] = [request[each : each + _CHECK_BYTES] for each in range(at, end, _CHECK_BYTES)]
            at = end
        answer = []
        for name in parts.names(self._folder, self._fingerprint):
            index, checks = parts.read_index(self._folder, name), known.get(name, [])
            pieces = [
                _LENGTH.pack(number) + piece
                for number, piece in enumerate(_pieces(index))
                if number >= len(checks) or _check(piece) != checks[number]
            ]
            answer += [_PART.pack(_pad(name), len(index), len(pieces)), *pieces]
        return b"".join(answer)

    def _read(self, request: bytes) -> bytes:
        padded, slot = _SLOT.unpack(request)
        name, row = _unpad(padded), bytearray(self._block_bytes)
        if name.partition(".")[0] != self._fingerprint or not _NAME.fullmatch(name):
            return b""
        return bytes(row) if parts.read_block(self._folder, name, slot, memoryview(row)) else b""


class PeerFolder:
    """The folder of another daemon, as a source of shared_folder.py. Connects at each look, unless it is connected."""

    def __init__(self, peer: Peer, fingerprint: str, key: str) -> None:
        self._peer, self._fingerprint, self._key = peer, fingerprint, derive_key(key)
        self._connection: socket.socket | None = None
        self._is_well = True
        self._is_closed = False

    def indexes(self, known: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the index of each part; none if the daemon cannot be reached."""
        if self._is_closed:
            return {}
        try:
            connection = self._connection
            if connection is None:
                connection, _ = call(self._peer, self._fingerprint, self._key, HANDSHAKE_S, _OTHER)
                self._connection = connection
            found = self._look(connection, known)
        except (OSError, ParcelError, struct.error) as error:
            self._fail(error)
            return {}
        if not self._is_well:
            log.info("K/V comes from %s again.", self._peer)
        self._is_well = True
        return found

    def read(self, name: str, slot: int, row: memoryview) -> bool:
        """Read a block into `row`; returns False if it is gone."""
        connection = self._connection
        if connection is None:  # until the next look
            return False
        try:
            length, deadline = _ask(connection, _READ, _SLOT.pack(_pad(name), slot))
            if length not in (0, len(row)):
                raise ParcelError("a block of another size came")
            receive_into(connection, row[:length], deadline)
        except (OSError, ParcelError) as error:
            self._fail(error)
            return False
        return length > 0

    def close(self) -> None:
        """End the connection, also while another thread waits for it."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            shut(connection)
            connection.close()

    def _look(self, connection: socket.socket, known: Mapping[str, bytes]) -> dict[str, bytes]:
        request = []
        for name, index in known.items():
            checks = [_check(piece) for piece in _pieces(index)]
            request += [_PART.pack(_pad(name), 0, len(checks)), *checks]
        length, deadline = _ask(connection, _LOOK, b"".join(request))
        if length > _MAX_LOOK:
            raise ParcelError("its index is too long")
        return _update(known, memoryview(receive(connection, length, deadline)))

    def _fail(self, error: Exception) -> None:
        """Disconnect; log only the first failure since the daemon answered."""
        self._disconnect()
        if self._is_well and not self._is_closed:
            log.warning("K/V of %s is not used (%s); prompts are computed here.", self._peer, error)
        self._is_well = False


def _pieces(index: bytes) -> list[bytes]:
    return [index[at : at + _PIECE_BYTES] for at in range(0, len(index), _PIECE_BYTES)]


def _ask(connection: socket.socket, kind: int, request: bytes) -> tuple[int, Deadline]:
    """Send a request; return the length of the answer, which follows until the deadline."""
    deadline = Deadline(_REPLY_S)
    send(connection, _REQUEST.pack(kind, len(request)) + request, deadline)
    (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size, deadline))
    return length, deadline


def _check(piece: bytes) -> bytes:
    """Return a short digest. A CRC does not do: entries end with their own, so the CRC of all good pieces is the same."""
    return blake2b(piece, digest_size=_CHECK_BYTES).digest()


def _pad(name: str) -> bytes:
    return name.encode("latin-1")


def _unpad(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("latin-1")


def _update(known: Mapping[str, bytes], answer: memoryview) -> dict[str, bytes]:
    """Return the indexes that `known` and the pieces of an answer make. Raises struct.error and ParcelError."""
    found: dict[str, bytes] = {}
    at = total = 0
    while at < len(answer):
        padded, size, count = _PART.unpack_from(answer, at)
        at += _PART.size
        total += size
        if total > _MAX_LOOK:
            raise ParcelError("its indexes are too long")
        name = _unpad(padded)
        index = bytearray(known.get(name, b"")[:size].ljust(size, b"\0"))
        for _ in range(count):
            (number,) = _LENGTH.unpack_from(answer, at)
            at += _LENGTH.size
            start = number * _PIECE_BYTES
            length = max(min(_PIECE_BYTES, size - start), 0)
            index[start : start + length] = answer[at : at + length]
            at += length
        found[name] = bytes(index)
    return found
