"""Parses host names and origins, of settings and of headers.

Start-up thread and event loop. Standard library and pydantic only.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Collection
from functools import lru_cache
from ipaddress import IPv6Address
from typing import NamedTuple

from pydantic_core import PydanticCustomError

ANY = "*"
NO_ORIGIN = "null"  # of sandboxed frames and of pages read from a file
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]*))?")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_PORTS = {"http": "80", "https": "443"}


class Authority(NamedTuple):
    """A Host header's host[:port], in lower case and without a final dot."""

    host: str
    port: str  # "" if absent
    is_address: bool  # an IP address, which DNS cannot point elsewhere

    @staticmethod
    @lru_cache(maxsize=64)  # a client sends the same one with every request
    def parse(text: str) -> Authority | None:
        """Return the parts of a host and port, or None."""
        match = _AUTHORITY.fullmatch(text)
        if match is None:
            return None
        port = match["port"] or ""
        if match["v6"] is not None:
            try:
                return Authority(f"[{IPv6Address(match['v6'])}]", port, is_address=True)
            except ValueError:
                return None
        name = match["name"].lower().removesuffix(".")
        return Authority(name, port, _is_ipv4(name)) if name else None


def _is_ipv4(name: str) -> bool:
    """Return whether a host is an IPv4 address in any notation, such as 127.1."""
    try:
        socket.inet_aton(name)
    except OSError:
        return False
    return True


def is_loopback_name(name: str) -> bool:
    """Return whether a name never leaves the machine: localhost (RFC 6761)."""
    return name == "localhost" or name.endswith(".localhost")


def names_host(allowed: Collection[str], name: str) -> bool:
    """Return whether --allowed-hosts has a name; `*.example.com` is every subdomain."""
    parents = [f"*{name[index:]}" for index, letter in enumerate(name) if letter == "."]
    return not {ANY, name, *parents}.isdisjoint(allowed)


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether Origin and Host name one server; a TLS proxy changes the scheme."""
    scheme, _, rest = origin.partition("://")
    ours, theirs = Authority.parse(host), Authority.parse(rest)
    default = _PORTS.get(scheme)
    if default is None or ours is None or theirs is None:
        return False
    return ours.host == theirs.host and (ours.port or default) == (theirs.port or default)


def names_origin(allowed: Collection[str], origin: str) -> bool:
    """Return whether --allowed-origins has an Origin; `scheme://*` is a pattern."""
    scheme, separator, _ = origin.partition("://")
    return ANY in allowed or origin in allowed or bool(separator and f"{scheme}://{ANY}" in allowed)


def read_hosts(value: object) -> tuple[str, ...]:
    """Return the entries of --allowed-hosts. Raises PydanticCustomError."""
    names = [name.lower().removesuffix(".") for name in _items(value)]
    for name in names:
        if name != ANY and not _NAME.fullmatch(name):
            sentence = "write host names without scheme or port, such as quire or *.example.com, or * for any"
            raise PydanticCustomError("host_name", sentence)
    return tuple(names)


def read_media_hosts(value: object) -> tuple[str, ...]:
    """Return the entries of --allowed-media-domains. Raises PydanticCustomError."""
    hosts = _items(value)
    if not all(map(Authority.parse, hosts)):
        sentence = "write whole host names without scheme, such as images.example.com or images.example.com:8443"
        raise PydanticCustomError("media_host", sentence)
    return tuple(hosts)


def read_origins(value: object) -> tuple[str, ...]:
    """Return --allowed-origins as browsers spell them. Raises PydanticCustomError."""
    origins = [_origin(item) for item in _items(value)]
    if None in origins:
        sentence = (
            "write origins such as https://chat.example, http://localhost:3000, tauri://localhost or "
            "chrome-extension://*, or * for any"
        )
        raise PydanticCustomError("origin", sentence)
    return tuple([origin for origin in origins if origin is not None])


def _items(value: object) -> list[str]:
    """Return the items of a list, of comma-separated text, or of a JSON list."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text.startswith("[") else [item.strip() for item in text.split(",")]
        except (ValueError, RecursionError):
            raise PydanticCustomError("json_list", 'a JSON list looks like ["first", "second"]') from None
        return _items(value) if text.startswith("[") else [item for item in value if item]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("list", "it must be a list of names")
    return [item for each in value for item in _items(each)]


def _origin(text: str) -> str | None:
    if text in (ANY, NO_ORIGIN):
        return text
    scheme, separator, rest = text.lower().removesuffix("/").partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        return None
    if rest == ANY and scheme not in _PORTS:
        return f"{scheme}://{ANY}"
    authority = Authority.parse(rest)
    if authority is None:
        return None
    port = "" if authority.port in ("", _PORTS.get(scheme)) else f":{authority.port}"
    return f"{scheme}://{authority.host}{port}"
