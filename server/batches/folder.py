"""The data folder of one daemon: its files and its database.

    lock              held while a daemon uses the folder
    batches.sqlite    the database; store.py
    files/<id>        the content of each file; *.tmp while it is being written

Names are our ids, never a client's. Only the daemon's user can read the folder, as it holds prompts and answers.
Blocking; called from worker threads.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from engine.core.errors import ConfigError
from engine.system.regular_file import check_regular

_FILE_ID = re.compile(r"file-[0-9a-f]{32}")


class DataFolder:
    """Creates and locks the folder. Raises ConfigError if it cannot."""

    def __init__(self, path: Path) -> None:
        self._files = path / "files"
        self.database = path / "batches.sqlite"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            for name in ("lock", "batches.sqlite"):
                if (path / name).exists():
                    check_regular(path / name)
            self._lock = (path / "lock").open("w")
            self.database.touch()
            with suppress(PermissionError):  # another user's, in a folder that several share
                self.database.chmod(0o600)  # the folder may have been there
        except OSError as error:
            raise ConfigError(f"--data-dir is {str(path)!r}, which cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            fault = f"cannot be locked ({error.strerror}); give another"
            if isinstance(error, BlockingIOError):
                fault = "another daemon uses; give each its own"
            raise ConfigError(f"--data-dir is {str(path)!r}, which {fault}.") from error

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        assert _FILE_ID.fullmatch(file_id), "only ids made here name files"
        return self._files / file_id

    def sweep(self, known: set[str]) -> None:
        """Remove the files that a killed daemon had not finished."""
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()

    def close(self) -> None:
        """Release the folder for another daemon."""
        self._lock.close()


class NewFile:
    """A file being written, as a scope: left without `keep`, it is removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = path.with_name(path.name + ".tmp")
        self._file = self._draft.open("wb")
        self.num_bytes = 0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()  # flushes, which fails again on a full disk
        except OSError:
            if error is None:
                raise
        finally:
            self._draft.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def keep(self) -> None:
        """Make the file permanent; it survives a loss of power from here on."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._draft.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # makes the name permanent, too
        finally:
            os.close(folder)
