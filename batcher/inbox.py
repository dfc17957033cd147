"""Inbox: reads requests, control messages and the reports of every worker with one XREAD.

The XREAD for the next entries is sent before the last ones are handled, so they come while plans are written.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack
from redis.asyncio import Redis

from batcher.lease import LeaseLost, WritesLost
from batcher.scheduling.sequence import Sequence
from common.messages.codec import WireError, decode
from common.messages.plan import Report
from common.messages.request import Generate

MAX_ENTRIES_READ = 256
"""Entries of each stream in one read."""
TASK_TIME_S = 0.005
"""Time that tasks get in a turn that waits for no entry."""
LATE_S = 2.0
"""A read that is this late is given up: the broker's clock, by which it ends waits, may have gone back."""


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """An entry. The first of its `fields` is named after the kind of message."""

    stream: str
    id: str
    fields: dict[bytes, bytes]

    @property
    def kind(self) -> str:
        return next(iter(self.fields), b"").decode(errors="replace")

    @property
    def data(self) -> bytes:
        return next(iter(self.fields.values()), b"")


XreadReply = list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]


class Inbox:
    """The streams that are followed, and the last id taken from each.

    Attributes:
        unhandled: entries that were read and not popped.
        reading: the read under way, until its entries are `unhandled`.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.last_ids: dict[str, str] = {}
        self.unhandled: deque[StreamEntry] = deque()
        self.reading: asyncio.Task[XreadReply] | None = None

    def follow(self, stream: str, after: str = "0") -> None:
        """Read `stream` from the entry after `after` on, unless it is followed already. Of one read its
        entries come before those of the streams that were followed earlier.
        """
        if stream not in self.last_ids:
            self.last_ids = {stream: after} | self.last_ids
            self.close()  # the read under way lacks this stream

    def unfollow(self, stream: str) -> None:
        self.last_ids.pop(stream, None)

    def close(self) -> None:
        """Give up the read under way: the next one brings its entries."""
        if self.reading is not None:
            self.reading.cancel()
            self.reading = None

    def read_ahead(self, wait_ms: int) -> None:
        """Start a read if all entries are popped; the broker waits up to `wait_ms` for a new one."""
        if self.reading is None and not self.unhandled:
            self.reading = asyncio.create_task(self.read(max(1, wait_ms)))

    async def fill(
        self,
        waits: bool,
        tasks: Collection[asyncio.Task[Any]] = (),
        replies: Collection[asyncio.Future[None]] = (),
    ) -> None:
        """Take the entries of the read under way, if they have come. With `waits`, and if no entry is there,
        wait for the first of them, of `tasks` and of `replies`. Otherwise `tasks` get a moment: with one pass
        of the event loop a turn they would take seconds.
        """
        if waits and self.reading is not None and not self.unhandled:
            await asyncio.wait([self.reading, *tasks, *replies], return_when=asyncio.FIRST_COMPLETED)
        elif tasks:
            await asyncio.wait(tasks, timeout=TASK_TIME_S)
        else:
            await asyncio.sleep(0)  # replies have their turn
        if (reading := self.reading) is not None and reading.done():
            self.reading = None
            self.unhandled.extend(self.entries(reading.result()))

    def pop_entries(self, seconds: float) -> Iterator[StreamEntry]:
        """Yield the entries that were read, for `seconds`; the rest stays for the next call."""
        end_s = time.monotonic() + seconds
        while self.unhandled and time.monotonic() < end_s:
            yield self.unhandled.popleft()

    def done_id(self, stream: str) -> str:
        """Return the id of the next entry of a stream, or of the last one if all are popped."""
        return next((entry.id for entry in self.unhandled if entry.stream == stream), self.last_ids[stream])

    async def read(self, wait_ms: int) -> XreadReply:
        """Return the new entries of all streams, each in order; wait up to `wait_ms` for the first."""
        streams: Any = dict(self.last_ids)
        try:
            async with asyncio.timeout(wait_ms / 1000 + LATE_S):
                reply: XreadReply = await self.redis.xread(streams, count=MAX_ENTRIES_READ, block=wait_ms)
        except TimeoutError:
            return []
        return reply

    def entries(self, reply: XreadReply) -> Iterator[StreamEntry]:
        for stream, items in reply:
            name = stream.decode()
            if name not in self.last_ids:  # it was unfollowed during the read
                continue
            for entry_id, fields in items:
                self.last_ids[name] = entry_id.decode()
                yield StreamEntry(name, entry_id.decode(), fields)


def parse_queued_ms(entry: StreamEntry, now_ms: int) -> int:
    """Return what the pool's clock showed when a `requests` entry was queued; `now_ms` if it does not say."""
    try:
        return min(int(entry.fields[b"clock"]), now_ms)
    except (KeyError, ValueError):
        return now_ms


def parse_sequence(entry: StreamEntry, queued_ms: int) -> Sequence:
    """Return the sequence of a `requests` entry, which lives from `queued_ms` on. Raises WireError."""
    request = decode(Generate, entry.data)
    if not request.prompt_ids or len(request.prompt_ids) % 4:
        raise WireError("Generate.prompt_ids: empty, or no multiple of 4 bytes")
    least = {"max_new_tokens": request.stopping.max_new_tokens}
    least |= {"ttl_ms": request.ttl_ms, "kept_ms": request.kept_ms}
    if found := [f"{field}: {value}" for field, value in least.items() if value < 1]:
        raise WireError(f"Generate.{found[0]} is not positive")
    return Sequence(request, entry.id, queued_ms + request.ttl_ms)


def parse_report(data: bytes, incarnation: str, epoch: int) -> Report:
    """Return a worker's report. Raises WireError; LeaseLost or WritesLost if the report ends our `epoch`."""
    report = decode(Report, data)
    if report.epoch > epoch:
        raise LeaseLost(f"worker {incarnation} obeys epoch {report.epoch}")
    if report.reports_lost and report.epoch == epoch and not report.takeover:
        raise WritesLost(f"the broker lost reports of worker {incarnation}")
    return report


def parse_request_id(data: bytes) -> str | None:
    """Return the request id in a payload that is no valid `Generate`; None if there is none to read."""
    try:
        found = msgpack.unpackb(data)["id"]
    except Exception:  # the payload may be any bytes at all
        return None
    return found if isinstance(found, str) else None
