"""Logs of every process: one line per event on stderr, as `15:04:05.123 I w0 message`, or as a JSON object
with JSON_OUTPUT.

A line about a request has its id: what is logged while a gateway serves it by REQUEST_ID, any other by
`extra=about(request_id)`.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the current task serves."""


def for_request(request_id: str) -> dict[str, str]:
    """For `extra` of a line about a request."""
    return {"request_id": request_id}


class TextFormatter(logging.Formatter):
    """Local time with milliseconds, the level's first letter, the process's name, the message; a traceback
    follows on its own lines.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(letter)s {process} %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """timestamp (UTC), level, process, target, message; request_id where the line is about a request;
    exception where there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self.process,
            "target": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(process: str, level: str, as_json: bool = False) -> None:
    """Sends all logging of this process, and Python's warnings, to stderr. `process` is its name, as `w0`;
    `level` Settings.log_level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
