"""What is counted: metrics of requests, with the headers that show some of them; and what API keys, tenants
and models have used, as the scripts count it (common/broker/usage.lua).
"""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from redis.asyncio import Redis

from api.answers.answer import HttpAnswer
from api.errors import ADMITTED
from api.requests.validate import Limits
from api.streams.stream import Stream
from common.broker.keys import Keys
from common.metrics import catalogue

FAILURES = {
    "overloaded": "overloaded",
    "unavailable": "unavailable",
    "template_error": "template",
    "internal": "generation",
    "timeout": "timeout",
    **dict.fromkeys(("grammar", "unauthorized", "validation"), "validation"),
}
"""Type of an error → label `err`. Others are `validation`, and after the admission `generation`."""
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
    end, times = stream.terminal, stream.times
    had_ended = times.is_resumed and stream.finished and not stream.source  # an earlier reader has counted it
    if not stream.admitted or had_ended or (end and end.error_type == "superseded"):
        return
    fit_buckets(limits)
    catalogue.INPUT_LENGTH.observe(len(stream.prompt_ids))
    catalogue.MAX_NEW_TOKENS.observe(stream.request.stopping.max_new_tokens)
    reason = end.reason if end else "cancelled"
    num_tokens = sum(output.num_tokens for output in stream.outputs)
    catalogue.REQUESTS.add(1, stream.request.service_class, reason)
    if stream.finished:
        catalogue.REQUEST_SUCCESS.add()
        catalogue.GENERATED_TOKENS.observe(num_tokens)
        if times.is_resumed:
            return  # its earlier times are not known here
        for name, seconds in durations(stream, ARRIVED_S.get() or times.started_s).items():
            HISTOGRAMS[name].observe(seconds)
        if times.first_token_s:  # prefill and decode, as vLLM divides them
            decode_s = times.token_s - times.first_token_s
            catalogue.PREFILL_DURATION.observe(times.first_token_s - times.placed_s)
            catalogue.DECODE_DURATION.observe(decode_s)
            if stream.num_tokens > 1:
                catalogue.DECODE_PER_TOKEN.observe(decode_s / (stream.num_tokens - 1))
    elif end is None or reason == "cancelled":
        catalogue.REQUEST_FAILURE.add(1, "dropped")
    else:
        catalogue.REQUEST_FAILURE.add(1, FAILURES.get(end.error_type, "generation"))


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
    started_s, placed_s = stream.times.started_s, stream.times.placed_s or stream.times.started_s
    inference_s = stream.times.ended_s - placed_s
    return {
        "total-time": stream.times.ended_s - arrived_s,
        "validation-time": started_s - arrived_s,
        "queue-time": placed_s - started_s,
        "inference-time": inference_s,
        "time-per-token": inference_s / max(1, sum(output.num_tokens for output in stream.outputs)),
    }


def total_headers(
    answer: HttpAnswer, streams: Sequence[Stream], num_generated: int, arrived_s: float
) -> dict[str, str]:
    """Headers of finished streams: token counts, and the times of the one that ended last; `arrived_s` is the
    monotonic time of the request's arrival.
    """
    seconds = durations(max(streams, key=lambda stream: stream.times.ended_s), arrived_s)
    return {f"x-{name}": str(round(1000 * value)) for name, value in seconds.items()} | {
        "x-compute-time": f"{seconds['total-time']:.6f}",
        "x-prompt-tokens": str(answer.num_prompt_tokens),
        "x-generated-tokens": str(num_generated),
    }


# --- usage --------------------------------------------------------------------------------------------------


HOUR_S = 3600
HOURS_KEPT = 90 * 24
MONTHS_KEPT = 13
SPANS_IN_ONE_READ = 64


NUMBERS = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "generated": "completion_tokens",
    "speculated": "speculated_tokens",
}
"""Numbers in the hashes → their names in reports. Some tokens of prompts were cached, some others guessed."""


class UsageRow(NamedTuple):
    """What was used in an hour or month that begins at this time. Owners that were too many for it are
    together the tenant `*`.
    """

    begin: datetime
    key_id: str
    tenant: str
    model: str
    used: Counter[str]


async def read_hours(redis: Redis, begin: datetime, end: datetime) -> list[UsageRow]:
    """Return what was used from one time to another, in whole hours (UTC)."""
    first = int(begin.timestamp()) // HOUR_S
    last = -(-int(end.timestamp()) // HOUR_S)
    hours = range(max(first, last - HOURS_KEPT), last)
    return await read_spans(
        redis, [(datetime.fromtimestamp(n * HOUR_S, UTC), Keys.usage_hour(n)) for n in hours]
    )


async def read_months(redis: Redis, begin: datetime, end: datetime) -> list[UsageRow]:
    """Return what was used from one time to another, in whole months (UTC)."""
    spans, month = [], month_begin(max(begin, end - timedelta(days=31 * MONTHS_KEPT)).timestamp())
    while month < end:
        spans.append((month, Keys.usage_month(month_name(month))))
        month = month_begin(month.timestamp(), 1)
    return await read_spans(redis, spans)


async def read_spans(redis: Redis, spans: list[tuple[datetime, str]]) -> list[UsageRow]:
    rows: list[UsageRow] = []
    for i in range(0, len(spans), SPANS_IN_ONE_READ):
        part = spans[i : i + SPANS_IN_ONE_READ]
        async with redis.pipeline(transaction=False) as pipe:
            for _, key in part:
                pipe.hgetall(key)
            replies = await pipe.execute()
        for (begin, _), reply in zip(part, replies, strict=True):
            found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
            for field, number in reply.items():  # of an hour's or a month's hash
                with contextlib.suppress(ValueError, KeyError):  # another field
                    key_id, tenant, model, name = field.decode().split("\n")
                    shown = NUMBERS[name]
                    found[key_id, tenant, model][shown] = int(number)
            rows += [UsageRow(begin, *owner, used) for owner, used in found.items()]
    return rows


def month_begin(time_s: float, later: int = 0) -> datetime:
    """The beginning of the month of a Unix time, or of one so many months later."""
    now = datetime.fromtimestamp(time_s, UTC)
    months = now.year * 12 + now.month - 1 + later
    return datetime(months // 12, months % 12 + 1, 1, tzinfo=UTC)


def month_name(begin: datetime) -> str:
    return f"{begin:%Y-%m}"


def seconds_to_next_month(time_s: float) -> float:
    return month_begin(time_s, 1).timestamp() - time_s
