"""Logs: JSON lines, names of processes and of their lives."""

import json
import logging
import socket
import subprocess
import sys
from datetime import datetime

from common.process.logs import (
    TRACEPARENT,
    JsonFormatter,
    TextFormatter,
    first_incarnation,
    for_request,
    new_incarnation,
    next_incarnation,
)

# --- logs ---------------------------------------------------------------------------------------------------


def record(message: str, *args: object, **extra: str) -> logging.LogRecord:
    return logging.getLogger("api.app").makeRecord(
        "api.app", logging.WARNING, "", 0, message, args, None, extra=extra
    )


def test_a_json_line_has_the_fields_of_its_record() -> None:
    line = json.loads(JsonFormatter("g0", "g0-1").format(record('a "word"\nof %d', 2, **for_request("r1"))))
    stamp = datetime.fromisoformat(line.pop("timestamp"))
    assert stamp.tzinfo is not None and abs(stamp.timestamp() - datetime.now().timestamp()) < 60
    assert line == {
        "level": "WARNING",
        "process": "g0",
        "incarnation": "g0-1",
        "host": socket.gethostname(),
        "target": "api.app",
        "message": 'a "word"\nof 2',
        "request_id": "r1",
    }


def test_lines_about_a_traced_request_have_its_trace() -> None:
    trace_id, own, other = "ab" * 16, "cd" * 8, "ef" * 8
    about = record("x", **for_request("r1", f"00-{trace_id}-{other}-01"))
    token = TRACEPARENT.set(f"00-{trace_id}-{own}-01")
    try:
        for line, span_id in ((record("x"), own), (about, other)):
            shown = json.loads(JsonFormatter("g0").format(line))
            assert (shown["trace_id"], shown["span_id"]) == (trace_id, span_id)
            assert TextFormatter("g0").format(line).endswith(f" x trace_id={trace_id}")
    finally:
        TRACEPARENT.reset(token)
    assert "trace_id" not in JsonFormatter("g0").format(record("x"))


def test_every_line_of_a_process_is_json_tracebacks_and_libraries_included() -> None:
    code = """
import logging, warnings
from common.process import logs
logs.set_up("w0", "info", True)
logging.getLogger("uvicorn.error").warning("odd")
logging.debug("not said")
warnings.warn("old")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("crash")
raise ValueError("the end")
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    odd, old, crash, end = (json.loads(line) for line in said.splitlines())
    assert (odd["process"], odd["target"], odd["message"]) == ("w0", "uvicorn.error", "odd")
    assert odd["incarnation"].startswith("w0-")
    assert {old["incarnation"], crash["incarnation"], end["incarnation"]} == {odd["incarnation"]}
    assert "UserWarning: old" in old["message"]
    assert crash["message"] == "crash" and "ZeroDivisionError" in crash["exception"]
    assert end["level"] == "CRITICAL" and "the end" in end["message"] and "ValueError" in end["exception"]


# --- logs incarnations --------------------------------------------------------------------------------------


def test_the_lives_of_a_process_are_numbered_and_no_two_processes_share_a_name() -> None:
    first = new_incarnation("w0")
    assert first != new_incarnation("w0")
    assert next_incarnation(first) == f"{first}.2"
    assert next_incarnation(f"{first}.9") == f"{first}.10"
    assert {first_incarnation(name) for name in (first, f"{first}.2", f"{first}.10")} == {first}
