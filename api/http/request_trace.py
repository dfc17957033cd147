"""Request trace: the two outer spans of a request at the gateway that serves it, and the middleware that
makes them for HTTP. The outer one is the request's own, by the conventions of HTTP or of messaging; the
generation in it has TGI's name of the route, and the conventions of GenAI. Both are exported at their end.
"""

import time
from typing import Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.answers.answer import AnswerTrace, HttpAnswer
from api.protocols.protocol import asks_for_tokens, row_of
from common import tracing
from common.process.logs import TRACEPARENT
from common.tracing import (
    Attributes,
    Kind,
    SpanEvent,
    TraceSpan,
    Value,
    derive_span,
    derive_trace_id,
    ids_of,
    span_name,
)

TRACE = "trace"
"""Key of a request's state: its RequestTrace."""
ROOT, GENERATION = "request", "generation"
"""What the two spans are about, for their ids."""


class RequestTrace:
    """A trace that is sampled, and one request in it.

    Attributes:
        request: the outer span's name, as `traceparent`, and the id of its own parent.
        generation: the inner span's.
        attributes, events, generation_attributes: what is known so far.
        error, generation_error: why they failed.
        goes_on: whether another gateway goes on with the request: it ends the spans.
    """

    def __init__(self, start: AnswerTrace, name: str, kind: Kind, inner_name: str) -> None:
        self.start = start
        self.name = name
        self.kind = kind
        self.inner_name = inner_name
        self.generation = derive_span(start.root, GENERATION)
        self.attributes: dict[str, Value] = {}
        self.events: list[SpanEvent] = []
        self.generation_attributes: dict[str, Value] = {}
        self.error = ""
        self.generation_error = ""
        self.goes_on = False

    @classmethod
    def begin(
        cls,
        key: str,
        headers: dict[str, str],
        *,
        name: str,
        kind: Kind,
        inner_name: str,
        attributes: Attributes,
        started_ns: int = 0,
    ) -> Self | None:
        """The trace that the headers name, or else a new one; None if it is not sampled. `key` is the
        request's: all who begin its trace give its spans the same ids.
        """
        sampled = tracing.is_on() and tracing.exporter.sample(
            headers, derive_trace_id(key), name, kind, attributes
        )
        if not sampled:
            return None
        trace_id, parent_id = sampled
        root = derive_span(span_name(trace_id, parent_id or "0" * 16), ROOT, key)
        made = cls(AnswerTrace(root, parent_id, started_ns or time.time_ns()), name, kind, inner_name)
        made.attributes |= attributes
        return made

    def add_event(self, name: str, attributes: Attributes) -> None:
        self.events.append(SpanEvent(time.time_ns(), name, attributes))

    def finish(self) -> None:
        """Export both spans, which end now."""
        if self.goes_on:
            return
        now_ns, (_, root_id) = time.time_ns(), ids_of(self.start.root)
        inner = TraceSpan(
            self.generation,
            self.inner_name,
            self.start.started_ns,
            now_ns,
            root_id,
            attributes=self.generation_attributes,
            error=self.generation_error,
        )
        outer = TraceSpan(
            self.start.root,
            self.name,
            self.start.started_ns,
            now_ns,
            self.start.parent_id,
            self.kind,
            self.attributes,
            self.events,
            error=self.error,
        )
        tracing.export(inner, outer)


def trace_of(scope: Scope) -> RequestTrace | None:
    trace: RequestTrace | None = scope["state"].get(TRACE)
    return trace


async def trace_request(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Trace a request for tokens, from here to the last byte of its answer."""
    row = row_of(scope)
    trace = None
    if row is not None and asks_for_tokens(scope):
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        trace = RequestTrace.begin(
            scope["state"]["request_id"],
            headers,
            name=f"POST {scope['path']}",
            kind="SERVER",
            inner_name=row.span,
            attributes=http_attributes(scope, headers),
        )
    if trace is None:
        await app(scope, receive, send)
        return
    scope["state"][TRACE] = trace
    TRACEPARENT.set(trace.generation)

    async def send_noted(message: Message) -> None:
        if message["type"] == "http.response.start":
            note_status(trace, message["status"])
        await send(message)

    try:
        await app(scope, receive, send_noted)
    except Exception as error:
        note_status(trace, 500)
        trace.error = trace.generation_error = type(error).__name__
        raise
    finally:
        trace.finish()


def inherit_trace(scope: Scope, answer: HttpAnswer, span: str) -> None:
    """Go on with the trace of an answer of a gateway that has ended; its two spans are ended here. `span` is
    the name of the inner one.
    """
    if answer.trace is None or not tracing.is_on():
        return
    route = answer.route
    trace = RequestTrace(answer.trace, f"POST {route}", "SERVER", span)
    trace.attributes |= http_attributes({**scope, "path": route}, {})
    trace.add_event("inherited", {})
    note_status(trace, 200)
    scope["state"][TRACE] = trace
    TRACEPARENT.set(trace.generation)


def http_attributes(scope: Scope, headers: dict[str, str]) -> dict[str, Value]:
    """What is known of an HTTP request at its beginning, by OpenTelemetry's conventions."""
    known: dict[str, Value | None] = {
        "http.request.method": scope["method"],
        "http.route": scope["path"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
        "user_agent.original": headers.get("user-agent"),
        "tokenfleet.request.id": scope["state"]["request_id"],
    }
    for name, pair in (("client", scope["client"]), ("server", scope["server"])):
        if pair:
            known |= {f"{name}.address": pair[0], f"{name}.port": pair[1]}
    return {name: value for name, value in known.items() if value is not None}


def note_status(trace: RequestTrace, status: int) -> None:
    """Note the status of a response; from 500 on the server has failed."""
    trace.attributes["http.response.status_code"] = status
    if status >= 400:
        trace.attributes["error.type"] = str(status)
        trace.generation_error = f"HTTP {status}"
    if status >= 500:
        trace.error = f"HTTP {status}"
