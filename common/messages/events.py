"""Messages about tokens: from workers and the batcher to gateways, and in the logs of workers."""

from dataclasses import dataclass

from common.messages.codec import wire_field


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens of one request.

    Attributes:
        index: of the first token, counted from 0 over all attempts.
        ids, logprobs: packed int32 and float32, of equal length.
        top_ids, top_logprobs: of the likeliest tokens, likeliest first; `top_n_tokens` of them for each
            token.
        texts: what each token adds to the text; empty in logs, where only ids count.
        since_start_ms: with the request's first token, the time since this worker was handed it; else 0.
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


@dataclass(frozen=True, slots=True)
class Terminal:
    """The one end of a request. `reason` is `length`, `eos_token`, `stop_sequence`, `cancelled` or `error`.

    Attributes:
        num_tokens: generated tokens in all; a gateway that has fewer fills the gap first.
        error, error_type: for reason `error`.
    """

    request_id: str = wire_field("id")
    reason: str = wire_field("w")
    num_tokens: int = wire_field("n")
    error: str = wire_field("e", default="")
    error_type: str = wire_field("y", default="")


@dataclass(slots=True)
class Events:
    """One pub/sub message to a gateway.

    Attributes:
        source: incarnation of the worker, or the batcher, that speaks.
        sequence: of this source on this channel; a message without tokens and terminals only repeats the last
            one, so that a lost last message shows.
    """

    source: str = wire_field("s")
    sequence: int = wire_field("q")
    tokens: list[Tokens] = wire_field("t", default_factory=list)
    terminals: list[Terminal] = wire_field("x", default_factory=list)


@dataclass(slots=True)
class LogEntry:
    """The ids of one flush; in the stream `log:{worker}` under the id `{sequence}-0`."""

    tokens: list[Tokens] = wire_field("t")
