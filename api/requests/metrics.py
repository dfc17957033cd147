"""Metrics of requests: counts, and durations from arrival to end."""

import time
from contextvars import ContextVar

from api.errors import ADMITTED
from api.requests.validate import Limits
from api.streams.stream import Stream
from common.metrics import catalogue

FAILURES = {"overloaded": "overloaded", "unavailable": "unavailable", "template_error": "template"}
"""Type of an error → label `err`; all others are `validation`."""
HISTOGRAMS = {
    "total-time": catalogue.REQUEST_DURATION,
    "validation-time": catalogue.VALIDATION_DURATION,
    "queue-time": catalogue.QUEUE_DURATION,
    "inference-time": catalogue.INFERENCE_DURATION,
    "time-per-token": catalogue.TIME_PER_TOKEN,
}
"""TGI's names of the durations of a request → their metrics."""
ARRIVED_S: ContextVar[float] = ContextVar("arrived_s", default=0.0)
"""Monotonic time at which the request that this task serves arrived; 0 in tasks that serve none."""


def count_arrival() -> None:
    """Count a request, over HTTP or as a job; from here on this task serves it."""
    ARRIVED_S.set(time.monotonic())
    catalogue.REQUEST_COUNT.add()


def count_error(status: int, error_type: str) -> None:
    """Count an error response. A request that failed after its admission is counted with its stream."""
    if ARRIVED_S.get() and status not in ADMITTED and error_type != "grammar":
        catalogue.REQUEST_FAILURE.add(1, FAILURES.get(error_type, "validation"))


def count_stream(stream: Stream, limits: Limits) -> None:
    """Count a stream that nobody reads any more."""
    if not stream.admitted:
        return
    fit_buckets(limits)
    catalogue.INPUT_LENGTH.observe(len(stream.prompt_ids))
    catalogue.MAX_NEW_TOKENS.observe(stream.request.stopping.max_new_tokens)
    reason = stream.terminal.reason if stream.terminal else "cancelled"
    num_tokens = sum(output.num_tokens for output in stream.outputs)
    catalogue.REQUESTS.add(1, stream.request.service_class, reason)
    if stream.finished:
        catalogue.REQUEST_SUCCESS.add()
        for name, seconds in durations(stream, ARRIVED_S.get() or stream.times.started_s).items():
            HISTOGRAMS[name].observe(seconds)
        catalogue.GENERATED_TOKENS.observe(num_tokens)
        times = stream.times
        if times.first_token_s:  # prefill and decode, as vLLM divides them
            decode_s = times.token_s - times.first_token_s
            catalogue.PREFILL_DURATION.observe(times.first_token_s - times.placed_s)
            catalogue.DECODE_DURATION.observe(decode_s)
            if stream.num_tokens > 1:
                catalogue.DECODE_PER_TOKEN.observe(decode_s / (stream.num_tokens - 1))
    else:
        catalogue.REQUEST_FAILURE.add(1, "dropped" if reason == "cancelled" else "generation")


def fit_buckets(limits: Limits) -> None:
    """Let the buckets of lengths reach up to what is possible."""
    catalogue.INPUT_LENGTH.fit(limits.max_input_tokens)
    catalogue.MAX_NEW_TOKENS.fit(limits.max_total_tokens)
    catalogue.GENERATED_TOKENS.fit(limits.max_total_tokens)
    catalogue.LONGEST_CHOICE.fit(limits.max_total_tokens)


def durations(stream: Stream, arrived_s: float) -> dict[str, float]:
    """What a finished stream took in seconds, by the names of HISTOGRAMS. `arrived_s` is the monotonic time
    of the request's arrival.
    """
    inference_s = stream.times.ended_s - stream.times.placed_s
    return {
        "total-time": stream.times.ended_s - arrived_s,
        "validation-time": stream.times.started_s - arrived_s,
        "queue-time": stream.times.placed_s - stream.times.started_s,
        "inference-time": inference_s,
        "time-per-token": inference_s / max(1, sum(output.num_tokens for output in stream.outputs)),
    }
