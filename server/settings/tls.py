"""The certificate of HTTPS, from --ssl-certfile and its companions. Start-up thread, and event loop on SIGHUP."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from engine.core.errors import ConfigError
from engine.system.regular_file import check_regular
from server.settings.serve_config import ServeConfig


class Tls(NamedTuple):
    """Paths as uvicorn takes them."""

    ssl_certfile: str
    ssl_keyfile: str | None
    ssl_ca_certs: str | None
    ssl_cert_reqs: int

    def load_into(self, context: ssl.SSLContext) -> None:
        """Read the certificate and its key; connections from now on have them. Raises ConfigError."""
        try:
            for path in filter(None, (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)):
                check_regular(Path(path))  # a FIFO would block
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")  # a prompt would hang
            if self.ssl_ca_certs is not None:
                context.load_verify_locations(self.ssl_ca_certs)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            named = " and ".join(path for path in (self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs) if path)
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"--ssl-certfile: the certificate cannot be read from {named}: {reason}; name files in PEM without a password."
            ) from error


def read_tls(config: ServeConfig) -> Tls | None:
    """Return the paths, once the files have been read; None for plain HTTP. Raises ConfigError."""
    if config.ssl_certfile is None:
        return None
    key, authorities = config.ssl_keyfile, config.ssl_ca_certs
    tls = Tls(
        str(config.ssl_certfile),
        None if key is None else str(key),
        None if authorities is None else str(authorities),
        config.ssl_cert_reqs,
    )
    tls.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    return tls
