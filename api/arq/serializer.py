"""What stands in arq's keys: msgpack, never pickle, whoever wrote it."""

from collections.abc import Callable
from typing import Any

import msgpack

Packed = dict[str, Any]
LAST_MS = 32_503_680_000_000
"""The year 3000: arq makes a date of a time in ms."""


def pack(data: Packed) -> bytes:
    """A job or its result; an exception is told in words."""
    packed: bytes = msgpack.packb(data, default=in_words)
    return packed


def in_words(thing: object) -> str:
    if isinstance(thing, BaseException):
        return str(thing) or type(thing).__name__
    raise TypeError(f"{type(thing).__name__} is nothing that msgpack knows")


def unpacking(max_bytes: int) -> Callable[[bytes], Packed]:
    """Reads jobs: raises ValueError, or an error of msgpack, for what is no job as arq writes it."""

    def unpack(data: bytes) -> Packed:
        if len(data) > max_bytes:
            raise ValueError(f"the job is larger than {max_bytes} bytes")
        job = msgpack.unpackb(data)
        if not isinstance(job, dict) or not is_job(job):
            raise ValueError("this is no job")
        return job

    return unpack


def is_job(job: Packed) -> bool:
    """Whether arq can work with it: function, arguments, named arguments, try, time of its queueing."""
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
