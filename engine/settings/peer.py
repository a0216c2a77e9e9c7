"""The addresses at which daemons offer K/V to other machines. Standard library only. Any thread."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple


class Peer(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Return the address in a text such as 10.0.0.5:5600 or [::1]:5600. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ValueError(text)
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_unspecified(self) -> bool:
        """True for every address of this machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_peer(text: str) -> bool:
    """Return whether a text is a host and a port."""
    try:
        Peer.parse(text)
    except ValueError:
        return False
    return True
