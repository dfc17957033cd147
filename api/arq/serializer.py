"""Serializer of arq's jobs and results: msgpack, never pickle, because anybody may have written the keys."""

from collections.abc import Callable
from typing import Any

import msgpack

Packed = dict[str, Any]
LAST_MS = 32_503_680_000_000
"""The year 3000: arq makes a date of a time in ms."""


def pack(data: Packed) -> bytes:
    """Serialise a job or its result; an exception becomes its text."""
    packed: bytes = msgpack.packb(data, default=exception_text)
    return packed


def exception_text(value: object) -> str:
    if isinstance(value, BaseException):
        return str(value) or type(value).__name__
    raise TypeError(f"msgpack cannot serialise {type(value).__name__}")


def make_unpack(max_bytes: int) -> Callable[[bytes], Packed]:
    """A function that reads jobs. It raises ValueError, or an error of msgpack, for anything that arq would
    not write.
    """

    def unpack(data: bytes) -> Packed:
        if len(data) > max_bytes:
            raise ValueError(f"the job is larger than {max_bytes} bytes")
        job = msgpack.unpackb(data)
        if not isinstance(job, dict) or not is_job(job):
            raise ValueError("not a job")
        return job

    return unpack


def is_job(job: Packed) -> bool:
    """Whether arq can run it: name, arguments, keyword arguments, number of tries, time of queueing."""
    name, args, kwargs, tries, queued_ms = (job.get(key) for key in ("f", "a", "k", "t", "et"))
    named = isinstance(kwargs, dict) and all(isinstance(key, str) for key in kwargs)
    counted = tries is None or (type(tries) is int and 0 <= tries < 2**31)
    return (
        isinstance(name, str)
        and isinstance(args, list)
        and named
        and counted
        and type(queued_ms) is int
        and 0 <= queued_ms < LAST_MS
    )
