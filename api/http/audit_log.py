"""Audit log: who asked for what, when, and what came of it, as one JSON object a line; no word of a prompt or
an answer.

It has each line of the access log, refusals and actions of administrators too, and leaves none out.
"""

import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from api.json import to_json
from common.settings.settings import SettingError, Settings

MAX_BYTES, MAX_OLDER_FILES = 100 * 2**20, 10
"""Of a file, and how many are kept beside it."""

STDOUT = "-"
COPIED = (
    "key",
    "tenant",
    "client",
    "request_id",
    "model",
    "class",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "choices",
    "reason",
)
"""Fields of the access log that a line repeats. `error` may have a client's words, and is not there."""

Value = str | int | float


class AuditLog:
    """The audit log of one gateway."""

    def __init__(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter("%(message)s"))
        self.handler = handler

    @classmethod
    def open(cls, settings: Settings, gateway: str) -> "AuditLog | None":
        """The log that AUDIT_LOG names; None for none. Raises SettingError."""
        name = settings.audit_log
        if not name:
            return None
        if name == STDOUT:
            return cls(logging.StreamHandler(sys.stdout))
        path = Path(name)
        own = path.with_name(f"{path.stem}.{gateway.partition('-')[0]}{path.suffix}")
        try:
            file = RotatingFileHandler(own, maxBytes=MAX_BYTES, backupCount=MAX_OLDER_FILES, encoding="utf-8")
            return cls(file)
        except OSError as error:
            raise SettingError("audit_log", f"{own} cannot be written: {error.strerror}") from error

    def write(self, started_s: float, line: Mapping[str, Value], path: str) -> None:
        """Write the line of a request, which has begun at this time (monotonic) and ends now.

        Args:
            line: its fields in the access log.
        """
        now_s = time.time()
        begun_s = now_s - (time.monotonic() - started_s)
        first_s = line.get("first_token_s")
        fields: dict[str, object] = {
            "begun": iso(begun_s),
            "first_token": iso(begun_s + float(first_s)) if first_s is not None else None,
            "ended": iso(now_s),
            "method": line["method"],
            "route": line["route"],
            "path": path,
            "status": line["status"],
        }
        fields |= {name: line.get(name) for name in COPIED}
        text = to_json({name: value for name, value in fields.items() if value is not None}).decode()
        self.handler.handle(logging.LogRecord(__name__, logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        self.handler.close()


def iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")
