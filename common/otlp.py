"""OTLP: sends the spans of one process by OpenTelemetry's SDK, whose variables hold (OTEL_EXPORTER_OTLP_…,
OTEL_TRACES_SAMPLER, OTEL_BSP_…, OTEL_RESOURCE_ATTRIBUTES, OTEL_PROPAGATORS). It is imported only where traces
are on. The SDK's thread sends: no request waits for the receiver. It drops spans beyond its queue, and those
that the receiver does not take, and logs that.
"""

import logging
import os
import threading
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.settings.fields import SettingError, hide_users
from common.settings.settings import Settings
from common.tracing import ENDPOINTS, Attributes, Kind, TraceSpan, ids_of

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""How long a process that ends waits for its last spans to be sent."""
SERVICE = "tokenfleet"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


class OtlpExporter:
    """The exporter of one process.

    Attributes:
        sampler: the one that OTEL_TRACES_SAMPLER names; it decides once for each trace.
    """

    def __init__(self, settings: Settings, incarnation: str) -> None:
        """Raises SettingError."""
        try:
            self.processor = BatchSpanProcessor(make_exporter(settings.otlp_endpoint))
        except ValueError as error:  # of a batch that is larger than the queue
            raise SettingError("otel_bsp_max_export_batch_size", str(error)) from error
        self.sampler = TracerProvider(shutdown_on_exit=False).sampler
        own = {"service.instance.id": incarnation, "service.version": version(SERVICE)}
        name = settings.otlp_service_name or os.environ.get("OTEL_SERVICE_NAME") or ""
        known = Resource.create(own | ({"service.name": name} if name else {}))
        unnamed = str(known.attributes["service.name"]).startswith("unknown_service")
        self.resource = known.merge(Resource({"service.name": SERVICE})) if unnamed else known
        self.scope = InstrumentationScope(SERVICE, version(SERVICE))

    def sample(
        self, carrier: Mapping[str, str], new_id: str, name: str, kind: Kind, attributes: Attributes
    ) -> tuple[str, str] | None:
        """The trace that headers name and the client's span in it, or else a trace with the id `new_id` and
        no such span; None if it is not sampled.
        """
        context = propagate.extract(carrier, Context())
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else int(new_id, 16)
        result = self.sampler.should_sample(context, trace_id, name, SpanKind[kind], dict(attributes))
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return f"{trace_id:032x}", f"{parent.span_id:016x}" if parent.is_valid else ""

    def export(self, span: TraceSpan) -> None:
        """Hand a span to the thread that sends. The SDK's span is made as a whole: a tracer, which lets spans
        grow, takes six times as long, and draws their ids by itself.
        """
        trace_id, span_id = ids_of(span.traceparent)
        made = ReadableSpan(
            span.name,
            context_of(trace_id, span_id),
            context_of(trace_id, span.parent_id) if span.parent_id else None,
            self.resource,
            span.attributes,
            [Event(event.name, event.attributes, event.at_ns) for event in span.events],
            [Link(context_of(*ids_of(link))) for link in span.links],
            SpanKind[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=max(span.end_ns, span.start_ns),
            instrumentation_scope=self.scope,
        )
        self.processor.on_end(made)

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most."""
        closing = threading.Thread(target=self.processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def make_exporter(endpoint: str | None) -> SpanExporter:
    """The exporter of the protocol that the variables name, else of gRPC, as in TGI. Raises SettingError."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a receiver that is away is told by our own log
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(PROTOCOL) or ""
    protocol = named.strip().lower() or "grpc"
    if protocol not in ("grpc", "http/protobuf"):
        raise SettingError(PROTOCOL, f"must be grpc or http/protobuf. Given: {protocol!r}")
    kind = protocol.partition("/")[0]
    path = "" if kind == "grpc" else "/v1/traces"
    try:
        made: Any = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        exporter: SpanExporter = made.OTLPSpanExporter(
            endpoint and endpoint.rstrip("/").removesuffix("/v1/traces") + path
        )
    except Exception as error:  # of a certificate, a header or a number in OpenTelemetry's variables
        raise SettingError("otlp_endpoint", f"the exporter of traces cannot start: {error}") from error
    shown = endpoint or next((value for name in ENDPOINTS if (value := os.environ.get(name))), "its default")
    log.info("traces are sent to %s by %s", hide_users(shown), protocol)
    return exporter


def context_of(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))
