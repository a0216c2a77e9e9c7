"""Where log lines go and how they look: text for people, or one JSON object a line for collectors.

Set up once, before anything else runs. Every logger of ours is below "quire"; whatever a caller passes as `extra=`
becomes keys of the JSON line.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

from server.config import LogFormat, LogLevel

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the extras."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((key, value) for key, value in vars(record).items() if key not in _PLAIN)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(level: LogLevel, layout: LogFormat, handler: logging.Handler | None = None) -> None:
    """Send all lines of at least `level` to `handler`, standard error unless given."""
    handler = handler or logging.StreamHandler()
    if layout is LogFormat.JSON:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    for name in ("quire", "uvicorn"):
        logging.getLogger(name).setLevel(level.value.upper())
    # Its own start and stop lines repeat ours, and our request line says more than an access line.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if level is not LogLevel.DEBUG else logging.DEBUG)
    logging.getLogger("uvicorn.access").disabled = True
