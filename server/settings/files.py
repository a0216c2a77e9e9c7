"""Reads files and checks folders that settings name. Start-up thread, and event loop on SIGHUP.

Files must be regular, UTF-8 and of bounded size.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.core.errors import ConfigError
from engine.system.regular_file import read_text, reason

MAX_BYTES = 64 << 20


def read_setting_file(flag: str, path: Path) -> str:
    """Return the text of the file that `flag` names. Raises ConfigError."""
    try:
        return read_text(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{flag} is {str(path)!r}, which cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} is {str(path)!r}, which cannot be read: {error}.") from error


def check_folder(flag: str, path: Path | None) -> None:
    """Raise ConfigError if the folder that `flag` names can be neither created nor written to."""
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
