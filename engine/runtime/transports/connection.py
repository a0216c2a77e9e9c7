"""Conversations between daemons of several machines over TCP: a server's threads, the proof of a key, bounded waits.

    server   magic, a nonce
    client   magic, a nonce, the name of what it asks for, HMAC of both nonces and the name
    server   status, HMAC of both nonces, the name and the status

Both prove that they have the key; the nonces make a proof good for one connection. Nothing is encrypted. Every wait is
bounded by an idle limit and by a deadline. Threads of this module, and the caller's in `call`.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from hashlib import sha256

from engine.core.errors import ParcelError
from engine.settings.peer import Peer

log = logging.getLogger("quire.kv_tcp")

_MAGIC = b"quiretcp1"
_NONCE = _MAC = 32
MAX_NAME = 64
_HELLO = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s")
_ASK = struct.Struct(f"<{len(_MAGIC)}s{_NONCE}s{MAX_NAME}s{_MAC}s")
_REPLY = struct.Struct(f"<B{_MAC}s")
_TIMEVAL = struct.Struct("@ll")
_GIVEN, _GONE, _REFUSED = range(3)

MAX_CONNECTIONS = 32  # that have proven the key; a further one is closed, and its daemon computes the prompt
MAX_STRANGERS = 64  # that have not yet; for a further one the oldest is closed, of the address that has the most
HANDSHAKE_S = 5.0
IDLE_S = 10.0  # without a byte
_SWEEP_S = 5.0


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


class Server:
    """Accepts connections, and gives to those that have the key, on threads of its own."""

    def __init__(self, address: Peer, key: bytes) -> None:
        """Listen. Raises OSError."""
        self._key = key
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=MAX_STRANGERS + MAX_CONNECTIONS)
        self._listener.settimeout(_SWEEP_S)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: dict[socket.socket, str] = {}  # and their addresses, oldest first
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="quire-kv-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection and stop to listen."""
        with self._lock:
            self._is_closed = True
            for connection in (*self._strangers, *self._open):
                shut(connection)
        shut(self._listener)  # wakes the thread
        self._thread.join()
        self._listener.close()

    @property
    def num_open(self) -> int:
        """Return the number of connections that have proven the key."""
        return len(self._open)

    def _accept(self) -> None:
        while not self._is_closed:
            self._accept_next()

    def _accept_next(self) -> None:
        """Serve the next connection; no error ends the server."""
        try:
            self._welcome(*self._listener.accept())
        except TimeoutError:
            self._sweep()
        except OSError:  # closed, or out of file descriptors
            time.sleep(0 if self._is_closed else 0.05)
        except Exception as error:  # as when the system has no thread left
            log.warning("A connection for K/V was not served: %s: %s", type(error).__name__, error)
            time.sleep(0.05)

    def _welcome(self, connection: socket.socket, address: tuple[str, int]) -> None:
        with self._lock:
            if self._is_closed:
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
        shut(oldest)

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

    def _sweep(self) -> None:
        """Do what is due every few seconds."""

    def _give(self, caller: Caller) -> None:
        """Answer a daemon that has the key."""
        raise NotImplementedError

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                _tune(connection)
                caller = _meet(connection, self._key)
                if caller is not None and self._admit(connection):
                    self._give(caller)
        except (OSError, ParcelError) as error:  # the other daemon computes the prompt
            log.debug("K/V was not given: %s", error)
        except Exception as error:
            log.warning("K/V was not given: %s: %s", type(error).__name__, error)
            log.debug("K/V was not given, here:", exc_info=True)
        finally:
            self._forget(connection)


class Caller:
    """A daemon that has the key, and the name of what it asks for."""

    def __init__(self, connection: socket.socket, key: bytes, nonces: bytes, padded: bytes, deadline: Deadline) -> None:
        self.connection, self._key, self._nonces, self._padded = connection, key, nonces, padded
        self.deadline = deadline  # of the handshake
        self.name = padded.rstrip(b"\0").decode("ascii", "replace")

    def accept(self) -> None:
        """Say that it is here; what was asked for follows."""
        self._reply(_GIVEN, b"give")

    def decline(self) -> None:
        """Say that it is not here."""
        self._reply(_GONE, b"gone")

    def _reply(self, status: int, what: bytes) -> None:
        mac = _prove(self._key, what, self._nonces, self._padded)
        send(self.connection, _REPLY.pack(status, mac), self.deadline)


def _meet(connection: socket.socket, key: bytes) -> Caller | None:
    """Return who calls; None without the key."""
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


def call(peer: Peer, name: str, key: bytes, timeout_s: float, lacks: str) -> tuple[socket.socket, Deadline]:
    """Connect and ask for something; it follows on the connection.

    `lacks` describes a daemon that has not got it. Raises ParcelError and OSError."""
    deadline = Deadline(timeout_s)
    try:
        padded = name.encode("ascii").ljust(MAX_NAME, b"\0")
    except UnicodeEncodeError:
        padded = b""
    if len(padded) != MAX_NAME:
        raise ParcelError("the name is not that of a parcel")
    connection = socket.create_connection(peer, timeout=min(HANDSHAKE_S, timeout_s))
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
            raise ParcelError(f"{peer} {lacks}")
    except BaseException:
        connection.close()
        raise
    return connection, deadline


def derive_key(key: str) -> bytes:
    """Return the key of proofs from that of the settings."""
    return sha256(b"quire-kv" + key.encode()).digest()


def _prove(key: bytes, what: bytes, nonces: bytes, padded: bytes) -> bytes:
    return hmac.digest(key, what + nonces + padded, "sha256")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def shut(connection: socket.socket) -> None:
    """End a connection; a thread that waits for it goes on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def send(connection: socket.socket, content: bytes, deadline: Deadline) -> None:
    """Send all of it. Raises OSError."""
    view = memoryview(content)
    while view:
        connection.settimeout(deadline.wait_s())
        view = view[connection.send(view) :]


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
