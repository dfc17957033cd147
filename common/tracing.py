"""Tracing: spans of this process, as its code makes them: at ends, where times are known already, never for a
token. Without OTLP_ENDPOINT and without OpenTelemetry's own variables of an endpoint nothing is made, and
OpenTelemetry is not imported.

Between processes a span is named by W3C's `traceparent`: `00-{trace id}-{span id}-01`. Only spans that are
sampled are named. An id is derived from what its span is about, so that whoever goes on after a death names
the same spans.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from common.process.logs import TRACEPARENT
from common.settings.fields import SettingError
from common.settings.settings import Settings

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["INTERNAL", "SERVER", "CONSUMER"]
NONE: Attributes = MappingProxyType({})
NS_PER_MS = 1_000_000
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's variables of an endpoint: each of them turns traces on."""


class SpanEvent(NamedTuple):
    """Something that happened at one time during a span."""

    at_ns: int
    name: str
    attributes: Attributes = NONE


class TraceSpan(NamedTuple):
    """A span that is over. Times are Unix times.

    Attributes:
        traceparent: its own name.
        parent_id: id of the span that it is part of; empty for the first one of a trace.
        links: names of spans that it goes on from.
        error: why it failed; empty where it did not.
    """

    traceparent: str
    name: str
    start_ns: int
    end_ns: int
    parent_id: str = ""
    kind: Kind = "INTERNAL"
    attributes: Attributes = NONE
    events: Sequence[SpanEvent] = ()
    links: Sequence[str] = ()
    error: str = ""


def span_name(trace_id: str, span_id: str) -> str:
    """The `traceparent` of a sampled span; both ids are hexadecimal."""
    return f"00-{trace_id}-{span_id}-01"


def ids_of(traceparent: str) -> tuple[str, str]:
    """The ids of trace and span."""
    return traceparent[3:35], traceparent[36:52]


def derive_trace_id(key: str) -> str:
    """The id of the trace of a request that came without one."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def derive_span(traceparent: str, *words: str) -> str:
    """The `traceparent` of a span of the same trace, which these words tell from all others in it."""
    trace_id, span_id = ids_of(traceparent)
    digest = hashlib.blake2b("\0".join((span_id, *words)).encode(), key=trace_id.encode(), digest_size=8)
    return span_name(trace_id, digest.hexdigest())


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


def is_wanted(settings: Settings, environ: Mapping[str, str]) -> bool:
    """Whether traces are on. Raises SettingError for an exporter that is not OTLP's."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if name not in ("", "none", "otlp"):
        raise SettingError("otel_traces_exporter", f"traces are exported by otlp, or none. Given: {name!r}")
    asked = bool(name or settings.otlp_endpoint or any(environ.get(one) for one in ENDPOINTS))
    return asked and name != "none"
