"""Logs: every process writes one line per event to stderr, as `15:04:05.123 I w0 message`.

With JSON_OUTPUT a line is a JSON object. A line about a request has its id, and the ids of its span if it is
traced: from REQUEST_ID and TRACEPARENT while a gateway serves the request, elsewhere from
`extra=for_request(…)`. Lines name the process by its place, and in JSON also by its incarnation: one life of
a process, with its own streams in Redis.
"""

import functools
import json
import logging
import secrets
import socket
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType


def new_incarnation(name: str) -> str:
    """Return a name that no other process has: 64 random bits."""
    return f"{name}-{secrets.token_hex(8)}"


def next_incarnation(incarnation: str) -> str:
    """Return the name of the next life of the same process: `w0-1f.2` comes after `w0-1f`."""
    first, _, number = incarnation.partition(".")
    return f"{first}.{int(number or 1) + 1}"


def first_incarnation(incarnation: str) -> str:
    """Return the name that its launcher gave the process of an incarnation."""
    return incarnation.partition(".")[0]


@functools.cache
def warn_once(log: logging.Logger, text: str) -> None:
    """Log a warning once in the life of this process."""
    log.warning("%s", text)


def plural(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{count} {noun}{'s' * (count != 1)}"


REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task serves."""
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""The span that the current task is in, as W3C's `traceparent`; empty outside of a sampled trace."""


def for_request(request_id: str, traceparent: str = "") -> dict[str, str]:
    """Return the `extra` of a log line about a request."""
    return {"request_id": request_id, "traceparent": traceparent}


def traceparent_of(record: logging.LogRecord) -> str:
    """Return the name of the span that a line belongs to; empty for none."""
    return getattr(record, "traceparent", "") or TRACEPARENT.get()


class TextFormatter(logging.Formatter):
    """Local time with milliseconds, first letter of the level, name of the process, message; the fields that
    a line brings along (`extra={"fields": …}`), as name=value; of a request that is traced, the id of the
    trace.

    A traceback follows on lines of its own.
    """

    def __init__(self, process: str) -> None:
        line = f"%(asctime)s.%(msecs)03d %(letter)s {process} %(message)s%(fields_text)s%(trace)s"
        super().__init__(line, datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        traceparent = traceparent_of(record)
        fields: Mapping[str, object] = getattr(record, "fields", {})
        record.fields_text = "".join(f" {name}={spell(value)}" for name, value in fields.items())
        record.trace = f" trace_id={traceparent[3:35]}" if traceparent else ""
        return super().format(record)


def spell(value: object) -> str:
    """A value as one word: in quotes, as in JSON, if it is none."""
    text = str(value)
    return text if text.isprintable() and not {" ", '"', "="} & set(text) else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """A JSON object with timestamp (UTC), level, process, incarnation, host, target and message.

    It has the fields that a line brings along, request_id if the line is about a
    request, trace_id and span_id if that is traced, and exception if there is one. A process without an
    incarnation, such as a launcher, gets one for its lines alone.
    """

    def __init__(self, process: str, incarnation: str = "") -> None:
        super().__init__()
        self.process = process
        self.incarnation = incarnation or new_incarnation(process)
        self.host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self.process,
            "incarnation": self.incarnation,
            "host": self.host,
            "target": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            line["request_id"] = request_id
        if traceparent := traceparent_of(record):
            line |= {"trace_id": traceparent[3:35], "span_id": traceparent[36:52]}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up(process: str, level: str, as_json: bool = False, incarnation: str = "") -> None:
    """Send all logging of this process, and Python's warnings, to stderr. `process` is its name, as `w0`.

    As JSON, an exception that ends the process is a line of the log, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process, incarnation) if as_json else TextFormatter(process))
    sys.excepthook = log_uncaught if as_json else sys.__excepthook__
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger(__name__).critical("%r ends this process", error, exc_info=(kind, error, traceback))
