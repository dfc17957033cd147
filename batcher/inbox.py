"""Inbox: reads requests, control messages and the reports of every worker with one XREAD.

The next entries are asked for before what came last is acted upon: they come while plans are written.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

MAX_ENTRIES = 256
"""Entries of each stream in one read."""
LATE_S = 2.0
"""A read that waited so much longer than it was told to is given up: the broker ends waits by its own clock,
which may have gone back.
"""


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One stream entry. The first of its `fields` is named after the kind of message."""

    stream: str
    id: str
    fields: dict[bytes, bytes]

    @property
    def kind(self) -> str:
        return next(iter(self.fields), b"").decode(errors="replace")

    @property
    def data(self) -> bytes:
        return next(iter(self.fields.values()), b"")


Answer = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]
"""What the broker says to XREAD."""


class Inbox:
    """The streams that are followed, and the last id taken from each.

    Attributes:
        unhandled: entries that were read and not taken.
        reading: the read that was asked for, until its entries are `unhandled`.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.last_ids: dict[str, str] = {}
        self.unhandled: deque[StreamEntry] = deque()
        self.reading: asyncio.Task[Answer] | None = None

    def follow(self, stream: str, after: str = "0") -> None:
        """Read `stream` from the entry behind `after` on; no change if it is followed already."""
        if stream not in self.last_ids:
            self.last_ids[stream] = after
            self.close()  # what is asked for lacks this stream

    def unfollow(self, stream: str) -> None:
        self.last_ids.pop(stream, None)

    def close(self) -> None:
        """Give up what was asked for: the next read brings it."""
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    def read_ahead(self, wait_ms: int) -> None:
        """Ask for new entries if all that were read are taken; the broker waits up to `wait_ms` for one."""
        if self.reading is None and not self.unhandled:
            self.reading = asyncio.create_task(self.read(wait_ms))

    async def fill(self, waits: bool, beside: Collection[asyncio.Task[Any]] = ()) -> None:
        """Take over what was asked for. With `waits`, wait until it has come, or one of the tasks `beside` is
        done.
        """
        if (reading := self.reading) is None:
            return
        if waits:
            await asyncio.wait([reading, *beside], return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and reading is self.reading:
            self.reading = None
            self.unhandled.extend(self.entries(reading.result()))

    def take(self, seconds: float) -> Iterator[StreamEntry]:
        """Yield the entries that were read; after `seconds` the rest stays for the next call."""
        end_s = time.monotonic() + seconds
        while self.unhandled and time.monotonic() < end_s:
            yield self.unhandled.popleft()

    def done_id(self, stream: str) -> str:
        """Return the id up to which the entries of a stream were taken, or that of the next one."""
        return next((entry.id for entry in self.unhandled if entry.stream == stream), self.last_ids[stream])

    async def read(self, wait_ms: int) -> Answer:
        """Return what is new in all streams, in order in each; wait up to `wait_ms` while nothing is."""
        streams: Any = dict(self.last_ids)
        try:
            async with asyncio.timeout(wait_ms / 1000 + LATE_S):
                answer: Answer = await self.redis.xread(streams, count=MAX_ENTRIES, block=max(1, wait_ms))
        except TimeoutError:
            return []
        return answer

    def entries(self, answer: Answer) -> Iterator[StreamEntry]:
        for stream, items in answer:
            name = stream.decode()
            if name not in self.last_ids:  # it was unfollowed after it was asked for
                continue
            for entry_id, fields in items:
                self.last_ids[name] = entry_id.decode()
                yield StreamEntry(name, entry_id.decode(), fields)
