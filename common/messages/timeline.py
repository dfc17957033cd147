"""Timeline messages: what happened to requests, in the stream `timeline`. Nothing depends on them."""

from dataclasses import dataclass

from common.messages.codec import wire_field


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request.

    Attributes:
        at_ms: time, by the broker's clock.
        what: `queued`, `placed`, `prefilled`, `interrupted`, `died`, `taken_over` or `ended`.
        num_tokens: tokens of the prompt for `queued`, else those generated so far.
        why: the reason of `interrupted` and `ended`.
        num_cached: of `placed`: tokens whose KV the worker had.
    """

    at_ms: int = wire_field("t")
    what: str = wire_field("w")
    worker: str = wire_field("i", default="")
    attempt: int = wire_field("a", default=0)
    num_tokens: int = wire_field("n", default=0)
    why: str = wire_field("y", default="")
    num_cached: int = wire_field("c", default=0)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events of one request, in order; a field of the entry, named after the request."""

    events: list[TimelineEvent] = wire_field("h")
