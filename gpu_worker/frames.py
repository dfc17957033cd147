"""Frames as bytes: a msgpack array of a frame's name and its fields, in order."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import msgpack

from common.messages.codec import decode as from_bytes
from common.messages.codec import encode as to_bytes
from common.messages.plan import Plan, WorkerCapacity
from gpu_worker.protocol import Frame, ProtocolError

MAX_FIELD_BYTES = 2**28
"""The longest text or packed field of a frame: incomplete ones are kept in memory."""


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
