"""The protocol between agent and engine: frames on one stream socket, the only contact of the two.

The engine knows token ids, rows and blocks. It does not know text, requests, attempts, Redis or time limits.
The stop strings of a beam search are the exception: which beams go on depends on them, so the engine finds
them with the model's tokenizer.

A frame is a msgpack array: its name, then its fields in order. The agent sends `Grant`s; the engine sends
`LoadProgress` while it loads, `Ready` once, then one `StepResult` for each step (and for each boundary at
which rows were stopped without a step), or `EngineFailure`. A preloaded engine waits for `Begin` after its
first `LoadProgress`. `Sleep`, `Asleep`, `WakeUp` and `Ready` follow each other where a worker has several
models. Each `LoadAdapter` and `UnloadAdapter` has one answer, in their order. Ids and blocks are packed
little-endian int32, log-probabilities packed float32.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.messages.request import BeamParams, PoolingParams, SamplingParams, StoppingParams

SAMPLE = struct.Struct("<iiif")
"""A sampled token: row, index in its generation, id, natural logarithm of its probability."""
MAX_FRAME_LOGITS = 2**24
"""Bytes of logits in one frame, at most, unless one position has more."""


class ProtocolError(ValueError):
    """The bytes received are not a frame."""


class PeerClosed(Exception):
    """The agent has closed the socket."""


class WorkerEnds(PeerClosed):
    """The agent has said that the worker ends in order."""


class ModelSleeps(Exception):
    """The agent has said that the model is not needed for now."""


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
        beams: the row is a beam search; `base` is 0. It has `num_group_blocks` (common/messages/records.py),
            takes `width` places of a step, and brings no samples: its sequences come with its end.
        adapter: name of the LoRA adapter with which it is computed; empty for the model alone. A row with an
            adapter that is not loaded is reported ended with `adapter`.
        pictures: (position in `ids` of its first placeholder, number of placeholders, SHA-256 of its bytes,
            its bytes) of each picture that has a token after `num_cached`, or of all (Ready.all_pictures).
        pooling: the row ends with its prompt, and `logits` has the values of its vector; None for others.
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
    adapter: str = ""
    pictures: Sequence[tuple[int, int, str, bytes]] = ()
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What the engine may do from the next step boundary on. Applied in the order stops, blocks, starts.

    Attributes:
        until: the last step that may be run; never smaller than in an earlier grant.
        prefill_tokens: prompt tokens in one step, over all rows; longer prompts are chunked.
        mixed_prefill_tokens: the same in a step in which rows decode, too (0: as many).
        may_exceed: `mixed_prefill_tokens` may be exceeded for prompts that come together.
        bulk_tokens: tokens of prompts of the class `batch` that a step may have in any case, while more
            urgent requests come; 0 sets no bound.
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
    bulk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Rows that start after it may name this LoRA adapter. The engine answers `AdapterLoaded` or
    `AdapterRefused`. If there was an adapter of that name, the new one takes its place, unless it is refused;
    rows that have started go on with the one that they have.

    Attributes:
        path: folder with `adapter_config.json` and `adapter_model.safetensors`, on each machine of it.
    """

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Rows that start after it cannot name this adapter; rows that have it go on. The engine answers
    `AdapterUnloaded`, also if there is no such adapter.
    """

    name: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """Rows may name the adapter.

    Attributes:
        rank: the largest of its matrices.
        num_bytes: what it takes in memory, on one rank of the worker.
    """

    name: str
    rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterRefused:
    """The adapter cannot be served; `cause` says why, and begins without a capital."""

    name: str
    cause: str


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """No row can name the adapter any more."""

    name: str


@dataclass(frozen=True, slots=True)
class Begin:
    """The variables with which a preloaded engine starts."""

    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class End:
    """The worker ends in order; ranks on other machines are told so, and end, too."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """The model is not needed: the engine, which holds no row, gives up its cache and the memory of its GPU,
    and keeps the weights in memory of the host. It answers `Asleep`.
    """


@dataclass(frozen=True, slots=True)
class Asleep:
    """The engine sleeps until it gets `WakeUp`."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """The model is needed again. The engine answers `Ready`; its cache may have fewer blocks than before."""


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
        vocab_size: logits of one position, or values of a vector.
        max_loras: adapters that the rows of one step may have; 0: the engine takes no adapters.
        max_lora_rank: largest rank of an adapter.
        max_cpu_loras: adapters whose weights it keeps in memory of the host; it reads others again.
        pictures: whether rows may have pictures.
        all_pictures: rows have those among cached tokens, too: the positions after them depend on their
            sizes.
        max_rows: rows that may run at a time, as far as their states have room; 0 in a model without states.
        pooling: as in WorkerCapacity.
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
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    pictures: bool = False
    all_pictures: bool = False
    max_rows: int = 0
    pooling: str = ""


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
        prefill_tokens: tokens of prompts that the step computed.
        proposals: (method, number of tokens, number of right ones) of each row that had any.
        logits: (row, first position, little-endian values of the positions from there on) of rows that return
            logits: the model's own.
        num_beams: beams of which the step computed a token.
        sequences: (row, packed sequences of common/messages/records.py) of beam searches that have ended.
        snapshots: as in Report.
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
    proposals: Sequence[tuple[str, int, int]] = ()
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
    snapshots: Sequence[int] = ()

    @property
    def proposed_tokens(self) -> int:
        """Proposals that the step has checked."""
        return sum(number for _, number, _ in self.proposals)

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


Command = Grant | LoadAdapter | UnloadAdapter
"""What the engine obeys between two steps."""
AdapterAnswer = AdapterLoaded | AdapterRefused | AdapterUnloaded
Frame = (
    Begin
    | End
    | Command
    | AdapterAnswer
    | Sleep
    | Asleep
    | WakeUp
    | LoadProgress
    | Ready
    | StepResult
    | EngineFailure
)


def first_cause(*causes: tuple[object, str]) -> str:
    """The first cause that applies, of pairs (whether it applies, the cause); empty if none does."""
    return next((cause for applies, cause in causes if applies), "")
