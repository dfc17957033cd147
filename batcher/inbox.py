"""Inbox: reads requests, control messages and the reports of every worker with one XREAD.

The XREAD for the next entries is sent before the last ones are handled: they come while plans are written. An
entry that arrives at the broker between two of these XREADs would wait for a round trip; so, for one stream,
more XREADs wait at the broker, on a connection of their own (`watch`). Those may miss an entry; the first
one, which knows the last id of each stream, misses none.

Parse: reads requests and names from stream entries.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
from redis.asyncio import Redis

from batcher.lease import LeaseLost, WritesLost
from batcher.scheduling.sequence import Sequence
from common.broker.client import ERRORS
from common.broker.fast_client import FastConnection
from common.broker.keys import parse_stream_id
from common.messages.codec import WireError, decode
from common.messages.plan import Report
from common.messages.request import Generate

NUM_QUESTIONS = 8
"""XREADs that wait at the broker for the next entry of the stream that is watched."""
RETRY_S = 0.2
MAX_ENTRIES = 256
"""Entries of each stream in one read."""
MOMENT_S = 0.005
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
        early: stream and id of entries that were not read yet, but came by `watch`.
        arrived: done when one has come.
    """

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.last_ids: dict[str, str] = {}
        self.unhandled: deque[StreamEntry] = deque()
        self.reading: asyncio.Task[Answer] | None = None
        self.early: set[tuple[str, str]] = set()
        self.arrived: asyncio.Future[None] | None = None

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
            self.reading = asyncio.create_task(self.read(max(1, wait_ms)))

    async def fill(
        self,
        waits: bool,
        tasks: Collection[asyncio.Task[Any]] = (),
        replies: Collection[asyncio.Future[None]] = (),
    ) -> None:
        """Take over what was asked for. With `waits`, wait until it has come, or one of `tasks` or `replies`
        is done. Where entries wait, tasks go on for a moment: with one pass of the event loop a turn they
        would take seconds.
        """
        if waits and self.reading is not None and not self.unhandled:
            self.arrived = asyncio.get_running_loop().create_future()
            comes: list[asyncio.Future[Any]] = [self.reading, self.arrived, *tasks, *replies]
            await asyncio.wait(comes, return_when=asyncio.FIRST_COMPLETED)
        elif tasks:
            await asyncio.wait(tasks, timeout=MOMENT_S)
        else:
            await asyncio.sleep(0)  # replies have their turn
        if (reading := self.reading) is not None and reading.done():
            self.reading = None
            self.unhandled.extend(self.entries(reading.result()))

    def pop_entries(self, seconds: float) -> Iterator[StreamEntry]:
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
                answer: Answer = await self.redis.xread(streams, count=MAX_ENTRIES, block=wait_ms)
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
                if (name, entry_id.decode()) not in self.early:
                    yield StreamEntry(name, entry_id.decode(), fields)

    async def watch(self, stream: str) -> NoReturn:
        """Take entries of a stream that is followed, with ids of the broker's clock, as soon as they come."""
        while True:
            with contextlib.suppress(*ERRORS):
                await self.ask(stream)
            await asyncio.sleep(RETRY_S)

    async def ask(self, stream: str) -> None:
        """Have questions wait at the broker for as long as the connection lives."""
        question = "XREAD", "COUNT", MAX_ENTRIES, "BLOCK", 0, "STREAMS", stream, "$"

        def on_reply(reply: Any) -> None:
            if isinstance(reply, Exception):
                connection.fail(reply)
                return
            connection.send(*question)
            for entry_id, fields in reply[0][1] if reply else ():
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                self.take_early(StreamEntry(stream, entry_id.decode(), named))

        connection = await FastConnection.connect(self.redis, on_reply)
        try:
            connection.send_all([question] * NUM_QUESTIONS)
            await connection.closed
        finally:
            connection.close()

    def take_early(self, entry: StreamEntry) -> None:
        if (last_id := self.last_ids.get(entry.stream)) is None:
            return
        last = parse_stream_id(last_id)
        self.early = {one for one in self.early if parse_stream_id(one[1]) > last}
        if parse_stream_id(entry.id) > last and (entry.stream, entry.id) not in self.early:
            self.early.add((entry.stream, entry.id))
            self.unhandled.append(entry)
            if self.arrived is not None and not self.arrived.done():
                self.arrived.set_result(None)


def queued_ms(entry: StreamEntry, now_ms: int) -> int:
    """Return what the pool's clock showed when a `requests` entry was queued; `now_ms` if it does not say."""
    try:
        return min(int(entry.fields[b"clock"]), now_ms)
    except (KeyError, ValueError):
        return now_ms


def sequence(entry: StreamEntry, queued_ms: int) -> Sequence:
    """Return the sequence of a `requests` entry; its time to live counts from `queued_ms`.

    Raises WireError.
    """
    request = decode(Generate, entry.data)
    if not request.prompt_ids or len(request.prompt_ids) % 4:
        raise WireError("Generate.prompt_ids: empty, or no multiple of 4 bytes")
    check_positive("stopping.max_new_tokens", request.stopping.max_new_tokens)
    check_positive("ttl_ms", request.ttl_ms)
    check_positive("result_ttl_ms", request.result_ttl_ms)
    return Sequence(request, entry.id, queued_ms + request.ttl_ms)


def check_positive(field: str, value: int) -> None:
    """Raises WireError if the value of a request's field is not positive."""
    if value < 1:
        raise WireError(f"Generate.{field}: {value} is not positive")


def report(data: bytes, incarnation: str, epoch: int) -> Report:
    """Return a worker's report. Raises WireError; LeaseLost or WritesLost if it ends our `epoch`."""
    report = decode(Report, data)
    if report.epoch > epoch:
        raise LeaseLost(f"worker {incarnation} obeys epoch {report.epoch}")
    if report.reports_lost and report.epoch == epoch and not report.takeover:
        raise WritesLost(f"the broker lost reports of worker {incarnation}")
    return report


def incarnation(data: bytes) -> str:
    """Return a worker's incarnation. Raises WireError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"no incarnation: {error}") from error


def request_id(data: bytes) -> str | None:
    """Return the request id in a payload that is no valid `Generate`, if one can be read."""
    try:
        found = msgpack.unpackb(data)["id"]
    except Exception:  # the payload may be any bytes at all
        return None
    return found if isinstance(found, str) else None
