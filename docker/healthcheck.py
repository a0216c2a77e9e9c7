"""Ends with 0 if the daemon in this container answers /health with 200: the image's HEALTHCHECK.

It runs every ten seconds, so it imports little: `python -I -S` leaves out site-packages, and HTTP is one line here.
"""

from __future__ import annotations

import os
import socket
import sys


def is_healthy() -> bool:
    """Return whether /health answers 200, over TLS if the daemon has a certificate."""
    try:
        with socket.create_connection(
            ("127.0.0.1", int(os.environ.get("QUIRE_PORT") or 8000)), timeout=4
        ) as connection:
            if os.environ.get("QUIRE_SSL_CERTFILE"):
                connection = _encrypted(connection)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return connection.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def _encrypted(connection: socket.socket) -> socket.socket:
    import ssl

    # The certificate names the host that clients use, not loopback; nothing secret is sent.
    return ssl._create_unverified_context().wrap_socket(connection)  # noqa: S323, SLF001 - loopback


if __name__ == "__main__":
    sys.exit(not is_healthy())
