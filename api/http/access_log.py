"""Access log: one line for each request at its end, with fields.

It never has a word of a prompt or an answer, nor a key. Probes and the page's own requests have no line.

The audit log has each of these lines, refusals and actions of administrators too, and leaves none out: who
asked for what, when, and what came of it, as one JSON object a line.
"""

import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import cut
from api.http.auth import API_KEY
from api.json import to_json
from api.protocols.protocol import asks_for_tokens
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

ACCESS = "access"
"""Key of a request's state: its AccessRecord."""
PROBES = ("/health", "/ping", "/livez", "/readyz", "/load", "/metrics")
"""Paths of health and metrics."""
POLLED = ("/", *PROBES, "/fleet", "/v2/health/live")
"""Paths that monitors, load balancers and the page get again and again: they have no line."""
PAGE = "/page/"
INTERVAL_S = 1.0

MAX_BYTES, MAX_OLDER_FILES = 100 * 2**20, 10
"""Of a file, and how many are kept beside it."""

STDOUT = "-"
COPIED = (
    *("key", "tenant", "client", "request_id", "model", "class", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "choices", "reason"),
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


class AccessRecord:
    """What the access log says of one request, as far as it is known.

    Attributes:
        fields: in the order of the line; those of the request come first, then those of its answer.
        path: that the client sent.
        goes_on: whether another gateway goes on with the request: that one logs its end.
    """

    def __init__(self, method: str, route: str, path: str = "") -> None:
        self.started_s = time.monotonic()
        self.method = method
        self.route = route
        self.path = path
        self.status = 0
        self.fields: dict[str, Value] = {}
        self.goes_on = False

    def note(self, fields: Mapping[str, Value | None]) -> None:
        """Add fields, but those that are None or empty."""
        self.fields |= {name: value for name, value in fields.items() if value not in (None, "")}

    def line(self) -> dict[str, Value]:
        first: dict[str, Value] = {"method": self.method, "route": self.route, "status": self.status}
        return first | self.fields | {"total_s": round(time.monotonic() - self.started_s, 3)}


class AccessLog:
    """The access log of one gateway, which writes at most `rate` lines in a second; 0 writes none.

    Attributes:
        audit: gets every line, whatever the rate; None for none.
        load: requests for tokens that the gateway has, from their arrival to the last byte of their answers.
        num_left_out: requests without a line, since the last line that gave their number.
    """

    def __init__(self, rate: int, audit: AuditLog | None = None) -> None:
        self.rate = rate
        self.audit = audit
        self.load = 0
        self.num_left_out = 0
        self.num_written = 0
        self.interval_end_s = 0.0

    async def log_request(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Middleware: log a request at its end, and count it in `load` until then."""
        record = AccessRecord(scope["method"], "", cut(scope["path"]))
        scope["state"][ACCESS] = record
        is_load = asks_for_tokens(scope)
        client, _ = scope["client"] or ("", 0)
        record.note({"request_id": scope["state"]["request_id"], "client": client})

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        self.load += is_load
        try:
            await app(scope, receive, send_noted)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            self.load -= is_load
            known: str | None = getattr(scope.get("route"), "path", None)  # with names for its parts
            record.route = record.route or known or cut(scope["path"])
            if (api_key := scope["state"].get(API_KEY)) is not None:
                record.note({"key": api_key.key_id, "tenant": api_key.tenant})
            path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
            if not (is_read and (path in POLLED or path.startswith(PAGE))):
                self.write(record)

    def write(self, record: AccessRecord) -> None:
        """Write the line of a request that has ended; beyond `rate` lines count it only."""
        if self.audit is not None and not record.goes_on:
            self.audit.write(record.started_s, record.line(), record.path)
        if not self.rate or record.goes_on or not log.isEnabledFor(logging.INFO):
            return
        now_s = time.monotonic()
        if now_s >= self.interval_end_s:
            self.interval_end_s, self.num_written = now_s + INTERVAL_S, 0
            if self.num_left_out:
                log.info("%d requests have no line: ACCESS_LOG_RATE is %d", self.num_left_out, self.rate)
                self.num_left_out = 0
        if self.num_written >= self.rate:
            self.num_left_out += 1
            return
        self.num_written += 1
        log.info("access", extra={"fields": record.line()})


def access_of(scope: Scope) -> AccessRecord | None:
    record: AccessRecord | None = scope["state"].get(ACCESS)
    return record


def note_refusal(scope: Scope, error_type: str) -> None:
    """Note why a request is refused. The text of the error may repeat what the client wrote."""
    if (record := access_of(scope)) is not None:
        record.note({"reason": error_type})
