"""Middlewares: what HTTP requests pass on their way to an application. They get their ids here, their arrival
is counted, the access log has their lines, and traces their spans. Exceptions of routes become error
responses of the route's API family.

A request id is in the header `x-request-id` of the response, in log lines and in Redis. If a client sends an
id, the response echoes that one; inside the fleet the request has the gateway's id.
"""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.answers.answer import AnswerTrace, HttpAnswer
from api.errors import ADMITTED, ApiError, Family, anthropic, cut, internal_error, invalid
from api.event_loop import Turns
from api.http.auth import API_KEY
from api.json import to_json
from api.protocols.protocol import ROW, Protocol, asks_for_tokens, errors_of
from api.requests.metrics import count_arrival, count_error
from api.requests.service_terms import REQUEST_ID_HEADER, client_request_id
from api.streams.stream import Stream
from common import tracing
from common.messages.events import Terminal
from common.metrics import catalogue
from common.process.logs import REQUEST_ID, TRACEPARENT
from common.tracing import (
    Kind,
    SpanEvent,
    TraceSpan,
    Value,
    derive_span,
    derive_trace_id,
    ids_of,
    span_name,
)

log = logging.getLogger(__name__)
access_log = logging.getLogger("api.http.access_log")

Middleware = Callable[[ASGIApp, Scope, Receive, Send], Awaitable[None]]
"""Handles an HTTP request by calling the application that it is given."""
STREAM_PATH = "/requests/{request_id}/stream"
"""Where a streamed answer goes on."""
ID_HEADERS = (REQUEST_ID_HEADER, "request-id")
"""Of responses; the second one has Anthropic's API alone."""
MAX_ARRIVALS = 4
"""Requests that begin in one turn of the event loop; each takes up to a millisecond until it waits for the
broker.
"""


def around(app: ASGIApp, *middlewares: Middleware) -> ASGIApp:
    """An application whose HTTP requests pass these middlewares, the outermost first."""
    served = app
    for middleware in reversed(middlewares):
        served = partial(middleware, served)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await (served if scope["type"] == "http" else app)(scope, receive, send)

    return serve


# --- errors -------------------------------------------------------------------------------------------------


CLIENT_CLOSED_REQUEST = 499
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")


def error_response(error: ApiError, family: Family, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the response of a route whose errors have this form."""
    status, body = family(error)
    all_headers = {**error.headers, **(headers or {})}
    if error.status == 401:
        all_headers["www-authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        all_headers["retry-after"] = str(error.retry_after_s)
    if error.status in ADMITTED:
        # OpenAI's clients retry after a 408 or a 500. A request that kills workers must not come back, nor
        # one whose deadline has passed.
        all_headers["x-should-retry"] = "false"
    return Response(to_json(body), status, all_headers, "application/json")


async def handle_api_error(request: Request, error: ApiError) -> Response:
    count_error(error.status, error.error_type)
    record_of(request.scope).note({"reason": error.error_type})
    return error_response(error, errors_of(request.scope))


async def handle_query(request: Request, exception: RequestValidationError) -> Response:
    """Answer a request with a wrong query; routes read their bodies themselves."""
    problem = exception.errors()[0]
    name = str(problem["loc"][-1])
    return await handle_api_error(request, invalid(f"`{name}`: {problem['msg']}"))


async def handle_http_exception(request: Request, exception: HTTPException) -> Response:
    """Answer a request whose path or method no route has."""
    status, error_type = exception.status_code, exception.detail.lower().replace(" ", "_")
    record_of(request.scope).note({"reason": error_type})
    path = request.url.path
    hint = request.app.state.hint(path) if status == 404 else ""
    asked = f"{cut(request.method)} {cut(path)}"
    error = ApiError(status, error_type, f"{exception.detail}: {asked}{hint}")
    headers = exception.headers
    if status == 405:  # of all routes with this path; Starlette names only those of the first one
        found = [
            (route.matches({**request.scope, "method": method})[0], method)
            for method in METHODS
            for route in request.app.routes
        ]
        headers = {
            "allow": ", ".join(dict.fromkeys(method for match, method in found if match is Match.FULL))
        }
    return error_response(error, errors_of(request.scope), headers)


async def handle_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that left before its request was complete; only middlewares see this response."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_crash(request: Request, error: Exception) -> Response:
    """Answer 500. Starlette raises the error again, so the log has the traceback, and the connection ends."""
    failure = internal_error()
    count_error(failure.status, failure.error_type)
    return error_response(failure, errors_of(request.scope), {"connection": "close"})


ERROR_HANDLERS: dict[int | type[Exception], Any] = {
    ApiError: handle_api_error,
    HTTPException: handle_http_exception,
    RequestValidationError: handle_query,
    ClientDisconnect: handle_disconnect,
    Exception: handle_crash,
}


# --- access log ---------------------------------------------------------------------------------------------
# One line for each request at its end, refusals and actions of administrators too: who asked for what, and
# what came of it. It never has a word of a prompt or an answer, nor a key. Probes and the page's own requests
# have no line.


RECORD = "record"
"""Key of a request's state: its RequestRecord."""
PROBES = ("/health", "/ping", "/livez", "/readyz", "/load", "/metrics")
"""Paths of health and metrics."""
POLLED = ("/", *PROBES, "/fleet", "/v2/health/live")
"""Paths that monitors, load balancers and the page get again and again: they have no line."""
PAGE = "/page/"
INTERVAL_S = 1.0

Noted = str | int | float


class RequestRecord:
    """What is known of one request: the access log has a line of it, and its trace two spans.

    Attributes:
        fields: in the order of the line; those of the request come first, then those of its answer.
        trace: None if it is not sampled.
        goes_on: whether another gateway goes on with the request: that one logs its end, and ends its spans.
    """

    def __init__(self, method: str, route: str) -> None:
        self.started_s = time.monotonic()
        self.method = method
        self.route = route
        self.status = 0
        self.fields: dict[str, Noted] = {}
        self.trace: RequestTrace | None = None
        self.goes_on = False

    def note(self, fields: Mapping[str, Noted | None]) -> None:
        """Add fields, but those that are None or empty."""
        self.fields |= {name: value for name, value in fields.items() if value not in (None, "")}

    def note_streams(self, answer: HttpAnswer, streams: Sequence[Stream], left: str) -> None:
        """Note what has come of all choices. `left` is the reason of one that has not ended."""
        request, first_s = streams[0].request, first_token_s(streams)
        queued = [one.times.placed_s - one.times.started_s for one in streams if one.times.placed_s]
        reasons = [reason_of(stream.terminal) if stream.terminal else left for stream in streams]
        failures = (stream.terminal.error for stream in streams if stream.terminal and not stream.finished)
        failure = next(failures, "")
        num_prompt = answer.num_prompt_tokens
        num_cached = sum(stream.num_cached for stream in streams[:: answer.num_per_prompt])
        num_generated = sum(one.num_tokens for stream in streams for one in stream.outputs)
        self.note(
            {
                "model": answer.model,
                "key": request.key_id,
                "tenant": request.tenant,
                "class": request.service_class,
                "prompt_tokens": num_prompt,
                "cached_tokens": num_cached,
                "completion_tokens": num_generated,
                "choices": len(streams) if len(streams) > 1 else None,
                "queue_s": round(max(queued), 3) if queued else None,
                "first_token_s": round(first_s - self.started_s, 3) if first_s else None,
                "reason": self.fields.get("reason") or ",".join(dict.fromkeys(reasons)),
                "error": failure,
            }
        )
        if (trace := self.trace) is None:
            return
        trace.generation_error = trace.generation_error or failure
        trace.generation_attributes |= {
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": num_generated,
            "gen_ai.usage.cache_read.input_tokens": num_cached,
            "gen_ai.response.finish_reasons": reasons,
        }
        if first_s:
            started_s = min(stream.times.started_s for stream in streams)
            trace.generation_attributes["gen_ai.response.time_to_first_chunk"] = first_s - started_s

    def line(self) -> dict[str, Noted]:
        first: dict[str, Noted] = {"method": self.method, "route": self.route, "status": self.status}
        return first | self.fields | {"total_s": round(time.monotonic() - self.started_s, 3)}


class AccessLog:
    """The access log of one gateway, which writes at most `rate` lines in a second; 0 writes none.

    Attributes:
        load: requests for tokens that the gateway has, from their arrival to the last byte of their answers.
        num_left_out: requests without a line, since the last line that gave their number.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self.load = 0
        self.turns = Turns(MAX_ARRIVALS)
        self.num_left_out = 0
        self.num_written = 0
        self.interval_end_s = 0.0

    async def log_request(
        self,
        protocol_at: Callable[[str], Protocol | None],
        app: ASGIApp,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Middleware: give a request an id and the row of its protocol, log it at its end, and count it in
        `load` until then. One for tokens is traced, counted when it arrives, and waits for its turn if many
        arrive at once.
        """
        state = scope["state"]
        row = state[ROW] = protocol_at(scope["path"])
        ours, theirs = state.setdefault("request_id", uuid.uuid4().hex), client_request_id(scope)
        REQUEST_ID.set(ours)
        if theirs:
            log.info("request %s: its client calls it %s", ours, theirs)
        record = state[RECORD] = RequestRecord(scope["method"], "")
        client, _ = scope["client"] or ("", 0)
        record.note({"request_id": ours, "client": client})
        names = ID_HEADERS if errors_of(scope) is anthropic else ID_HEADERS[:1]
        is_load = asks_for_tokens(scope)
        if row is not None and is_load and tracing.is_on():
            record.trace = begin_trace(scope, row.span)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = theirs or ours
            await send(message)

        self.load += is_load
        try:
            if is_load:
                count_arrival()
                await self.turns.take()
            await app(scope, receive, send_noted)
            note_status(record.trace, record.status)
        except Exception as error:  # the server logs the traceback
            log.error("request %s crashed: %s", ours, type(error).__name__)
            record.status = record.status or 500
            note_status(record.trace, 500, type(error).__name__)
            raise
        finally:
            self.load -= is_load
            known: str | None = getattr(scope.get("route"), "path", None)  # with names for its parts
            record.route = record.route or known or cut(scope["path"])
            if (api_key := state.get(API_KEY)) is not None:
                record.note({"key": api_key.key_id, "tenant": api_key.tenant})
            path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
            if not (is_read and (path in POLLED or path.startswith(PAGE))):
                self.write(record)
        scope.clear()  # it refers to itself, and would stay until a full garbage collection

    def write(self, record: RequestRecord) -> None:
        """Export the spans of a request that has ended, and write its line; beyond `rate` lines count it
        only.
        """
        if record.goes_on:
            return
        if record.trace is not None:
            record.trace.export()
        if not self.rate or not access_log.isEnabledFor(logging.INFO):
            return
        now_s = time.monotonic()
        if now_s >= self.interval_end_s:
            self.interval_end_s, self.num_written = now_s + INTERVAL_S, 0
            if self.num_left_out:
                access_log.info(
                    "%d requests have no line: ACCESS_LOG_RATE is %d", self.num_left_out, self.rate
                )
                self.num_left_out = 0
        if self.num_written >= self.rate:
            self.num_left_out += 1
            return
        self.num_written += 1
        access_log.info("access", extra={"fields": record.line()})


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"][RECORD]
    return record


# --- traces -------------------------------------------------------------------------------------------------
# The two outer spans of a request are made at the gateway that serves it: its own, by the conventions of HTTP
# or of messaging; and the generation in it, with TGI's name of the route and the conventions of GenAI. The
# span `send_generation` is from the first token that a gateway had until its client has all bytes.


ROOT, GENERATION = "request", "generation"
"""What the two spans are about, for their ids."""


@dataclass(slots=True)
class RequestTrace:
    """A trace that is sampled, and one request in it.

    Attributes:
        attributes, events, generation_attributes: what is known so far of both spans.
        error, generation_error: why they failed.
    """

    start: AnswerTrace
    name: str
    kind: Kind
    inner_name: str
    attributes: dict[str, Value]
    events: list[SpanEvent] = field(default_factory=list)
    generation_attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    generation_error: str = ""

    @classmethod
    def begin(
        cls,
        key: str,
        headers: dict[str, str],
        name: str,
        kind: Kind,
        inner_name: str,
        attributes: dict[str, Value],
        started_ns: int = 0,
    ) -> Self | None:
        """The trace that the headers name, or else a new one, which this task is in from now on; None if it
        is not sampled. `key` is the request's: all who begin its trace give its spans the same ids.
        """
        sampled = tracing.is_on() and tracing.exporter.sample(
            headers, derive_trace_id(key), name, kind, attributes
        )
        if not sampled:
            return None
        trace_id, parent_id = sampled
        root = derive_span(span_name(trace_id, parent_id or "0" * 16), ROOT, key)
        start = AnswerTrace(root, parent_id, started_ns or time.time_ns())
        made = cls(start, name, kind, inner_name, attributes)
        TRACEPARENT.set(made.generation)
        return made

    @property
    def generation(self) -> str:
        """The inner span's name, as `traceparent`."""
        return derive_span(self.start.root, GENERATION)

    def export(self) -> None:
        """Export both spans, which end now."""
        start, now_ns = self.start, time.time_ns()
        inner = TraceSpan(self.generation, self.inner_name, start.started_ns, now_ns, ids_of(start.root)[1])
        outer = TraceSpan(start.root, self.name, start.started_ns, now_ns, start.parent_id, self.kind)
        tracing.export(
            inner._replace(attributes=self.generation_attributes, error=self.generation_error),
            outer._replace(attributes=self.attributes, events=self.events, error=self.error),
        )


def begin_trace(scope: Scope, span: str) -> RequestTrace | None:
    """The trace of a request for tokens; `span` is the name of the inner one. None if it is not sampled."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    name, known = f"POST {scope['path']}", http_attributes(scope, headers)
    return RequestTrace.begin(scope["state"]["request_id"], headers, name, "SERVER", span, known)


def inherit_trace(scope: Scope, answer: HttpAnswer, span: str) -> None:
    """Go on with the trace of an answer of a gateway that has ended; its two spans are ended here. `span` is
    the name of the inner one.
    """
    if answer.trace is None or not tracing.is_on():
        return
    route = answer.route
    known = http_attributes({**scope, "path": route}, {})
    trace = record_of(scope).trace = RequestTrace(answer.trace, f"POST {route}", "SERVER", span, known)
    trace.events.append(SpanEvent(time.time_ns(), "inherited"))
    note_status(trace, 200)
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


def note_status(trace: RequestTrace | None, status: int, why: str = "") -> None:
    """Note the status of a response, if there was one; from 500 on the server has failed."""
    if trace is None or not status:
        return
    why = why or f"HTTP {status}"
    trace.attributes["http.response.status_code"] = status
    if status >= 400:
        trace.attributes["error.type"] = str(status)
        trace.generation_error = why
    if status >= 500:
        trace.error = why


# --- answers ------------------------------------------------------------------------------------------------


PROVIDER = "tokenfleet"
SENT = "send_generation"
SAMPLING_SHOWN = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Parameters that a trace shows."""


def traced(answer: HttpAnswer, trace: RequestTrace | None, operation: str) -> HttpAnswer:
    """The answer with the trace of its request, so that its requests and its other gateways go on with it.
    The trace has what was asked for, by the conventions of GenAI; prompts and answers are never part of it.
    """
    if trace is None:
        return answer
    first = answer.requests[0]
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": answer.model,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.id": answer.request_id,
        "gen_ai.output.type": "json" if answer.rendering.is_json else "text",
        "gen_ai.request.choice.count": answer.n,
        "gen_ai.request.stream": answer.streamed,
        "gen_ai.request.max_tokens": first.stopping.max_new_tokens,
        "tokenfleet.service_class": first.service_class,
    }
    if first.stopping.stop:
        known["gen_ai.request.stop_sequences"] = first.stopping.stop
    if first.sampling is None:
        known["gen_ai.request.temperature"] = 0.0
    else:
        for name in SAMPLING_SHOWN:
            known[f"gen_ai.request.{name}"] = getattr(first.sampling, name)
    trace.generation_attributes |= known
    requests = [replace(request, traceparent=trace.generation) for request in answer.requests]
    return replace(answer, requests=requests, trace=trace.start)


def first_token_s(streams: Sequence[Stream]) -> float:
    """Monotonic time of the first token of all choices; 0 before it."""
    return min((stream.times.first_token_s for stream in streams if stream.times.first_token_s), default=0.0)


def export_sent(answer: HttpAnswer, streams: Sequence[Stream], reader: int, goes_on: bool) -> None:
    """Export the span of one reader of an answer, whose client has all of it or has gone, with a link to that
    of the reader before it.

    Args:
        goes_on: whether another gateway goes on with it.
    """
    traceparent, first_s = answer.requests[0].traceparent, first_token_s(streams)
    if not traceparent or not first_s:
        return
    now_ns = time.time_ns()
    start_ns = now_ns - round(1e9 * (time.monotonic() - first_s))
    before = [derive_span(traceparent, SENT, str(reader - 1))] if reader else []
    gateway = streams[0].request.gateway
    tracing.export(
        TraceSpan(
            derive_span(traceparent, SENT, str(reader)),
            SENT,
            start_ns,
            now_ns,
            ids_of(traceparent)[1],
            attributes={"tokenfleet.gateway": gateway, "tokenfleet.goes_on_elsewhere": goes_on},
            links=before,
        )
    )


def count_longest(streams: Sequence[Stream]) -> None:
    """Count the tokens of the longest choice of an answer, if all have finished."""
    if all(stream.finished for stream in streams):
        lengths = (one.num_tokens for stream in streams for one in stream.outputs)
        catalogue.LONGEST_CHOICE.observe(max(lengths))


def reason_of(terminal: Terminal) -> str:
    """Why an answer ended; of one that failed, the type of its error, as its client reads it."""
    return terminal.error_type or "generation" if terminal.reason == "error" else terminal.reason
