"""Keeps small files from one run to the next, in the user's cache folder. What cannot be kept is made again."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from engine.system.regular_file import MAX_BYTES, expanded, read_bytes, read_json

_FORESEEN = "foreseen.json"


def cache_folder() -> Path:
    """Return Quire's folder in the cache, which may not exist yet; without a home folder it is one that cannot be made."""
    home = expanded("~")
    usual = home / ".cache" if home.is_absolute() else os.devnull
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "quire"


def keep(path: Path, text: str) -> None:
    """Replace a file of the cache as a whole, readable by this user only, if the folder can be written to."""
    written = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)  # a part, as a disk has room for, or of a process that ended in the middle


def kept(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return what `keep` has written. Raises OSError, also for a file that another user owns or may write to."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"another user owns {path} or may write to it")
    return read_bytes(path, max_bytes)


def foreseen() -> dict[str, str]:
    """Return what `quire fit` last printed here of each model, in a line."""
    try:
        return dict(read_json(cache_folder() / _FORESEEN))
    except (OSError, ValueError, TypeError):
        return {}


def keep_foreseen(model: str, line: str) -> None:
    """Keep a model's line for `foreseen`."""
    keep(cache_folder() / _FORESEEN, json.dumps({**foreseen(), model: line}))
