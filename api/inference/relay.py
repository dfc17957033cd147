"""Relay: one subscription for all streams of a gateway; gaps are filled from Redis.

Messages may be lost, one by one or with the connection. A gap shows in a stream (an index beyond its tokens),
in a source (a skipped sequence number) or in silence; each has the same remedy: read the committed tokens,
and fill.
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
    """Delivers the events that one gateway receives to its live streams.

    Attributes:
        streams: live ones, by request id.
        followed: channels of other gateways whose requests this one reads → number of streams that need each.
        lose: for tests: whether the next message is dropped.
        sequences: source and channel → last sequence number, and when it came.
        last_error: why there is no subscription; empty while there is one.
        to_fill: ids of streams that a fill is requested for.
    """

    def __init__(
        self, redis: Redis, keys: Keys, gateway: str, lose: Callable[[], bool] | None = None
    ) -> None:
        self.redis = redis
        self.keys = keys
        self.channel = keys.events(gateway)
        self.lose = lose
        self.streams: dict[str, Stream] = {}
        self.followed: Counter[str] = Counter()
        self.connection: FastConnection | None = None
        self.sequences: dict[tuple[str, str], tuple[int, float]] = {}
        self.last_error = "not connected to the broker yet"
        self.subscribed = asyncio.Event()
        self.to_fill: set[str] = set()
        self.fill_requested = asyncio.Event()
        self.num_fills = 0

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.listen())
            tasks.create_task(self.fill())
            tasks.create_task(self.audit())

    # --- streams --------------------------------------------------------------------------------------------

    def add(self, stream: Stream) -> None:
        """Give the stream its events from now on. It is filled once it is admitted, which may be later."""
        self.streams[stream.request.request_id] = stream

    def admitted(self, stream: Stream) -> None:
        stream.admitted = True
        if stream.request.request_id in self.to_fill:
            self.fill_requested.set()

    def remove(self, stream: Stream) -> None:
        self.streams.pop(stream.request.request_id, None)
        self.to_fill.discard(stream.request.request_id)

    def follow(self, channel: str) -> None:
        """Subscribe to another gateway's channel as well; without a connection, with the next
        subscription.
        """
        self.followed[channel] += 1
        if self.followed[channel] == 1 and self.connection is not None:
            self.connection.send("SUBSCRIBE", channel)

    def unfollow(self, channel: str) -> None:
        self.followed[channel] -= 1
        if not self.followed[channel]:
            del self.followed[channel]
            if self.connection is not None:
                self.connection.send("UNSUBSCRIBE", channel)

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
        """Receive messages for as long as the connection holds."""
        self.connection = connection = await FastConnection.connect(self.redis, self.on_reply)
        try:
            connection.send("SUBSCRIBE", self.channel, *self.followed)
            await connection.closed
        finally:
            self.connection = None
            connection.close()

    def on_reply(self, reply: Any) -> None:
        """Handle one reply of the subscribed connection; an error ends the subscription."""
        match reply:
            case [b"message", channel, data]:
                if not (self.lose and self.lose()):
                    self.on_message(data, channel.decode())
            case [b"subscribe", *_]:
                self.subscribed.set()
                self.last_error = ""
                self.request_fill(self.streams.values())
            case Exception() if self.connection is not None:
                self.connection.fail(reply)

    def on_message(self, data: bytes, channel: str = "") -> None:
        """Give the events of one message to their streams, and request fills for gaps."""
        try:
            events = decode(Events, data)
            if self.has_gap(events, channel):
                self.request_fill(self.streams.values())
            for tokens in events.tokens:
                stream = self.streams.get(tokens.request_id)
                if stream is not None and not stream.add_event(tokens):
                    self.request_fill([stream])
            for terminal in events.terminals:
                stream = self.streams.get(terminal.request_id)
                if stream is not None and not stream.end(terminal):
                    self.request_fill([stream])
        except WireError as error:
            log.error("undecodable message: %s", error)
            self.request_fill(self.streams.values())

    def has_gap(self, events: Events, channel: str) -> bool:
        """Whether messages of this source to this channel were lost. A message without events repeats the
        last sequence number.
        """
        last, _ = self.sequences.get((events.source, channel), (0, 0.0))
        has_events = bool(events.tokens or events.terminals)
        self.sequences[events.source, channel] = (max(last, events.sequence), time.monotonic())
        return events.sequence > last + has_events

    # --- filling --------------------------------------------------------------------------------------------

    def request_fill(self, streams: Iterable[Stream]) -> None:
        """Request a fill of these streams; requests during a fill go into the next one."""
        self.to_fill.update(stream.request.request_id for stream in streams)
        if self.to_fill:
            self.fill_requested.set()

    async def fill(self) -> None:
        while True:
            await self.fill_requested.wait()
            self.fill_requested.clear()
            request_ids = [request_id for request_id in self.to_fill if self.streams[request_id].admitted]
            self.to_fill.difference_update(request_ids)
            if not request_ids:
                continue
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    found = await read(self.redis, self.keys, request_ids)
            except ERRORS as error:
                log.warning("cannot fill %d streams: %s", len(request_ids), describe_error(error))
                self.request_fill(
                    self.streams[request_id] for request_id in request_ids if request_id in self.streams
                )
                await asyncio.sleep(LAST_PAUSE_S)
                continue
            self.num_fills += 1
            for request_id, committed in found.items():
                if (stream := self.streams.get(request_id)) is not None:
                    stream.fill(committed)
                # After a lost connection there is much to fill: readers and heartbeats go on meanwhile.
                await asyncio.sleep(0)

    async def audit(self) -> None:
        """Request fills of streams that were silent for SILENCE_S, and remove sources that are gone."""
        while True:
            await asyncio.sleep(AUDIT_S)
            now = time.monotonic()
            silent = [
                stream
                for stream in self.streams.values()
                if now - stream.last_event_s > SILENCE_S and not stream.terminal
            ]
            self.request_fill(silent)
            for stream in silent:
                stream.last_event_s = now
            self.sequences = {
                source: last for source, last in self.sequences.items() if now - last[1] < SOURCE_FORGOTTEN_S
            }
