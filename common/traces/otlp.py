"""OTLP exporter: sends the spans of one process by OpenTelemetry's SDK, which reads its own variables
(OTEL_EXPORTER_OTLP_PROTOCOL, _HEADERS, _CERTIFICATE …, OTEL_TRACES_SAMPLER, OTEL_BSP_…, OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_PROPAGATORS). It is imported only where traces are on.

A thread sends. While the receiver is away or slow, spans wait up to OTEL_BSP_MAX_QUEUE_SIZE, and further ones
are dropped and counted.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.metrics import catalogue
from common.process.logs import plural
from common.settings.settings import Settings
from common.settings.types import SettingError
from common.traces.span import Attributes, Kind, TraceSpan, ids_of
from common.traces.tracing import ENDPOINTS, Sampled

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""How long a process that ends waits for its last spans to be sent."""
SERVICE = "tokenfleet"
UNKNOWN_SERVICE = "unknown_service"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
TRACES_PATH = "/v1/traces"
DEFAULT_QUEUE_SIZE = 2048


class OtlpExporter:
    """The exporter of one process.

    Attributes:
        sampler: the one that OTEL_TRACES_SAMPLER names; it decides once for each trace.
        num_given: spans that were handed to the thread.
        max_waiting: of them, those that may wait there.
    """

    def __init__(self, settings: Settings, incarnation: str) -> None:
        """Raises SettingError."""
        # a receiver that is away is told once, by our own log
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        self.sender = CountingExporter(make_exporter(settings.otlp_endpoint))
        self.max_waiting = read_queue_size()
        self.processor = BatchSpanProcessor(self.sender, max_queue_size=self.max_waiting)
        self.num_given = 0
        self.ids = GivenIds()
        self.sampler = TracerProvider(shutdown_on_exit=False).sampler
        provider = TracerProvider(
            ALWAYS_ON,
            make_resource(settings, incarnation),
            shutdown_on_exit=False,
            id_generator=self.ids,
        )
        provider.add_span_processor(self.processor)
        self.tracer = provider.get_tracer(SERVICE, version(SERVICE))

    def sample(
        self, carrier: Mapping[str, str], new_id: str, name: str, kind: Kind, attributes: Attributes
    ) -> Sampled | None:
        """The trace that headers name, or else one with the id `new_id`; None if it is not sampled."""
        context = propagate.extract(carrier, Context())
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else int(new_id, 16)
        result = self.sampler.should_sample(context, trace_id, name, SpanKind[kind], dict(attributes))
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return Sampled(f"{trace_id:032x}", f"{parent.span_id:016x}" if parent.is_valid else "")

    def export(self, span: TraceSpan) -> None:
        """Hand a span to the thread that sends, or drop it where too many wait."""
        if self.num_given - self.sender.num_done >= self.max_waiting:
            self.sender.drop(1, "too many spans wait")
            return
        self.num_given += 1
        trace_id, span_id = ids_of(span.traceparent)
        self.ids.trace_id, self.ids.span_id = int(trace_id, 16), int(span_id, 16)
        made = self.tracer.start_span(
            span.name,
            parent_context(trace_id, span.parent_id),
            SpanKind[span.kind],
            dict(span.attributes),
            [Link(context_of(*ids_of(link))) for link in span.links],
            span.start_ns,
        )
        for event in span.events:
            made.add_event(event.name, dict(event.attributes), event.at_ns)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(max(span.end_ns, span.start_ns))

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most."""
        closing = threading.Thread(target=self.processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if num_left := self.num_given - self.sender.num_done:
            self.sender.drop(num_left, f"they were not sent within {CLOSE_S:.0f} s")


class GivenIds(RandomIdGenerator):
    """The ids of the span that is made next."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class CountingExporter(SpanExporter):
    """Sends by another exporter, and counts spans that it drops. What fails is logged once, and so is the end
    of it.

    Attributes:
        num_done: spans that were sent or dropped by the thread.
        num_dropped: since spans were last sent.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.exporter = exporter
        self.num_done = 0
        self.num_dropped = 0
        self.causes = LastMessage()
        sdk_log = logging.getLogger("opentelemetry")
        sdk_log.addHandler(self.causes)
        sdk_log.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.causes.text = ""
        result = self.exporter.export(spans)
        self.num_done += len(spans)
        if result is not SpanExportResult.SUCCESS:
            self.drop(len(spans), self.causes.text or "the exporter failed")
        elif self.num_dropped:
            log.warning("traces are sent again; %s dropped", plural(self.num_dropped, "span"))
            self.num_dropped = 0
        return result

    def drop(self, num_spans: int, why: str) -> None:
        if not self.num_dropped:
            log.warning("traces cannot be sent, and spans are dropped: %s", why)
        self.num_dropped += num_spans
        catalogue.SPANS_DROPPED.add(num_spans)

    def shutdown(self) -> None:
        self.exporter.shutdown()


class LastMessage(logging.Handler):
    """Keeps the last message of the SDK, which says why a request to the receiver has failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def make_exporter(endpoint: str | None) -> SpanExporter:
    """The exporter of the protocol that the variables name, else of gRPC, as in TGI. Raises SettingError."""
    name = next((name for name in PROTOCOLS if os.environ.get(name)), PROTOCOLS[-1])
    protocol = os.environ.get(name, "").strip().lower() or GRPC
    if protocol not in (GRPC, HTTP):
        raise SettingError(name, f"must be {GRPC} or {HTTP}. Given: {protocol!r}")
    try:
        made = make_grpc(endpoint) if protocol == GRPC else make_http(endpoint)
    except Exception as error:  # of a certificate, a header or a number in OpenTelemetry's variables
        raise SettingError("otlp_endpoint", f"the exporter of traces cannot start: {error}") from error
    shown = endpoint or next((value for name in ENDPOINTS if (value := os.environ.get(name))), "its default")
    log.info("traces are sent to %s by %s", shown, protocol)
    return made


def make_grpc(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint)


def make_http(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint and endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH)


def read_queue_size() -> int:
    """OTEL_BSP_MAX_QUEUE_SIZE. Raises SettingError."""
    text = os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or str(DEFAULT_QUEUE_SIZE)
    if not text.isdecimal() or not int(text):
        raise SettingError(
            "otel_bsp_max_queue_size", f"must be a whole number of at least 1. Given: {text!r}"
        )
    return int(text)


def make_resource(settings: Settings, incarnation: str) -> Resource:
    """What the spans of this process have in common."""
    own = {"service.instance.id": incarnation, "service.version": version(SERVICE)}
    known = Resource.create(own)
    if settings.otlp_service_name:
        return known.merge(Resource({"service.name": settings.otlp_service_name}))
    if str(known.attributes.get("service.name", "")).startswith(UNKNOWN_SERVICE):
        return known.merge(Resource({"service.name": SERVICE}))
    return known


def context_of(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(TraceFlags.SAMPLED))


def parent_context(trace_id: str, parent_id: str) -> Context:
    if not parent_id:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(context_of(trace_id, parent_id)), Context())
