"""The door between agent and engine: what goes through it, and nothing else does.

Frames over one stream socket: a 4-byte little-endian length, then a msgpack map. The agent sends `Grant`; the engine sends
`Progress` while it loads, `Ready` once, then one `Step` for each step (and for each boundary at which rows were stopped without a
step). Ids, rows and indices travel as packed little-endian int32, log-probabilities as packed float32.

The engine knows token ids, rows and blocks. It does not know text, requests, attempts, Redis or time limits.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import msgpack

from common.codec import from_map, to_map
from common.messages import Sampling

LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class StartRow:
    """A row that starts: the KV of `ids` is computed (a prefill, in chunks), then tokens `base`, `base + 1`, … are sampled.

    Attributes:
        row: number of the row, unique in this engine's life.
        ids: packed int32; the prompt, then the `base` tokens generated so far.
        base: index of the first token to sample; 0 for a request that starts fresh.
        end: the row ends with reason `length` once it sampled the token of index `end - 1`.
        ignore_eos: whether an end-of-sequence token ends the row.
        min_end: before the row has sampled the token of index `min_end - 1`, ids that would end it are not sampled.
        stop_ids: packed int32; ids that end the row with reason `stop_sequence`.
        top_n: so many of the likeliest tokens are reported with each token.
        prompt_logprobs: the log-probabilities of `ids` but the first are reported, and so many of the likeliest tokens at each place; None
            reports nothing of them.
        sampling: None is greedy, with nothing to change.
        blocks: packed int32; KV blocks, in order, that the row owns at first. Block 0 is scratch and never granted.
    """

    row: int
    ids: bytes
    base: int
    end: int
    ignore_eos: bool
    blocks: bytes
    min_end: int = 0
    stop_ids: bytes = b""
    top_n: int = 0
    prompt_logprobs: int | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What the engine may do from the next step boundary on. Applied in the order stops, blocks, starts.

    Attributes:
        until: the last step that may be run; never smaller than in an earlier grant.
        prefill_tokens: prompt tokens in one step, over all rows; prompts longer than what is left are chunked, in the order of starts.
        starts: rows that start.
        blocks: (row, packed int32 blocks) appended to what the row owns. Unknown rows are ignored: they have ended.
        stops: (row, why): the row takes part in no further step and is reported ended with `why`. Unknown rows are ignored.
    """

    until: int
    prefill_tokens: int
    starts: list[StartRow] = field(default_factory=list)
    blocks: list[tuple[int, bytes]] = field(default_factory=list)
    stops: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Progress:
    """A line for people while the engine loads."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's capacity, learnt at warm-up.

    Attributes:
        num_blocks: blocks that may be granted, numbered 1 to num_blocks.
        max_batch_prefill_tokens: prompt tokens of one step that warm-up found to take 150 ms on CPU.
        context: the model's longest sequence, in tokens.
        eos_ids: packed int32; ids that end a row.
        token_ms: time of one prompt token.
    """

    model: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    max_batch_prefill_tokens: int
    context: int
    eos_ids: bytes
    world_size: int = 1
    token_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought. `rows`, `indices`, `ids` and `logprobs` are parallel: one entry for each sampled token.

    Attributes:
        step: number of the step, counted from 1 in this engine's life; a boundary without a step repeats the last number, and so does a
            sign of life, every five seconds at least, while rows wait that no step can hold.
        rows, indices, ids: packed int32; which row, the token's index in its generation, the token.
        logprobs: packed float32; natural logarithm of the token's probability.
        tops: (entry in those lists, packed int32 ids, packed float32 log-probabilities): the `top_n` likeliest tokens, likeliest first;
            -inf for those that truncation left out.
        prompts: of rows that ask for it, each chunk in the step that computed it: (row, position of the first token told of, packed float32
            log-probabilities of the tokens from there on, each given those before it and as the model has them, packed int32 ids and packed
            float32 log-probabilities of the `prompt_logprobs` likeliest tokens in place of each, likeliest first).
        prefilled: (row, kv_len) of rows whose prefill this step completed.
        ended: (row, why, end index, exclusive). `length`, `eos_token` and `stop_sequence` (a stop id) are the engine's own words,
            others repeat a stop's `why`.
        released: (row, kv_len): the last launched step that held the row is over; its blocks may be granted to others.
        duration_ms: of the step.
    """

    step: int
    rows: bytes = b""
    indices: bytes = b""
    ids: bytes = b""
    logprobs: bytes = b""
    tops: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prompts: list[tuple[int, int, bytes, bytes, bytes]] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The engine cannot serve. `setting` names the setting at fault, empty for a crash."""

    setting: str
    cause: str


Frame = Grant | Progress | Ready | Step | Failure
KINDS: dict[str, type[Frame]] = {"grant": Grant, "progress": Progress, "ready": Ready, "step": Step, "failure": Failure}
NAMES = {cls: name for name, cls in KINDS.items()}


def plain(value: Any) -> Any:
    if isinstance(value, StartRow):
        row = {name: getattr(value, name) for name in StartRow.__slots__}
        return row | ({"sampling": to_map(value.sampling)} if value.sampling else {})
    return [plain(item) for item in value] if isinstance(value, list) and value and isinstance(value[0], StartRow) else value


def encode(frame: Frame) -> bytes:
    """The bytes of one frame, length included."""
    body = {name: plain(getattr(frame, name)) for name in type(frame).__slots__}
    data: bytes = msgpack.packb([NAMES[type(frame)], body])
    return LENGTH.pack(len(data)) + data


def start_row(body: dict[str, Any]) -> StartRow:
    sampling = body.pop("sampling")
    return StartRow(**body, sampling=sampling and from_map(Sampling, sampling))


def decode(data: bytes | memoryview) -> Frame:
    """One frame from its bytes, length excluded. Both ends come from one checkout, so a frame is trusted."""
    name, body = msgpack.unpackb(data)
    for key in ("tops", "prompts", "prefilled", "ended", "released", "blocks", "stops"):
        if key in body:
            body[key] = [tuple(item) for item in body[key]]
    if "starts" in body:
        body["starts"] = [start_row(start) for start in body["starts"]]
    return KINDS[name](**body)
