"""What both processes log, and how. Never what people wrote, at no level: ids and numbers only.

Packages of others are kept from their debug level whatever is set: some log statements with all
their values there.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["console", "json"]

OURS = ("app", "engine", "kernels", "sessions")
QUIET = ("aiosqlite", "alembic", "sqlalchemy")  # from warnings on
CONSOLE = "%(asctime)s %(levelname)s %(process_name)s%(name)s: %(message)s%(request)s"

request_id: ContextVar[str] = ContextVar("request_id", default="")


def configure_logging(level: str, form: LogFormat, *, process: str) -> None:
    """Log to standard error. `level` is for our own packages; others are told from info on.

    `process` is "web" or "engine".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else _Console(process))
    own = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(own, logging.INFO))
    for name in OURS:
        logging.getLogger(name).setLevel(own)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(own, logging.WARNING))


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := request_id.get():
            line["request_id"] = found
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Console(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(CONSOLE)
        self._process = "" if process == "web" else f"{process}: "

    def format(self, record: logging.LogRecord) -> str:
        found = request_id.get()
        record.request = f" [{found}]" if found else ""
        record.process_name = self._process
        return super().format(record)
