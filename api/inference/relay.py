"""One subscription for all streams of a gateway. A message says what is new; whatever was missed is read from
Redis.

Messages may be lost, one by one or with the connection. That something is missing shows in a stream (an index
beyond what it has), in a source (a sequence number left out) or in silence; the answer is always the same:
fill.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from redis.asyncio import Redis

from api.inference.stream import Stream
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, describe_error
from common.broker.committed import read
from common.broker.fast_client import FastConnection
from common.broker.keys import Keys
from common.messages.codec import WireError, decode
from common.messages.events import Events

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
AUDIT_S = 1.0
SILENCE_S = 5.0
SOURCE_FORGOTTEN_S = 60.0


class Relay:
    """Takes the events of one gateway to its live streams.

    Attributes:
        streams: live ones, by request id.
        followed: channels of other gateways, whose requests have become ours → how many streams need each.
        trouble: why there is no subscription; empty while there is one.
    """

    def __init__(
        self, redis: Redis, keys: Keys, gateway: str, lose: Callable[[], bool] | None = None
    ) -> None:
        self.redis, self.keys, self.channel = redis, keys, keys.events(gateway)
        self.lose = lose
        self.streams: dict[str, Stream] = {}
        self.followed: Counter[str] = Counter()
        self.wire: FastConnection | None = None
        self.sequences: dict[tuple[str, str], tuple[int, float]] = {}
        self.last_error = "not connected to the broker yet"
        self.subscribed = asyncio.Event()
        self.wanted: set[str] = set()
        self.asked = asyncio.Event()
        self.num_fills = 0

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.listen())
            tasks.create_task(self.fill())
            tasks.create_task(self.audit())

    # --- streams come and go --------------------------------------------------------------------------------

    def add(self, stream: Stream) -> None:
        """From here on the stream hears what is said about it. It is filled once it is admitted, which may be
        later.
        """
        self.streams[stream.request.request_id] = stream

    def admitted(self, stream: Stream) -> None:
        stream.admitted = True
        if stream.request.request_id in self.wanted:
            self.asked.set()

    def remove(self, stream: Stream) -> None:
        self.streams.pop(stream.request.request_id, None)
        self.wanted.discard(stream.request.request_id)

    def follow(self, channel: str) -> None:
        """Hears what is said to another gateway as well. Where that cannot be said now, it is from the next
        subscription on.
        """
        self.followed[channel] += 1
        if self.followed[channel] == 1 and self.wire is not None:
            self.wire.send("SUBSCRIBE", channel)

    def unfollow(self, channel: str) -> None:
        self.followed[channel] -= 1
        if not self.followed[channel]:
            del self.followed[channel]
            if self.wire is not None:
                self.wire.send("UNSUBSCRIBE", channel)

    # --- messages -------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self.subscribe()
            except ERRORS as error:
                if self.subscribed.is_set():
                    self.subscribed.clear()
                    pause_s = FIRST_PAUSE_S
                if self.last_error != describe_error(error):
                    self.last_error = describe_error(error)
                    log.warning("no subscription: %s", self.last_error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def subscribe(self) -> None:
        """Hears messages for as long as the connection holds."""
        self.wire = wire = await FastConnection.connect(self.redis, self.on_reply)
        try:
            wire.send("SUBSCRIBE", self.channel, *self.followed)
            await wire.closed
        finally:
            self.wire = None
            wire.close()

    def on_reply(self, reply: Any) -> None:
        """What the broker says to its subscriber; that something is refused ends the subscription."""
        match reply:
            case [b"message", channel, data]:
                if not (self.lose and self.lose()):
                    self.on_message(data, channel.decode())
            case [b"subscribe", *_]:
                self.subscribed.set()
                self.last_error = ""
                self.request_fill(self.streams.values())
            case Exception() if self.wire is not None:
                self.wire.fail(reply)

    def on_message(self, data: bytes, channel: str = "") -> None:
        """One message of one source."""
        try:
            events = decode(Events, data)
            if self.has_gap(events, channel):
                self.request_fill(self.streams.values())
            for tokens in events.tokens:
                stream = self.streams.get(tokens.request_id)
                if stream is not None and not stream.take(tokens):
                    self.request_fill([stream])
            for terminal in events.terminals:
                stream = self.streams.get(terminal.request_id)
                if stream is not None and not stream.end(terminal):
                    self.request_fill([stream])
        except WireError as error:
            log.error("undecodable message: %s", error)
            self.request_fill(self.streams.values())

    def has_gap(self, events: Events, channel: str) -> bool:
        """Whether messages of this source to this channel went past us. One without content repeats its last
        number.
        """
        last, _ = self.sequences.get((events.source, channel), (0, 0.0))
        says_something = bool(events.tokens or events.terminals)
        self.sequences[events.source, channel] = (max(last, events.sequence), time.monotonic())
        return events.sequence > last + says_something

    # --- filling --------------------------------------------------------------------------------------------

    def request_fill(self, streams: Iterable[Stream]) -> None:
        """Has these streams filled; what is asked for while a fill runs goes into the next one."""
        self.wanted.update(stream.request.request_id for stream in streams)
        if self.wanted:
            self.asked.set()

    async def fill(self) -> None:
        while True:
            await self.asked.wait()
            self.asked.clear()
            wanted = [request_id for request_id in self.wanted if self.streams[request_id].admitted]
            self.wanted.difference_update(wanted)
            if not wanted:
                continue
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    reading = await read(self.redis, self.keys, wanted)
            except ERRORS as error:
                log.warning("cannot fill %d streams: %s", len(wanted), describe_error(error))
                self.request_fill(
                    self.streams[request_id] for request_id in wanted if request_id in self.streams
                )
                await asyncio.sleep(LAST_PAUSE_S)
                continue
            self.num_fills += 1
            for request_id, committed in reading.items():
                if (stream := self.streams.get(request_id)) is not None:
                    stream.fill(committed)
                await asyncio.sleep(
                    0
                )  # after a lost connection there is much to fill: readers and signs of life go on meanwhile

    async def audit(self) -> None:
        """Has streams filled that have heard nothing for long, and forgets sources that are gone."""
        while True:
            await asyncio.sleep(AUDIT_S)
            now = time.monotonic()
            silent = [
                stream
                for stream in self.streams.values()
                if now - stream.heard_s > SILENCE_S and not stream.terminal
            ]
            self.request_fill(silent)
            for stream in silent:
                stream.heard_s = now
            self.sequences = {
                source: said for source, said in self.sequences.items() if now - said[1] < SOURCE_FORGOTTEN_S
            }
