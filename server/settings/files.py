"""Files and folders that settings name. Files are read whole: regular ones in UTF-8, of a bounded size. Start-up thread."""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError
from engine.regular_file import read_text, reason

MAX_BYTES = 64 << 20


def read_setting_file(flag: str, path: Path) -> str:
    """The text of the file that `flag` names. Raises ConfigError."""
    try:
        return read_text(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r}, which cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} is {str(path)!r}, which cannot be read: {error}.") from error


def check_folder(flag: str, path: Path | None) -> None:
    """Raise ConfigError if a folder can neither be made nor be written to at the path that `flag` names, if any."""
    if path is None:
        return
    try:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        is_usable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r:.200}, which cannot be used: {reason(error)}.") from error
    if not is_usable:
        raise ConfigError(
            f"{flag} is {str(path)!r}, which cannot be used: {place} is no folder that may be written to."
        )
