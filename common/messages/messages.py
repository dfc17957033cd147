"""Every message between processes, and nothing else.

On the wire they are msgpack maps (common/messages/codec.py); token ids are packed
(common/messages/packing.py). They are values; those that are made with every token are not frozen, for that
takes seven times as long.
"""

import struct
from dataclasses import dataclass

from common.messages.codec import WireError, decode, encode, wire_field

__all__ = ["WireError", "decode", "encode"]


TOP_P_MIN = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row chooses its tokens, where that is not plainly the likeliest. Defaults change nothing.

    Applied in this order: logit bias and banned words, repetition, frequency and presence penalties,
    temperature, top-k, top-p, min-p, typical-p; then the choice. The random number for a token is a function
    of (seed, choice, index of the token).

    Attributes:
        temperature: 0 is greedy: the likeliest token after bias and penalties.
        top_k: 0 is off.
        repetition_penalty: over the ids of prompt and generation, as in CTRL (arXiv:1909.05858).
        frequency_penalty, presence_penalty: OpenAI's; over generated ids.
        relative_frequency_penalty: TGI's; times the share of an id in prompt and generation.
        choice: which of the n answers to one request this is.
        logit_bias: (id, what is added to its logit).
        bad_words: packed ids of sequences that must not be completed.
        top_p_decay, top_p_min, top_p_reset_ids: top_p shrinks by this factor with each token, down to its
            minimum, until one of these ids (packed) comes: then it starts again (arXiv:2206.04624).
        raw_logprobs: whether log-probabilities are of the model's own distribution (OpenAI's way) or of the
            processed one (TGI's).
    """

    temperature: float = wire_field("t", default=0.0)
    top_k: int = wire_field("k", default=0)
    top_p: float = wire_field("p", default=1.0)
    min_p: float = wire_field("m", default=0.0)
    typical_p: float = wire_field("y", default=1.0)
    repetition_penalty: float = wire_field("r", default=1.0)
    frequency_penalty: float = wire_field("f", default=0.0)
    presence_penalty: float = wire_field("e", default=0.0)
    relative_frequency_penalty: float = wire_field("l", default=0.0)
    seed: int = wire_field("s", default=0)
    choice: int = wire_field("c", default=0)
    logit_bias: list[tuple[int, float]] = wire_field("b", default_factory=list)
    bad_words: list[bytes] = wire_field("w", default_factory=list)
    top_p_decay: float = wire_field("d", default=1.0)
    top_p_min: float = wire_field("n", default=TOP_P_MIN)
    top_p_reset_ids: bytes = wire_field("i", default=b"")
    raw_logprobs: bool = wire_field("x", default=False)


@dataclass(frozen=True, slots=True)
class Generate:
    """A request as it waits in the stream `requests`; an entry there exists exactly while the request is
    live.

    Attributes:
        digest: of the content; the same id with another digest is refused.
        prompt_ids: packed ids.
        max_new_tokens: the request ends with reason `length` when it has so many.
        min_new_tokens: before it has so many, no end-of-sequence token, stop id or stop string ends it; such
            ids are not sampled.
        stop_ids: packed ids that end it with reason `stop_sequence`.
        top_n_tokens: so many of the likeliest tokens are told with each token.
        prompt_logprobs: the model's own log-probabilities of the prompt's tokens are told, and so many of the
            likeliest at each place; None tells nothing of the prompt.
        sampling: None is greedy, with nothing to change: the path that costs nothing.
        ttl_ms: time to live; the clock starts at the entry's id.
        channel: pub/sub channel of the replies.
        gateway: who asked; its requests are cancelled `grace_ms` after its last sign of life.
        result_ttl_ms: how long the result is kept for whoever polls.
        priority, tenant, trace: service class, payer, W3C trace context.
    """

    request_id: str = wire_field("id")
    digest: str = wire_field("dg")
    prompt_ids: bytes = wire_field("p")
    max_new_tokens: int = wire_field("mx")
    stop: list[str] = wire_field("st", default_factory=list)
    ignore_eos: bool = wire_field("ie", default=False)
    min_new_tokens: int = wire_field("mn", default=0)
    stop_ids: bytes = wire_field("si", default=b"")
    top_n_tokens: int = wire_field("tp", default=0)
    prompt_logprobs: int | None = wire_field("pl", default=None)
    sampling: SamplingParams | None = wire_field("sa", default=None)
    ttl_ms: int = wire_field("tl", default=600_000)
    channel: str = wire_field("ch", default="")
    gateway: str = wire_field("gw", default="")
    grace_ms: int = wire_field("gr", default=0)
    result_ttl_ms: int = wire_field("rt", default=60_000)
    priority: str = wire_field("cl", default="")
    tenant: str = wire_field("tn", default="")
    trace: str = wire_field("tc", default="")

    @property
    def width(self) -> int:
        """`RECORD`s of one token: its own, then one for each of its likeliest tokens."""
        return 1 + self.top_n_tokens

    @property
    def prompt_width(self) -> int:
        """`RECORD`s of one token of the prompt, where they are told."""
        return 1 + (self.prompt_logprobs or 0)


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone, or nobody wants the answer any more."""

    request_id: str = wire_field("id")
    why: str = wire_field("w")


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A launcher saw the end of a worker process: its logs can be sealed without waiting for the heartbeat's
    TTL.
    """

    incarnation: str = wire_field("i")


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row that starts on a worker: one attempt of one request.

    Attributes:
        row: number of the row, unique in the incarnation's life.
        base: index of the first token this attempt samples; the number of records in `shown`.
        shown: packed records (`RECORD`) of the tokens of earlier attempts: facts, never computed again.
        blocks: packed numbers of the KV blocks that the row owns at first.
    """

    row: int = wire_field("r")
    attempt: int = wire_field("a")
    base: int = wire_field("b")
    shown: bytes = wire_field("s")
    blocks: bytes = wire_field("k")
    request: Generate = wire_field("q")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker may do from its next step boundary on; in the stream `plans:{worker}` under the id
    `{epoch}-{number}`.

    Attributes:
        until: the last step granted.
        prefill_tokens: prompt tokens of one step.
        starts: rows that start, in order.
        blocks: (row, packed blocks) that rows own in addition.
        stops: (row, why) of rows asked to stop.
        acknowledged: sequence of the last report taken in; the worker trims its reports up to it.
        takeover: a new batcher asks the worker to stop every row and to answer with a report that says so.
    """

    epoch: int = wire_field("e")
    number: int = wire_field("n")
    until: int = wire_field("u")
    prefill_tokens: int = wire_field("pt")
    starts: list[RowStart] = wire_field("s", default_factory=list)
    blocks: list[tuple[int, bytes]] = wire_field("b", default_factory=list)
    stops: list[tuple[int, str]] = wire_field("x", default_factory=list)
    acknowledged: int = wire_field("k", default=0)
    takeover: bool = wire_field("t", default=False)


@dataclass(frozen=True, slots=True)
class Report:
    """What happened on a worker since its last report; in the stream `reports:{worker}` under the id
    `{sequence}-0`.

    Attributes:
        sequence: number of the flush that carries it; rises, with gaps.
        epoch, plan: the newest plan seen.
        step: the last step completed.
        prefilled: (row, kv_len, step) of rows whose prompt is computed; from `step` on they grow by a token a
            step.
        ended: (row, why, end index, exclusive).
        released: (row, kv_len): the row's blocks may go to others.
        takeover: answer to a plan with `takeover`: nothing is held any more.
    """

    sequence: int = wire_field("q")
    epoch: int = wire_field("e")
    plan: int = wire_field("n")
    step: int = wire_field("s")
    prefilled: list[tuple[int, int, int]] = wire_field("p", default_factory=list)
    ended: list[tuple[int, str, int]] = wire_field("x", default_factory=list)
    released: list[tuple[int, int]] = wire_field("r", default_factory=list)
    takeover: bool = wire_field("t", default=False)


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """A worker's capacity, learnt at warm-up; field `capacity` of the hash `worker:{incarnation}`.

    Attributes:
        model: its name for people; `model_id` is what gateways of other pools find its tokenizer by.
        context: longest sequence of the model, in tokens.
        eos_ids: packed ids that end a generation.
    """

    incarnation: str = wire_field("i")
    name: str = wire_field("nm")
    model: str = wire_field("m")
    dtype: str = wire_field("d")
    block_size: int = wire_field("bs")
    num_blocks: int = wire_field("nb")
    max_batch_prefill_tokens: int = wire_field("pt")
    context: int = wire_field("c")
    eos_ids: bytes = wire_field("eo", default=b"")
    world_size: int = wire_field("w", default=1)
    device: str = wire_field("dv", default="")
    model_id: str = wire_field("mi", default="")

    @property
    def max_total_tokens(self) -> int:
        """Longest request that this worker can hold."""
        return min(self.context, self.num_blocks * self.block_size)


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


RECORD = struct.Struct("<if")
"""An id and its log-probability; `Generate.width` of them are one token in the string `tokens:{request}`, in
order, from index 0.
"""
