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
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.metrics import catalogue
from common.process.logs import plural
from common.settings.settings import Settings
from common.settings.types import SettingError
from common.traces.span import ENDPOINTS, Attributes, Kind, Sampled, TraceSpan, ids_of

log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""How long a process that ends waits for its last spans to be sent."""
SERVICE = "tokenfleet"
UNKNOWN_SERVICE = "unknown_service"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
TRACES_PATH = "/v1/traces"
DEFAULT_QUEUE_SIZE = 2048
OK = Status(StatusCode.UNSET)


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
        try:
            self.processor = BatchSpanProcessor(self.sender, max_queue_size=self.max_waiting)
        except ValueError as error:  # of a batch that is larger than the queue
            raise SettingError("otel_bsp_max_export_batch_size", str(error)) from error
        self.num_given = 0
        self.sampler = TracerProvider(shutdown_on_exit=False).sampler
        self.resource = make_resource(settings, incarnation)
        self.scope = InstrumentationScope(SERVICE, version(SERVICE))
        keep_quiet(self.sender.causes)

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
            self.sender.drop(1, "more than OTEL_BSP_MAX_QUEUE_SIZE wait")
            return
        self.num_given += 1
        self.processor.on_end(self.readable(span))

    def readable(self, span: TraceSpan) -> ReadableSpan:
        """The SDK's span. It is made as a whole: a tracer, which lets spans grow, takes six times as long."""
        trace_id, span_id = ids_of(span.traceparent)
        return ReadableSpan(
            span.name,
            context_of(trace_id, span_id),
            context_of(trace_id, span.parent_id) if span.parent_id else None,
            self.resource,
            span.attributes,
            [Event(event.name, event.attributes, event.at_ns) for event in span.events],
            [Link(context_of(*ids_of(link))) for link in span.links],
            SpanKind[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else OK,
            start_time=span.start_ns,
            end_time=max(span.end_ns, span.start_ns),
            instrumentation_scope=self.scope,
        )

    def close(self) -> None:
        """Send what waits, for CLOSE_S at most."""
        closing = threading.Thread(target=self.processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if num_left := self.num_given - self.sender.num_done:
            self.sender.drop(num_left, f"they were not sent within {CLOSE_S:.0f} s")


class CountingExporter(SpanExporter):
    """Sends by another exporter, and counts spans that are dropped. Each cause is logged once, and so is the
    end of all.

    Attributes:
        num_done: spans that were sent or dropped by the thread.
        num_dropped: since spans were last sent.
        told: the causes since then.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self.exporter = exporter
        self.num_done = 0
        self.num_dropped = 0
        self.told: set[str] = set()
        self.causes = LastMessage()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.causes.text = ""
        result = self.exporter.export(spans)
        self.num_done += len(spans)
        if result is not SpanExportResult.SUCCESS:
            self.drop(len(spans), "the receiver did not take them", self.causes.text)
        elif self.num_dropped:
            log.warning("traces are sent again; %s dropped", plural(self.num_dropped, "span"))
            self.num_dropped = 0
            self.told.clear()
        return result

    def drop(self, num_spans: int, cause: str, detail: str = "") -> None:
        if cause not in self.told:
            log.warning("spans are dropped: %s%s", cause, f": {detail}" if detail else "")
        self.told.add(cause)
        self.num_dropped += num_spans
        catalogue.SPANS_DROPPED.add(num_spans)

    def shutdown(self) -> None:
        self.exporter.shutdown()


class LastMessage(logging.Handler):
    """Keeps the last message of the SDK, which says why a request to the receiver has failed."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def keep_quiet(causes: LastMessage) -> None:
    """Let the SDK's log go to `causes` alone, from here on: it says of each request that it has failed."""
    sdk_log = logging.getLogger("opentelemetry")
    sdk_log.handlers = [causes]
    sdk_log.propagate = False


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
