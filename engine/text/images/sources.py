"""Reads images that a request holds, and files that the operator lets requests name. Any thread."""

from __future__ import annotations

import binascii
from pathlib import Path
from urllib.parse import unquote, urlsplit

from engine.core.shown import shorten
from engine.system.regular_file import read_bytes
from engine.text.images.decoder import refused

MAX_BYTES = 256 << 20  # of a file
# What base64 may have of a URL's escapes; unquote takes seconds for megabytes of them.
_CODES = [(f"%{ord(sign):02{kind}}", sign) for sign in "+/=\r\n " for kind in "xX"]
_CODES += [("-", "+"), ("_", "/")]  # of base64 for URLs, which would be left out of the bytes


class LocalSources:
    """Reads the bytes of an image from its address, without a network."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is that of --allowed-local-media-path."""
        self._folder = None if folder is None else folder.resolve()

    def read(self, url: str, param: str) -> bytes:
        """Return an image that the request holds, or a file of this machine. Raises InvalidRequestError."""
        scheme = scheme_of(url)
        if scheme == "data":
            return _decoded(url, param)
        if scheme == "file":
            return self._read_file(url, param)
        raise refused(f"its address is {shorten(url)[:40]!r}; send data:image/png;base64,... with its bytes", param)

    def _read_file(self, url: str, param: str) -> bytes:
        if self._folder is None:
            raise refused("no files of this machine are read (--allowed-local-media-path)", param)
        try:
            path = Path(unquote(urlsplit(url).path)).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise FileNotFoundError
            return read_bytes(path, MAX_BYTES)
        except (OSError, ValueError, RuntimeError):
            raise refused("its file is not below --allowed-local-media-path, or cannot be read", param) from None


def scheme_of(url: str) -> str:
    """Return the scheme of an address: data, file, https."""
    return url[:10].partition(":")[0].strip().lower()


def _decoded(url: str, param: str) -> bytes:
    """Return the bytes of data:image/png;base64,..."""
    head, _, data = url.partition(",")
    if not head.lower().endswith(";base64"):
        raise refused("its address is not data:image/png;base64,... with its bytes", param)
    try:
        for code, sign in _CODES:
            data = data.replace(code, sign)
        if "%" in data:
            raise ValueError
        return binascii.a2b_base64(data)
    except ValueError:
        raise refused("its base64 is malformed", param) from None
