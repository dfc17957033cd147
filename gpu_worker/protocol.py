"""The protocol between agent and engine: frames on one stream socket, the only contact of the two.

The engine knows token ids, rows and blocks. It does not know text, requests, attempts, Redis or time limits.
The stop strings of a beam search are the exception: which beams go on depends on them, so the engine finds
them with the model's tokenizer.

A frame is a msgpack array: its name, then its fields in order. The agent sends the batcher's `Plan`s, with
the bytes of pictures; the engine sends `LoadProgress` while it loads, its `WorkerCapacity` once, then one
`StepResult` for each step (and for each boundary at which rows were stopped without a step), or
`EngineFailure`. A forked engine waits for `Begin` first. `Sleep`, `Asleep`,
`WakeUp` and `WorkerCapacity` follow each other where a worker has several models. Each `SetAdapter` has one
answer, in their order. Ids and blocks are packed little-endian int32,
log-probabilities packed float32.

No torch is imported here, so that an engine can report to its agent before it has imported the rest.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, get_args

import msgpack
import numpy as np

from common.messages.codec import decode as from_bytes
from common.messages.codec import encode as to_bytes
from common.messages.plan import Plan, WorkerCapacity

SAMPLE = struct.Struct("<iiif")
"""A sampled token: row, index in its generation, id, natural logarithm of its probability."""
SAMPLE_DTYPE = np.dtype([("row", "<i4"), ("index", "<i4"), ("id", "<i4"), ("logprob", "<f4")])


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
class SetAdapter:
    """Rows that start after it may name this LoRA adapter, or cannot any more. The engine answers
    `AdapterAnswer`. If there was an adapter of that name, the new one takes its place, unless it is refused;
    rows that have started go on with the one that they have.

    Attributes:
        path: folder with `adapter_config.json` and `adapter_model.safetensors`; empty: the adapter is
            unloaded.
        source: its folder, or its hub id, by which ranks on other machines find it.
        digest: of its files, which must be the same there.
    """

    name: str
    path: str = ""
    source: str = ""
    digest: str = ""


@dataclass(frozen=True, slots=True)
class AdapterAnswer:
    """A `SetAdapter` was obeyed: rows may name the adapter, or cannot any more. With a
    `cause`, which begins without a capital, the adapter cannot be served.
    """

    name: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """The variables with which a forked engine starts."""

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
    """The model is needed again. The engine answers its `WorkerCapacity`: its cache may have fewer blocks
    than before.
    """


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A line to log while the engine loads."""

    text: str


@dataclass(slots=True)
class StepResult:
    """What one step brought. The engine fills it as its rows go on; the agent has tuples in place of lists.

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
        num_encoded: units of pictures that were encoded: the next step may go on behind them.
    """

    step: int
    samples: bytes | bytearray = field(default_factory=bytearray)
    top_logprobs: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int, bytes, bytes, bytes]] = field(default_factory=list)
    prefilled: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, str, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
    duration_ms: float = 0.0
    prefill_tokens: int = 0
    proposals: list[tuple[str, int, int]] = field(default_factory=list)
    logits: list[tuple[int, int, bytes]] = field(default_factory=list)
    num_beams: int = 0
    sequences: list[tuple[int, bytes]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    num_encoded: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sampled or encoded, and no row has ended or was released."""
        return not (self.samples or self.ended or self.released or self.num_encoded)

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


Command = Plan | SetAdapter
"""What the engine obeys between two steps."""
Frame = (
    Begin
    | End
    | Command
    | AdapterAnswer
    | Sleep
    | Asleep
    | WakeUp
    | LoadProgress
    | WorkerCapacity
    | StepResult
    | EngineFailure
)


def first_cause(*causes: tuple[object, str]) -> str:
    """The first cause that applies, of pairs (whether it applies, the cause); empty if none does."""
    return next((cause for applies, cause in causes if applies), "")


def refuse(kind: Callable[[str], Exception], *causes: tuple[object, str]) -> None:
    """Raises an error of this kind with the first cause that applies, if one does."""
    if cause := first_cause(*causes):
        raise kind(cause)


def first_line(error: Exception) -> str:
    """The first line of what an error says; its type if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


MAX_FIELD_BYTES = 2**31 - 1
"""The longest text or packed field of a frame: a plan has the bytes of pictures."""


def encode(frame: Frame) -> bytes:
    """Encode one frame. Messages that Redis has, too, are one field, as there."""
    kind: type[Frame] = type(frame)
    is_message = isinstance(frame, Plan | WorkerCapacity)
    fields = [to_bytes(frame)] if is_message else [getattr(frame, name) for name in kind.__slots__]
    data: bytes = PACKER.pack([kind.__name__, *fields])
    return data


PACKER = msgpack.Packer()


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


CONSTRUCTORS: dict[str, Callable[..., Frame]] = {kind.__name__: kind for kind in get_args(Frame)} | {
    kind.__name__: partial(from_bytes, kind) for kind in (Plan, WorkerCapacity)
}
"""By the name of a frame; they take its fields, which are trusted: both ends come from one checkout."""


Received = TypeVar("Received", bound=Frame)

RECEIVE_BYTES = 2**18


class AgentLink:
    """Sends and receives frames over a blocking socket: an engine that is too far ahead of its agent waits in
    `send`.

    Attributes:
        sending: held while a frame is sent; the thread that learns of a lost rank may send one.
        woken, waker: the two ends of a pipe; a byte in it ends the wait for grants.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(True)
        self.channel = channel
        self.frames = FrameDecoder()
        self.sending = threading.Lock()
        woken, waker = socket.socketpair()
        woken.setblocking(False)
        waker.setblocking(False)
        self.woken = woken
        self.waker = waker

    def send(self, *frames: Frame) -> None:
        """Raises PeerClosed."""
        try:
            with self.sending:
                self.channel.sendall(b"".join(map(encode, frames)))
        except ConnectionError as error:
            raise PeerClosed from error

    def wake(self) -> None:
        """End the wait for grants, or the next wait if none has begun. Any thread may call it."""
        with contextlib.suppress(BlockingIOError):  # a full pipe ends the wait, too
            self.waker.send(b"\0")

    def commands(self, wait_s: float) -> Iterator[Command]:
        """Yield all commands that have arrived, in order. Wait for the first up to `wait_s`, or until `wake`
        is called. Raises PeerClosed, WorkerEnds, ModelSleeps.
        """
        while self.read(wait_s):
            for frame in self.frames:
                wait_s = 0.0
                if isinstance(frame, End):
                    raise WorkerEnds
                if isinstance(frame, Sleep):
                    raise ModelSleeps
                assert isinstance(frame, Command)
                yield frame

    def receive(self, kind: type[Received]) -> Received:
        """Wait for a frame of this kind, such as the variables of a forked engine. Raises PeerClosed."""
        while True:
            self.read(None)
            for frame in self.frames:
                assert isinstance(frame, kind)
                return frame

    def read(self, wait_s: float | None) -> bool:
        """Read bytes that have arrived → whether there were any. `wait_s` None waits without an end. Raises
        PeerClosed.
        """
        readable = select.select([self.channel, self.woken], [], [], wait_s)[0]
        if self.woken in readable:
            self.woken.recv(RECEIVE_BYTES)
        if self.channel not in readable:
            return False
        try:
            data = self.channel.recv(RECEIVE_BYTES)
        except ConnectionError as error:
            raise PeerClosed from error
        if not data:
            raise PeerClosed
        self.frames.feed(data)
        return True
