"""Event messages: tokens and terminals on their way to gateways and in the logs of workers; and timelines."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from common.messages.codec import WireError, encode, wire_field
from common.messages.records import RECORD, pack_records

BUDGET = "budget"
"""Reason of a request that ended because its API key has reached its budget: what it has is its answer."""
FINISHED = ("length", "eos_token", "stop_sequence", BUDGET)
"""Reasons of rows whose request is complete."""
INTERRUPTED = ("preempted", "takeover")
"""Reasons of rows whose request goes on in another row."""
ERRORS = {
    "timeout": ("timeout", "the request was not finished before its deadline"),
    "expired": ("timeout", "the request's deadline passed while it waited: it never started"),
    "poison": ("generation", "three workers died while they worked on this request"),
    "capacity": ("generation", "no worker's KV cache can hold this request"),
    "forward": ("generation", "the model's forward failed for this request"),
    "picture": ("validation", "a picture of the request cannot be shown to the model"),
    "picture_gone": ("generation", "the broker has lost a picture of the request: send it again"),
    "beam_length": (
        "validation",
        "this model computes its keys anew at a length that a beam search may not cross",
    ),
    "grammar": ("grammar", "the request's grammar allows none of the tokens that are left"),
    "grammar_limit": (
        "grammar",
        "the request's grammar is too complex: the tokens that it allows next take too much work to find",
    ),
    "adapter": ("generation", "the request's adapter is not loaded any more"),
    "no_worker": ("unavailable", "no worker is left, and none started within WORKER_GRACE_S"),
    "malformed": ("generation", "the queued request cannot be read"),
}
"""Reason of a failed request → (error type, error text). A reason that is not listed here is a cancel."""
REPEAT_S = 0.5
REPEATED_FOR_S = 10.0
SILENT_S = REPEAT_S / 2
"""The last number is repeated on a channel without a message for this long: another message shows a gap, too.
"""


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens of one request.

    Attributes:
        index: index of the first token, counted from 0 over all attempts.
        ids, logprobs: packed int32 and float32, equally many.
        top_ids, top_logprobs: the `top_n_tokens` likeliest tokens at each place, likeliest first.
        texts: the text that each token adds.
        since_start_ms: with the request's first token, the time since this worker got it; else 0.
        num_cached: with the request's first token, tokens of the prompt whose KV this worker had; else 0.
        num_speculated: those of these tokens that needed no step of their own.
    """

    request_id: str = wire_field("id")
    attempt: int = wire_field("a")
    index: int = wire_field("i")
    ids: bytes = wire_field("t")
    logprobs: bytes = wire_field("l")
    texts: list[str] = wire_field("x", default_factory=list)
    top_ids: bytes = wire_field("ti", default=b"")
    top_logprobs: bytes = wire_field("tl", default=b"")
    since_start_ms: int = wire_field("ss", default=0)
    num_cached: int = wire_field("nc", default=0)
    num_speculated: int = wire_field("sp", default=0)


TokenRow = tuple[str, int, int, tuple[int, float], str]
"""Request id, attempt, index, (id, log-probability) and text of one token."""


@dataclass(slots=True)
class TokenColumns:
    """The newest token of each of several requests, in columns: what nearly every step brings. It takes half
    as long to encode and to read as `Tokens` of each. First tokens, and those with likeliest tokens, are sent
    as `Tokens`.

    Attributes:
        records: packed `RECORD`s.
        texts: the text that each token adds.
    """

    request_ids: list[str] = wire_field("id")
    attempts: list[int] = wire_field("a")
    indices: list[int] = wire_field("i")
    records: bytes = wire_field("r")
    texts: list[str] = wire_field("x")

    def rows(self) -> Iterator[TokenRow]:
        """Return an iterator over the tokens. Raises WireError if the columns are not equally long."""
        lengths = {len(self.request_ids), len(self.attempts), len(self.indices), len(self.texts)}
        if lengths != {len(self.records) / RECORD.size}:
            raise WireError("TokenColumns: the columns are not equally long")
        return zip(
            self.request_ids,
            self.attempts,
            self.indices,
            RECORD.iter_unpack(self.records),
            self.texts,
            strict=True,
        )


@dataclass(frozen=True, slots=True)
class Terminal:
    """The one end of a request. `reason` is one of FINISHED, `cancelled` or `error`.

    Attributes:
        num_tokens: number of generated tokens; a gateway that has fewer fills the gap first.
        error, error_type: with reason `error` or `cancelled`.
    """

    request_id: str = wire_field("id")
    reason: str = wire_field("w")
    num_tokens: int = wire_field("n")
    error: str = wire_field("e", default="")
    error_type: str = wire_field("y", default="")

    @property
    def known_reason(self) -> str:
        """The reason in the words that TGI has, so that its clients can read it."""
        return "length" if self.reason == BUDGET else self.reason


@dataclass(slots=True)
class Events:
    """A pub/sub message to a gateway. The log of a worker has those with tokens: an entry of the stream
    `log:{worker}` has the id `{flush}-0`, and a field for each channel.

    Attributes:
        source: the worker's incarnation, or the batcher.
        sequence: number of the message from this source on this channel. A message without tokens and
            terminals repeats the last number, so the gateway notices that the last message was lost.
        flush: number of the flush in the source's log that has these tokens, or in which they ended; of a
            repeated number, that of the message with it. 0 where the source has no log.
        columns: further tokens, of other requests.
    """

    source: str = wire_field("s")
    sequence: int = wire_field("q")
    tokens: list[Tokens] = wire_field("t", default_factory=list)
    terminals: list[Terminal] = wire_field("x", default_factory=list)
    flush: int = wire_field("f", default=0)
    columns: TokenColumns | None = wire_field("c", default=None)

    @property
    def has_events(self) -> bool:
        return bool(self.tokens or self.terminals or self.columns)

    @property
    def all_tokens(self) -> list[Tokens]:
        """All tokens, whichever way they are sent. Raises WireError."""
        rows = self.columns.rows() if self.columns else ()
        return [*self.tokens, *(single_token(*row) for row in rows)]


def single_token(request_id: str, attempt: int, index: int, record: tuple[int, float], text: str) -> Tokens:
    """Return one token of `TokenColumns` as others are sent."""
    packed = RECORD.pack(*record)
    return Tokens(request_id, attempt, index, packed[:4], packed[4:], [text])


def pack_tokens(tokens: Tokens) -> bytes:
    return pack_records(tokens.ids, tokens.logprobs, tokens.top_ids, tokens.top_logprobs)


def terminal_for(request_id: str, why: str, num_tokens: int) -> Terminal:
    """Return the terminal of a request that ended for the reason `why`."""
    if why in FINISHED:
        return Terminal(request_id, why, num_tokens)
    if why in ERRORS:
        kind, text = ERRORS[why]
        return Terminal(request_id, "error", num_tokens, text, kind)
    return Terminal(request_id, "cancelled", num_tokens, f"cancelled: {why}", "cancelled")


def kept_records(end: Terminal, records: bytes) -> bytes:
    """Return what is kept of a request's packed records: of one that failed or was cancelled nothing."""
    return records if end.reason in FINISHED else b""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request, for people: nothing depends on it.

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
    """Events of one request, in order; a field, named after the request, of an entry of the stream
    `timeline`.
    """

    events: list[TimelineEvent] = wire_field("h")


class ChannelSequences:
    """Numbers of the messages that `source` publishes, counted for each channel.

    The last number is repeated until REPEATED_FOR_S after the message, so a subscriber notices that the last
    message was lost.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.last: dict[str, tuple[int, int, float]] = {}  # channel → number, flush, monotonic time

    def next_number(self, channel: str, flush: int = 0) -> int:
        """Return the number, from 1, of the next message on `channel`, which is published with this flush."""
        number = 1 + (self.last[channel][0] if channel in self.last else 0)
        self.last[channel] = number, flush, time.monotonic()
        return number

    def repeated_messages(self, silent_s: float = 0.0) -> Iterator[tuple[str, bytes]]:
        """Yield (channel, payload) of an empty message with the last number, for each channel that had a
        message within REPEATED_FOR_S, but none for `silent_s`.
        """
        now_s = time.monotonic()
        for channel, (number, flush, published_s) in list(self.last.items()):
            if now_s - REPEATED_FOR_S <= published_s <= now_s - silent_s:
                yield channel, encode(Events(self.source, number, flush=flush))
