"""A receiver of traces: OTLP over gRPC and over HTTP, by OpenTelemetry's own messages."""

import asyncio
import contextlib
import gzip
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.machine.ports import free_port
from tests.support.other_servers import in_thread
from tests.support.waiting import PATIENCE_S, wait_until

CLIENT_SPAN = "00f067aa0ba902b7"


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it arrived; ids are hexadecimal, `events` are (name, attributes, Unix time in ns)."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any], int]]
    links: list[str]
    error: str
    resource: dict[str, Any]

    @property
    def event_names(self) -> list[str]:
        return [name for name, _, _ in self.events]


class Receiver(service.TraceServiceServicer):
    """Collects spans.

    Attributes:
        grpc_url, http_url: where it listens.
        headers: of requests over HTTP, and metadata of those over gRPC.
        answers: set while it answers; else requests wait until the receiver is closed.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.lock = threading.Lock()

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.headers.append(dict(context.invocation_metadata()))
        return self.receive(request)

    def receive(self, request: ExportTraceServiceRequest) -> ExportTraceServiceResponse:
        self.answers.wait()
        with self.lock:
            self.spans += spans_of(request)
        return ExportTraceServiceResponse()

    @contextlib.contextmanager
    def listening(self, grpc_port: int = 0) -> Iterator["Receiver"]:
        pool = ThreadPoolExecutor(8)
        server = grpc.server(pool)
        service.add_TraceServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        self.grpc_url = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{grpc_port}')}"
        server.start()
        port = free_port()
        self.http_url = f"http://127.0.0.1:{port}"
        web = Starlette(routes=[Route("/v1/traces", receive_http, methods=["POST"])])
        web.state.receiver = self
        with in_thread(web, port):
            try:
                yield self
            finally:
                self.answers.set()
                server.stop(None).wait()
                pool.shutdown()

    def trace(self, trace_id: str) -> dict[str, list[ReceivedSpan]]:
        """The spans of a trace by name, each once, in the order of their starts."""
        unique = {span.span_id: span for span in list(self.spans) if span.trace_id == trace_id}
        found: dict[str, list[ReceivedSpan]] = {}
        for span in sorted(unique.values(), key=lambda span: span.start_ns):
            found.setdefault(span.name, []).append(span)
        return found

    async def whole_trace(self, trace_id: str, *names: str) -> dict[str, list[ReceivedSpan]]:
        """The spans of a trace, once it has these names, as often as given, and no parent is missing."""

        def is_whole() -> bool:
            spans = [span for spans in self.trace(trace_id).values() for span in spans]
            ids = {span.span_id for span in spans} | {"", CLIENT_SPAN}
            has_all = Counter(names) <= Counter(span.name for span in spans)
            return has_all and all(span.parent_id in ids for span in spans)

        await wait_until(is_whole, PATIENCE_S)
        return self.trace(trace_id)


async def receive_http(request: Request) -> Response:
    """Receive spans over HTTP."""
    receiver: Receiver = request.app.state.receiver
    receiver.headers.append(dict(request.headers))
    body = await request.body()
    if request.headers.get("content-encoding") == "gzip":
        body = gzip.decompress(body)
    await asyncio.to_thread(receiver.receive, ExportTraceServiceRequest.FromString(body))
    return Response()


def spans_of(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.kind,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            values_of(span.attributes),
            [(event.name, values_of(event.attributes), event.time_unix_nano) for event in span.events],
            [link.span_id.hex() for link in span.links],
            span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
            values_of(resource.resource.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def values_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in list[KeyValue](pairs)}


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None


def traceparent(trace_id: str, flags: str = "01") -> str:
    return f"00-{trace_id}-{CLIENT_SPAN}-{flags}"


if __name__ == "__main__":  # a receiver for benchmarks: prints its URL, and keeps nothing
    with Receiver().listening() as own:
        print(own.grpc_url, flush=True)
        while True:
            time.sleep(1)
            own.spans.clear()
