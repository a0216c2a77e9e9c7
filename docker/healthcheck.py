"""Ends with 0 if the daemon in this container answers /health with 200: the image's HEALTHCHECK.

It is run by `python -I -S`, without site-packages, so that it costs little every ten seconds.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys


def is_healthy() -> bool:
    """Return whether /health answers 200, over TLS if the daemon has a certificate."""
    port = int(os.environ.get("QUIRE_PORT") or 8000)
    connection: http.client.HTTPConnection
    if os.environ.get("QUIRE_SSL_CERTFILE"):
        # The certificate names the host that clients use, not loopback.
        context = ssl._create_unverified_context()  # noqa: S323, SLF001 - loopback, and nothing secret is sent
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=4, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(not is_healthy())
