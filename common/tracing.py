"""Tracing: spans of this process, as its code makes them: at ends, where times are known already, never for a
token. Without OTLP_ENDPOINT and without OpenTelemetry's own variables of an endpoint nothing is made, and
OpenTelemetry is not imported.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from common.process.logs import TRACEPARENT
from common.settings.settings import Settings
from common.settings.types import SettingError
from common.spans import ENDPOINTS, TraceSpan, derive_span, ids_of

exporter: Any = None
"""An OtlpExporter (otlp.py), or None: traces are off."""


def is_on() -> bool:
    return exporter is not None


def export(*spans: TraceSpan) -> None:
    for one in spans if exporter else ():
        exporter.export(one)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A part of the span that this task is in; nothing outside of a sampled trace."""
    parent = TRACEPARENT.get()
    if not parent:
        yield
        return
    start_ns = time.time_ns()
    own = derive_span(parent, name, str(start_ns))
    token, error = TRACEPARENT.set(own), ""
    try:
        yield
    except Exception as failure:
        error = str(failure) or type(failure).__name__
        raise
    finally:
        TRACEPARENT.reset(token)
        export(TraceSpan(own, name, start_ns, time.time_ns(), ids_of(parent)[1], error=error))


@contextlib.contextmanager
def exporting(settings: Settings, incarnation: str) -> Iterator[None]:
    """Export the spans of this process while the context is open, if that is wanted. Raises SettingError."""
    global exporter
    if not is_wanted(settings, os.environ):
        yield
        return
    exporter = import_module("common.otlp").OtlpExporter(settings, incarnation)
    try:
        yield
    finally:
        exporter.close()
        exporter = None


def is_wanted(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether traces are on. Raises SettingError for an exporter that is not OTLP's."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if name not in ("", "none", "otlp"):
        raise SettingError("otel_traces_exporter", f"traces are exported by otlp, or none. Given: {name!r}")
    asked = bool(name or settings.otlp_endpoint or any(environ.get(one) for one in ENDPOINTS))
    return asked and name != "none"
