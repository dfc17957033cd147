"""Tracing: whether this process exports spans, and how its code makes them.

Spans are made where times are known already, at ends, never for a token. Without OTLP_ENDPOINT and without
OpenTelemetry's own variables of an endpoint nothing is made, and OpenTelemetry is not imported.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Protocol, cast

from common.process.logs import TRACEPARENT
from common.settings.settings import Settings
from common.settings.types import SettingError
from common.traces.span import ENDPOINTS, Attributes, Kind, Sampled, TraceSpan, derive_span, ids_of


class SpanExporter(Protocol):
    """What exports the spans of a process. No method waits for the receiver, but `close` for a moment."""

    def sample(
        self, carrier: Mapping[str, str], new_id: str, name: str, kind: Kind, attributes: Attributes
    ) -> Sampled | None:
        """The trace that a request's headers name, or else one with the id `new_id`; None if it is not
        sampled.
        """

    def export(self, span: TraceSpan) -> None: ...

    def close(self) -> None: ...


class NoExporter:
    """Exports nothing: traces are off."""

    def sample(
        self, carrier: Mapping[str, str], new_id: str, name: str, kind: Kind, attributes: Attributes
    ) -> Sampled | None:
        return None

    def export(self, span: TraceSpan) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


OFF = NoExporter()
exporter: SpanExporter = OFF
"""That of this process."""


def is_on() -> bool:
    return exporter is not OFF


def export(*spans: TraceSpan) -> None:
    for span in spans:
        exporter.export(span)


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
    exporter = cast(SpanExporter, import_module("common.traces.otlp").OtlpExporter(settings, incarnation))
    try:
        yield
    finally:
        exporter.close()
        exporter = OFF


def is_wanted(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether traces are on. Raises SettingError for an exporter that is not OTLP's."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if name not in ("", "none", "otlp"):
        raise SettingError("otel_traces_exporter", f"traces are exported by otlp, or none. Given: {name!r}")
    asked = bool(name or settings.otlp_endpoint or any(environ.get(one) for one in ENDPOINTS))
    return asked and name != "none"
