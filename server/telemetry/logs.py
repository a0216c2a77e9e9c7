"""Writes log lines to standard error, as text or as one JSON object per line.

Set up once, before anything else runs. What a caller passes as `extra=` becomes keys of the JSON line. Tracebacks are for
--log-level debug; otherwise a line ends with its exception.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TextIO

from engine.core.shown import printable

MAX_REFUSALS = 20  # lines a second
OURS = ("quire", "server", "engine", "uvicorn")
_LIBRARIES = ("transformers", "huggingface_hub")  # which add handlers once they are imported

log = logging.getLogger("quire.server")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class TextFormatter(logging.Formatter):
    """Time, level, message; the message contains the extras."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
        self._tracebacks = tracebacks

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without its exception."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback at --log-level debug."""
        if self._tracebacks or not record.exc_info:
            return super().format(record)
        record.exc_text = None
        plain = logging.makeLogRecord({**vars(record), "exc_info": None})
        return super().format(plain) + printable(_exception_in_short(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the extras."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__()
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; at --log-level debug the traceback is one more key."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage() + _exception_in_short(record),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info and self._tracebacks:
            line["traceback"] = self.formatException(record.exc_info)
        return printable(json.dumps(line, default=str, ensure_ascii=False))


class StandardError(logging.StreamHandler):  # type: ignore[type-arg]  # none at run time before Python 3.11
    """Writes to the current sys.stderr, which a progress bar may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Return where lines go."""
        return sys.stderr


class LibraryLogger(logging.Logger):
    """A library's logger that adds no handler: its lines go where all others go, in the same form."""

    propagate = property(lambda _: True, lambda *_: None)  # transformers turns it off

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's name
        """Do nothing."""


class LineBudget:
    """Bounds the lines of refused requests: a flood of them must not fill the disk."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._second, self._num = 0, 0  # and the refusals within that second

    def take(self) -> bool:
        """Return whether one more line may be written; after a flood, log how many were not."""
        second = int(self._clock())
        if second != self._second:
            if self._num > MAX_REFUSALS:
                self._logger.info("%d more refused requests are not listed here", self._num - MAX_REFUSALS)
            self._second, self._num = second, 0
        self._num += 1
        return self._num <= MAX_REFUSALS


_NO_HTTP = "Invalid HTTP request received."  # server/http/connection.py writes a better line, and not for every one
_TRACE = 5  # uvicorn's level below debug


def configure_logging(level: str, layout: str, uvicorn_level: str | None = None) -> None:
    """Log Quire's lines from `level`, uvicorn's from its own, and libraries' warnings, to standard error."""
    handler = StandardError()
    tracebacks = level == "debug"
    handler.setFormatter(
        JsonFormatter(tracebacks=tracebacks) if layout == "json" else TextFormatter(tracebacks=tracebacks)
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
    logging.setLoggerClass(LibraryLogger)
    for name in _LIBRARIES:
        logging.getLogger(name)
    logging.setLoggerClass(logging.Logger)
    threading.excepthook = _log_end_of_thread
    for name in OURS:
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != _NO_HTTP)
    if uvicorn_level is not None:
        logging.getLogger("uvicorn").setLevel(_TRACE if uvicorn_level == "trace" else uvicorn_level.upper())
    elif level == "info":  # uvicorn's own start and stop lines repeat ours
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _log_end_of_thread(end: threading.ExceptHookArgs) -> None:
    """Log one line of an error that has ended a thread, in place of Python's traceback."""
    name = "?" if end.thread is None else end.thread.name
    log.error("The thread %s ended (please report this): %s: %s", name, end.exc_type.__name__, end.exc_value)
    log.debug("It ended here:", exc_info=end.exc_value)


def _exception_in_short(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return f": {type(error).__name__}: {error}" if error else ""
