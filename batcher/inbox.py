"""Inbox: reads requests, control messages and the reports of every worker with one XREAD."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
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


class Inbox:
    """The streams that are followed, and the last id read of each.

    Attributes:
        unhandled: entries that were read and not taken.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.last_ids: dict[str, str] = {}
        self.unhandled: deque[StreamEntry] = deque()

    def follow(self, stream: str, after: str = "0") -> None:
        """Read `stream` from the entry behind `after` on; no change if it is followed already."""
        self.last_ids.setdefault(stream, after)

    def unfollow(self, stream: str) -> None:
        self.last_ids.pop(stream, None)

    async def fill(self, wait_ms: int) -> None:
        """Read new entries if all that were read are taken; wait up to `wait_ms` while there are none."""
        if not self.unhandled:
            self.unhandled.extend(await self.read(wait_ms))

    def take(self, seconds: float) -> Iterator[StreamEntry]:
        """Yield the entries that were read; after `seconds` the rest stays for the next call."""
        end_s = time.monotonic() + seconds
        while self.unhandled and time.monotonic() < end_s:
            yield self.unhandled.popleft()

    def done_id(self, stream: str) -> str:
        """Return the id up to which the entries of a stream were taken, or that of the next one."""
        return next((entry.id for entry in self.unhandled if entry.stream == stream), self.last_ids[stream])

    async def read(self, wait_ms: int) -> list[StreamEntry]:
        """Return new entries of all streams, in order in each; wait up to `wait_ms` while there are none."""
        streams: Any = dict(self.last_ids)
        try:
            async with asyncio.timeout(wait_ms / 1000 + LATE_S):
                answer = await self.redis.xread(streams, count=MAX_ENTRIES, block=max(1, wait_ms))
        except TimeoutError:
            return []
        return list(self.entries(answer))

    def entries(
        self, answer: list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]
    ) -> Iterator[StreamEntry]:
        for stream, items in answer:
            name = stream.decode()
            for entry_id, fields in items:
                self.last_ids[name] = entry_id.decode()
                yield StreamEntry(name, entry_id.decode(), fields)
