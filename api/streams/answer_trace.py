"""Answer trace: what an answer adds to the spans of its request: the conventions of GenAI, and the span
`send_generation`, from the first token that this gateway had until its client has all bytes.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.types import Scope

from api.answers.answer import HttpAnswer
from api.http.access_log import AccessRecord
from api.http.request_trace import RequestTrace, trace_of
from api.streams.stream import Stream
from common import tracing
from common.messages.events import Terminal
from common.messages.request import Generate
from common.metrics import catalogue
from common.tracing import TraceSpan, Value, derive_span, ids_of

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


# --- answer access ------------------------------------------------------------------------------------------


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
