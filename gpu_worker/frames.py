"""Frames as bytes: a msgpack array of a frame's name and its fields, in order."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

from common.messages.codec import decode as from_bytes
from common.messages.codec import encode as to_bytes
from common.messages.request import BeamParams, PoolingParams, SamplingParams, StoppingParams
from gpu_worker.protocol import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    Asleep,
    Begin,
    End,
    EngineFailure,
    Frame,
    Grant,
    LoadAdapter,
    LoadProgress,
    ProtocolError,
    Ready,
    Sleep,
    StartRow,
    StepResult,
    UnloadAdapter,
    WakeUp,
)

MAX_FIELD_BYTES = 2**28
"""The longest text or packed field of a frame: incomplete ones are kept in memory."""
NAMES: dict[type[Frame], str] = {
    Begin: "begin",
    End: "end",
    Grant: "grant",
    Sleep: "sleep",
    Asleep: "asleep",
    WakeUp: "wake_up",
    LoadProgress: "progress",
    Ready: "ready",
    StepResult: "step",
    EngineFailure: "failure",
    LoadAdapter: "load_adapter",
    UnloadAdapter: "unload_adapter",
    AdapterLoaded: "adapter_loaded",
    AdapterRefused: "adapter_refused",
    AdapterUnloaded: "adapter_unloaded",
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
    row, ids, base, blocks, stopping, sampling, *others, beams, adapter, pictures, pooling = values
    limits: list[Any] = [[*value] if isinstance(value, tuple) else value for value in stopping]
    sampling = sampling and from_bytes(SamplingParams, sampling)
    others += [beams and BeamParams(*beams), adapter, pictures, pooling and PoolingParams(*pooling)]
    return StartRow(row, ids, base, blocks, StoppingParams(*limits), sampling, *others)


CONSTRUCTORS: dict[str, Callable[..., Frame]] = {name: kind for kind, name in NAMES.items()} | {
    "grant": make_grant
}
"""By the name of a frame; they take its fields, which are trusted: both ends come from one checkout."""
