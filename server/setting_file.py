"""Small files that settings name, read whole: regular files in UTF-8 only, of a bounded size. Start-up thread."""

from __future__ import annotations

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
