"""Reads files that a user or a client names: regular files of bounded size.

Opening a FIFO blocks until another process writes to it, and a device may be read without end. Both the server and the
runtime read small files through this module, and check a file through it before a library opens it by name.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20  # of a file that is read whole; the largest tokenizer.json are a tenth of it
MAX_SETTING_BYTES = 64 << 20  # of one that a setting names

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a link"),  # as lstat says; stat follows it
)


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder for ~, or as it is if there is no such folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no HOME, and no such user
        return Path(path)


def check_regular(path: Path, max_bytes: int | None = None) -> int:
    """Return the size of a regular file of at most `max_bytes`, else raise OSError."""
    return _check(path, os.stat(path), max_bytes)  # noqa: PTH116 - as os.fstat


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a regular file's content. Raises OSError; never blocks on a FIFO."""
    check_regular(path, max_bytes)  # opening some devices has effects
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor), max_bytes)  # another may have taken its place
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(path, max_bytes)
    return content


def open_file(path: Path, flags: int = os.O_RDONLY, max_bytes: int | None = None) -> int:
    """Return the descriptor of a regular file, with O_CREAT of a new one. Raises OSError, for a link too; never blocks."""
    with suppress(FileNotFoundError):
        _check(path, path.lstat(), max_bytes)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check(path, os.fstat(descriptor), max_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the content of a UTF-8 file without its byte order mark. Raises OSError or UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode("utf-8-sig")


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value of a JSON file. Raises OSError or ValueError."""
    try:
        return json.loads(read_bytes(path, max_bytes))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def read_object(path: Path, max_bytes: int, error: type[Exception], missing: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error` with one sentence; `missing` is the one for no file."""
    try:
        values = read_json(path, max_bytes)
    except FileNotFoundError:
        raise error(missing) from None
    except OSError as fault:
        raise error(f"{path} cannot be read: {reason(fault)}.") from None
    except ValueError as fault:
        raise error(f"{path} cannot be read as JSON: {fault}.") from None
    if not isinstance(values, dict):
        raise error(f"{path} must hold a JSON object, and holds a {type(values).__name__}.")
    return values


def read_setting(flag: str, given: str | Path, error: type[Exception]) -> str:
    """Return the text of the file that a setting names. Raises `error` with one sentence."""
    try:
        return read_text(expanded(given), MAX_SETTING_BYTES)
    except (OSError, UnicodeDecodeError) as fault:
        why = reason(fault) if isinstance(fault, OSError) else fault
        raise error(f"{flag} is {str(given)!r:.200}, which cannot be read: {why}.") from fault


def reason(error: OSError) -> str:
    """Return why a file cannot be read, without its name."""
    return error.strerror or str(error)


def _check(path: Path, status: os.stat_result, max_bytes: int | None) -> int:
    for is_kind, name in _KINDS:
        if is_kind(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {name}, not a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, max_bytes)
    return status.st_size


def _too_large(path: Path, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than the {max_bytes >> 10} KiB that are read of such a file", str(path))
