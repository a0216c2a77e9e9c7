"""Fetches images of requests from the hosts that the operator allows. Event loop.

A host's name is resolved once, and the connection goes to what it was resolved to, so that it cannot mean another machine a
moment later; no machine of a private network is spoken to.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING

from engine.text.images.decoder import refused
from engine.text.images.sources import scheme_of
from server.settings.app_config import AppConfig

if TYPE_CHECKING:
    import httpx

FETCH_S = 20.0  # for all of an image, redirects included
_MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_INTERNET = IPv6Network("2000::/3")  # of IPv6; others may lead to private machines, and to those of IPv4
# Tunnels to IPv4, and what clouds and networks keep for themselves, of which Python may not say so.
_REFUSED = [
    ip_network(each)
    for each in ("168.63.129.16", "192.0.0.0/24", "192.88.99.0/24", "2001::/32", "2002::/16", "3fff::/20")
]
_RESOLVING = ThreadPoolExecutor(4, "quire-resolving")  # seconds long, and others need the threads of the loop


class MediaFetcher:
    """Fetches one image from its address."""

    def __init__(self, config: AppConfig) -> None:
        self._hosts = frozenset(host.lower() for host in config.allowed_media_domains)
        self._max_bytes = config.max_body_bytes

    async def fetch(self, url: str, param: str, hold: Callable[[int], None]) -> bytes | None:
        """Return an image of another host; None for an address that names none. Raises InvalidRequestError.

        Bytes that arrive are counted by `hold`, which may raise OverloadedError.
        """
        if scheme_of(url) not in _PORTS:
            return None
        try:
            return await asyncio.wait_for(self._follow(url, param, hold), FETCH_S)
        except asyncio.TimeoutError:  # not the builtin's before Python 3.11
            raise refused(f"its host did not send it within {FETCH_S:.0f} s", param) from None

    async def _follow(self, url: str, param: str, hold: Callable[[int], None]) -> bytes:
        import httpx  # few daemons fetch

        for _ in range(_MAX_REDIRECTS + 1):
            try:
                address = httpx.URL(url)
                port = self._check(address, param)
            except (httpx.InvalidURL, UnicodeError):  # of names such as xn--a
                raise refused("its address is malformed", param) from None
            target = await _resolve(address.host, port, param)
            try:
                async with (
                    httpx.AsyncClient(trust_env=False, timeout=FETCH_S) as client,
                    client.stream(
                        "GET",
                        address.copy_with(host=target),
                        headers={"host": address.netloc.decode(), "accept": "image/*", "accept-encoding": "identity"},
                        extensions={"sni_hostname": address.host},
                    ) as answer,
                ):
                    if answer.has_redirect_location:
                        url = str(address.join(answer.headers["location"]))
                        continue
                    return await self._content(answer, param, hold)
            except (httpx.HTTPError, UnicodeError) as error:  # the second of a name that it redirects to
                raise refused(f"its host could not be asked ({type(error).__name__})", param) from None
        raise refused(f"its host redirects more than {_MAX_REDIRECTS} times", param)

    def _check(self, address: httpx.URL, param: str) -> int:
        """Return the port of an address that the operator allows. Raises InvalidRequestError for any other."""
        usual = _PORTS.get(address.scheme, 0)
        port = address.port or usual
        names = {f"{address.host}:{port}", *([address.host] if port == usual else [])}
        if not usual or address.userinfo or not names & self._hosts:
            raise refused(
                "images are fetched only from hosts that --allowed-media-domains names; send data:image/png;base64,... "
                "with its bytes",
                param,
            )
        return port

    async def _content(self, answer: httpx.Response, param: str, hold: Callable[[int], None]) -> bytes:
        if answer.status_code != 200:
            raise refused(f"its host answers {answer.status_code}", param)
        content = bytearray()
        async for piece in answer.aiter_raw():
            hold(len(piece))
            content += piece
            if len(content) > self._max_bytes:
                raise refused(f"it has more than {self._max_bytes} bytes (--max-body-bytes)", param)
        return bytes(content)


async def _resolve(host: str, port: int, param: str) -> str:
    """Return an address of a host whose addresses are all public. Raises InvalidRequestError."""
    try:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(_RESOLVING, ask)
    except (OSError, UnicodeError):
        raise refused(f"its host {host!r} has no address; check the name", param) from None
    addresses = [str(address[0]) for *_, address in found]
    if not all(is_public(ip_address(each)) for each in addresses):
        raise refused(f"its host {host!r} is in a private network, and none is asked; send the image's bytes", param)
    return addresses[0]


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is one of the Internet; those of IPv6 that lead to a machine of IPv4 are not."""
    if isinstance(address, IPv6Address) and address not in _INTERNET:
        return False
    return address.is_global and not address.is_multicast and not any(address in each for each in _REFUSED)
