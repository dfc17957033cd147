"""Event messages: tokens and terminals, on their way to gateways and in the logs of workers."""

from dataclasses import dataclass

from common.messages.codec import wire_field


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


@dataclass(frozen=True, slots=True)
class Terminal:
    """The one end of a request. `reason` is `length`, `eos_token`, `stop_sequence`, `cancelled` or `error`.

    Attributes:
        num_tokens: number of generated tokens; a gateway that has fewer fills the gap first.
        error, error_type: with reason `error` or `cancelled`.
    """

    request_id: str = wire_field("id")
    reason: str = wire_field("w")
    num_tokens: int = wire_field("n")
    error: str = wire_field("e", default="")
    error_type: str = wire_field("y", default="")


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
    """

    source: str = wire_field("s")
    sequence: int = wire_field("q")
    tokens: list[Tokens] = wire_field("t", default_factory=list)
    terminals: list[Terminal] = wire_field("x", default_factory=list)
    flush: int = wire_field("f", default=0)
