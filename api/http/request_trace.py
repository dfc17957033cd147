"""Traces of requests. The two outer spans are made at the gateway that serves a request: its own, by the
conventions of HTTP or of messaging; and the generation in it, with TGI's name of the route and the
conventions of GenAI. The span `send_generation` is from the first token that a gateway had until its client
has all bytes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.answers.answer import AnswerTrace, HttpAnswer
from api.http.access_log import AccessRecord
from api.protocols.protocol import asks_for_tokens, row_of
from api.streams.stream import Stream
from common import tracing
from common.messages.events import Terminal
from common.messages.request import Generate
from common.metrics import catalogue
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


# --- answers ------------------------------------------------------------------------------------------------


PROVIDER = "tokenfleet"
SENT = "send_generation"


def traced(answer: HttpAnswer, trace: RequestTrace | None, operation: str) -> HttpAnswer:
    """The answer with the trace of its request, so that its requests and its other gateways go on with it."""
    if trace is None:
        return answer
    trace.generation_attributes |= request_attributes(answer, operation)
    requests = [replace(request, traceparent=trace.generation) for request in answer.requests]
    return replace(answer, requests=requests, trace=trace.start)


def request_attributes(answer: HttpAnswer, operation: str) -> dict[str, Value]:
    first = answer.requests[0]
    return {
        **generation_attributes(first, operation, answer.model),
        "gen_ai.request.choice.count": answer.n,
        "gen_ai.request.stream": answer.streamed,
        "gen_ai.response.id": answer.request_id,
        "gen_ai.output.type": "json" if answer.rendering.is_json else "text",
    }


def generation_attributes(request: Generate, operation: str, model: str) -> dict[str, Value]:
    """What was asked for, by the conventions of GenAI; prompts and answers are never part of a trace."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": request.stopping.max_new_tokens,
        "tokenfleet.service_class": request.service_class,
    }
    if request.stopping.stop:
        known["gen_ai.request.stop_sequences"] = request.stopping.stop
    sampling = request.sampling
    if sampling is None:
        return known | {"gen_ai.request.temperature": 0.0}
    return known | {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
    }


def response_attributes(streams: Sequence[Stream]) -> dict[str, Value]:
    """What has come of all choices."""
    reasons = [stream.terminal.reason if stream.terminal else "cancelled" for stream in streams]
    prompts = {stream.request.prompt_ids for stream in streams}
    known: dict[str, Value] = {
        "gen_ai.usage.input_tokens": sum(map(len, prompts)) // 4,
        "gen_ai.usage.output_tokens": sum(stream.num_tokens for stream in streams),
        "gen_ai.usage.cache_read.input_tokens": streams[0].num_cached,
        "gen_ai.response.finish_reasons": reasons,
    }
    if first_s := first_token_s(streams):
        started_s = min(stream.times.started_s for stream in streams)
        known["gen_ai.response.time_to_first_chunk"] = first_s - started_s
    return known


def first_token_s(streams: Sequence[Stream]) -> float:
    """Monotonic time of the first token of all choices; 0 before it."""
    return min((stream.times.first_token_s for stream in streams if stream.times.first_token_s), default=0.0)


def end_answer(
    scope: Scope, answer: HttpAnswer, streams: Sequence[Stream], reader: int, goes_on: bool
) -> None:
    """Note what has come of an answer whose client has all of it or has gone, and export `send_generation`.

    Args:
        goes_on: whether another gateway goes on with it.
    """
    traceparent = answer.requests[0].traceparent
    if not traceparent:
        return
    if (trace := trace_of(scope)) is not None:
        note_answer(trace, streams, goes_on)
    if first_s := first_token_s(streams):
        export_sent(traceparent, first_s, reader, goes_on, streams[0].request.gateway)


def note_answer(trace: RequestTrace, streams: Sequence[Stream], goes_on: bool = False) -> None:
    trace.goes_on = goes_on
    trace.generation_attributes |= response_attributes(streams)
    failures = (stream.terminal.error for stream in streams if stream.terminal and not stream.finished)
    trace.generation_error = next(failures, trace.generation_error)


def export_sent(traceparent: str, first_s: float, reader: int, goes_on: bool, gateway: str) -> None:
    """Export the span of one reader of an answer, with a link to that of the reader before it."""
    now_ns = time.time_ns()
    start_ns = now_ns - round(1e9 * (time.monotonic() - first_s))
    before = [derive_span(traceparent, SENT, str(reader - 1))] if reader else []
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


# --- access log ---------------------------------------------------------------------------------------------


def note_streams(record: AccessRecord, model: str, streams: Sequence[Stream], left: str) -> None:
    """Note what has come of all choices. `left` is the reason of one that has not ended."""
    request = streams[0].request
    first_s = first_token_s(streams)
    queued = [stream.times.placed_s - stream.times.started_s for stream in streams if stream.times.placed_s]
    reasons = dict.fromkeys(reason_of(stream.terminal) if stream.terminal else left for stream in streams)
    failures = (stream.terminal.error for stream in streams if stream.terminal and not stream.finished)
    record.note(
        {
            "model": model,
            "key": request.key_id,
            "tenant": request.tenant,
            "class": request.service_class,
            "prompt_tokens": sum(map(len, {stream.request.prompt_ids for stream in streams})) // 4,
            "cached_tokens": streams[0].num_cached,
            "completion_tokens": sum(one.num_tokens for stream in streams for one in stream.outputs),
            "choices": len(streams) if len(streams) > 1 else None,
            "queue_s": round(max(queued), 3) if queued else None,
            "first_token_s": round(first_s - record.started_s, 3) if first_s else None,
            "reason": ",".join(reasons),
            "error": next(failures, None),
        }
    )


def count_longest(streams: Sequence[Stream]) -> None:
    """Count the tokens of the longest choice of an answer, if all have finished."""
    if all(stream.finished for stream in streams):
        lengths = (one.num_tokens for stream in streams for one in stream.outputs)
        catalogue.LONGEST_CHOICE.observe(max(lengths))


def reason_of(terminal: Terminal) -> str:
    """Why an answer ended; of one that failed, the type of its error, as its client reads it."""
    return terminal.error_type or "generation" if terminal.reason == "error" else terminal.reason
