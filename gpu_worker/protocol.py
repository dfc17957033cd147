"""The protocol between agent and engine: frames on one stream socket, the only contact of the two.

The engine knows token ids, rows and blocks. It does not know text, requests, attempts, Redis or time limits.
The stop strings of a beam search are the exception: which beams go on depends on them, so the engine finds
them with the model's tokenizer.

A frame is a msgpack array: its name, then its fields in order. The agent sends `Grant`s; the engine sends
`LoadProgress` while it loads, `Ready` once, then one `StepResult` for each step (and for each boundary at
which rows were stopped without a step), or `EngineFailure`. A preloaded engine waits for `Begin` after its
first `LoadProgress`. Ids and blocks are packed little-endian int32, log-probabilities packed float32.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from common.messages.codec import decode as from_bytes
from common.messages.codec import encode as to_bytes
from common.messages.request import BeamParams, SamplingParams, StoppingParams

SAMPLE = struct.Struct("<iiif")
"""A sampled token: row, index in its generation, id, natural logarithm of its probability."""
MAX_FIELD_BYTES = 2**28
"""The longest text or packed field of a frame: incomplete ones are kept in memory."""
MAX_FRAME_LOGITS = 2**24
"""Bytes of logits in one frame, at most, unless one position has more."""


class ProtocolError(ValueError):
    """The bytes received are not a frame."""


class PeerClosed(Exception):
    """The agent has closed the socket."""


class WorkerEnds(PeerClosed):
    """The agent has said that the worker ends in order."""


class UnservableModel(Exception):
    """The model needs something that the engine does not have; the message says what. Settings that cannot be
    served raise SettingError instead.
    """


@dataclass(frozen=True, slots=True)
class StartRow:
    """A row that starts: the KV of `ids` is computed in chunks, then tokens `base`, `base + 1` … are sampled.

    Attributes:
        row: number of the row, unique in this engine's life.
        ids: packed int32; the prompt, then the `base` tokens generated so far.
        base: index of the first token to sample; 0 for a request that starts fresh.
        blocks: packed int32; KV blocks that the row has at first, in order; never block 0, which is scratch.
        stopping: when the row ends; the engine ignores stop strings, but for a beam search.
        sampling: None is greedy without penalties.
        top_n_tokens: how many of the likeliest tokens are reported with each token.
        prompt_logprobs: reports the log-probabilities of `ids` but the first, and this many of the likeliest
            tokens in each place; None reports nothing of the prompt.
        num_cached: tokens, fewer than all, whose KV the first blocks hold already; nothing is written there.
        class_index: the lower, the sooner its prompt is computed.
        logits: (first position, end, dtype) of those whose logits are returned; None returns none.
        beams: the row is a beam search; `base` is 0. It has `num_group_blocks` (common/messages/beams.py),
            takes `width` places of a step, and brings no samples: its sequences come with its end.
    """

    row: int
    ids: bytes
    base: int
    blocks: bytes
    stopping: StoppingParams
    sampling: SamplingParams | None = None
    top_n_tokens: int = 0
    prompt_logprobs: int | None = None
    num_cached: int = 0
    class_index: int = 0
    logits: tuple[int, int, str] | None = None
    beams: BeamParams | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What the engine may do from the next step boundary on. Applied in the order stops, blocks, starts.

    Attributes:
        until: the last step that may be run; never smaller than in an earlier grant.
        prefill_tokens: prompt tokens in one step, over all rows; longer prompts are chunked.
        mixed_prefill_tokens: the same in a step in which rows decode, too (0: as many).
        may_exceed: `mixed_prefill_tokens` may be exceeded for prompts that come together.
        max_rows: places in one step, taken by the first rows that have not ended (0: no bound). A row has
            one place, a beam search one for each beam.
        starts: rows that start; one that has its last token already is reported ended.
        blocks: (row, packed int32 blocks) appended to what the row has; ignored if it has ended.
        stops: (row, why): the row takes part in no further step and is reported ended with `why`.
    """

    until: int
    prefill_tokens: int
    starts: Sequence[StartRow] = ()
    blocks: Sequence[tuple[int, bytes]] = ()
    stops: Sequence[tuple[int, str]] = ()
    mixed_prefill_tokens: int = 0
    max_rows: int = 0
    may_exceed: bool = False


@dataclass(frozen=True, slots=True)
class Begin:
    """The variables with which a preloaded engine starts."""

    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class End:
    """The worker ends in order; ranks on other machines are told so, and end, too."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A line to log while the engine loads."""

    text: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's capacity, learnt at warm-up.

    Attributes:
        num_blocks: blocks that may be granted, numbered 1 to num_blocks.
        max_batch_prefill_tokens: most prompt tokens of one step, by the times of the warm-up.
        context: the model's longest sequence, in tokens.
        eos_ids: packed int32; ids that end a row.
        token_ms: time of one prompt token.
        prefix_caching: whether rows may start with blocks that other rows have computed.
        vocab_size: logits of one position.
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
    prefix_caching: bool = False
    vocab_size: int = 0


@dataclass(slots=True)
class StepResult:
    """What one step brought. Not frozen: there may be one a token, and making it would take seven times as
    long.

    Attributes:
        step: number of the step, counted from 1 in this engine's life. A boundary without a step repeats the
            last number; so does a keepalive, every five seconds while rows wait and no step can run.
        samples: packed `SAMPLE`s, one for each sampled token.
        top_logprobs: (place among the samples, packed int32 ids, packed float32 log-probabilities) of the
            `top_n_tokens` likeliest tokens, likeliest first; -inf for those that truncation excludes.
        prompt_logprobs: of rows that ask for them, each chunk in the step that computed it: (row, position of
            its first token, packed float32 log-probabilities of the tokens from there on, each given those
            before it, without penalties or temperature, packed int32 ids and packed float32 log-probabilities
            of the `prompt_logprobs` likeliest tokens in place of each, likeliest first).
        prefilled: (row, kv_len) of rows whose prefill this step completed.
        ended: (row, why, end index, exclusive). `length`, `eos_token` and `stop_sequence` (a stop id) are
            decided by the engine, others repeat a stop's `why`.
        released: (row, kv_len): the last launched step that held the row is over. A beam search had computed
            `kv_len` tokens, those of all beams.
        prefill_tokens, proposed_tokens: tokens of prompts, and proposals, that the step computed.
        logits: (row, first position, little-endian values of the positions from there on) of rows that return
            logits: the model's own.
        num_beams: beams of which the step computed a token.
        sequences: (row, packed sequences of common/messages/beams.py) of beam searches that have ended.
    """

    step: int
    samples: bytes = b""
    top_logprobs: Sequence[tuple[int, bytes, bytes]] = ()
    prompt_logprobs: Sequence[tuple[int, int, bytes, bytes, bytes]] = ()
    prefilled: Sequence[tuple[int, int]] = ()
    ended: Sequence[tuple[int, str, int]] = ()
    released: Sequence[tuple[int, int]] = ()
    duration_ms: float = 0.0
    prefill_tokens: int = 0
    proposed_tokens: int = 0
    logits: Sequence[tuple[int, int, bytes]] = ()

    @property
    def frames(self) -> Iterator["StepResult"]:
        """Yield the result in frames of bounded length. Most of its logits come before it, in results that
        have nothing else and the number of the step before.
        """
        pieces: list[tuple[int, int, bytes]] = []
        num_bytes = 0
        for piece in self.logits:
            if pieces and num_bytes + len(piece[2]) > MAX_FRAME_LOGITS:
                yield StepResult(self.step - 1, logits=pieces)
                pieces, num_bytes = [], 0
            pieces.append(piece)
            num_bytes += len(piece[2])
        self.logits = pieces
        yield self

    num_beams: int = 0
    sequences: Sequence[tuple[int, bytes]] = ()

    @property
    def num_samples(self) -> int:
        return len(self.samples) // SAMPLE.size

    @property
    def sampled(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield row, index, id and log-probability of each sampled token."""
        return SAMPLE.iter_unpack(self.samples)


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """The engine cannot serve. `setting` is the cause; empty for a crash."""

    setting: str
    cause: str


Frame = Begin | End | Grant | LoadProgress | Ready | StepResult | EngineFailure
NAMES: dict[type[Frame], str] = {
    Begin: "begin",
    End: "end",
    Grant: "grant",
    LoadProgress: "progress",
    Ready: "ready",
    StepResult: "step",
    EngineFailure: "failure",
}


def encode(frame: Frame) -> bytes:
    """Encode one frame."""
    data: bytes = PACKER.pack([NAMES[type(frame)], *field_values(frame)])
    return data


def field_values(value: Any) -> list[Any]:
    return [getattr(value, name) for name in type(value).__slots__]


def pack_value(value: Any) -> Any:
    """Pack a value inside a frame that msgpack does not know."""
    return to_bytes(value) if isinstance(value, SamplingParams) else field_values(value)


PACKER = msgpack.Packer(default=pack_value)


class FrameDecoder:
    """Decodes frames from bytes that are fed as they arrive. Iteration yields each complete frame once."""

    def __init__(self, max_field_bytes: int = MAX_FIELD_BYTES) -> None:
        self.max_field_bytes = max_field_bytes
        self.unpacker = msgpack.Unpacker(use_list=False, max_buffer_size=max_field_bytes)

    def feed(self, data: bytes) -> None:
        """Take received bytes. Raises ProtocolError for a field that is too long."""
        try:
            self.unpacker.feed(data)
        except msgpack.BufferFull as error:
            raise ProtocolError(f"a field of a frame has more than {self.max_field_bytes} bytes") from error

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        """Raises ProtocolError for bytes that are not a frame; nothing after them can be decoded."""
        try:
            name, *values = next(self.unpacker)
            return CONSTRUCTORS[name](*values)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ProtocolError(f"not a frame: {type(error).__name__}: {error}") from error


def make_grant(until: int, prefill_tokens: int, starts: Sequence[Any], *others: Any) -> Grant:
    return Grant(until, prefill_tokens, tuple(make_start_row(*start) for start in starts), *others)


def make_start_row(*values: Any) -> StartRow:
    row, ids, base, blocks, stopping, sampling, *others = values
    limits: list[Any] = [[*value] if isinstance(value, tuple) else value for value in stopping]
    sampling = sampling and from_bytes(SamplingParams, sampling)
    others[-1] = others[-1] and BeamParams(*others[-1])
    return StartRow(row, ids, base, blocks, StoppingParams(*limits), sampling, *others)


CONSTRUCTORS: dict[str, Callable[..., Frame]] = {name: kind for kind, name in NAMES.items()} | {
    "grant": make_grant
}
"""By the name of a frame; they take its fields, which are trusted: both ends come from one checkout."""


def first_cause(*causes: tuple[object, str]) -> str:
    """The first cause that applies, of pairs (whether it applies, the cause); empty if none does."""
    return next((cause for applies, cause in causes if applies), "")
