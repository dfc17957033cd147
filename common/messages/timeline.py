"""What happened to requests, for people: the entries of the stream `timeline`. Nothing depends on it."""

from dataclasses import dataclass

from common.messages.codec import wire_field


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request, for people.

    Attributes:
        at_ms: by the broker's clock.
        what: `queued`, `placed`, `prefilled`, `interrupted`, `died`, `taken_over` or `ended`.
        num_tokens: of the prompt for `queued`, else generated so far.
        why: the reason of `interrupted` and `ended`.
    """

    at_ms: int = wire_field("t")
    what: str = wire_field("w")
    worker: str = wire_field("i", default="")
    attempt: int = wire_field("a", default=0)
    num_tokens: int = wire_field("n", default=0)
    why: str = wire_field("y", default="")


@dataclass(frozen=True, slots=True)
class Timeline:
    """A part of a request's life, in order; in a field named after the request."""

    events: list[TimelineEvent] = wire_field("h")
