"""Relay: one subscription for all streams of a gateway; gaps are filled from Redis.

Messages may be lost, one by one or with the connection. A loss shows in a stream (an index beyond its
tokens), in a source (a skipped sequence number) or in silence. Then the committed tokens of the streams that
may be concerned are read (`api/streams/fill.py`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from api.event_loop import PacedQueue
from api.streams.fill import Filler, Sources, time_out
from api.streams.stream import Stream, count_latencies
from common.broker.client import ERRORS, FailureLog, FastConnection, describe_error
from common.broker.pool_client import PoolClient
from common.messages.codec import WireError, decode
from common.messages.events import Events, Terminal, TokenRow, Tokens, single_token
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 1.0
"""Pauses before a new subscription, doubled each time."""
PING_S = 5.0
"""How often the broker is asked for a sign of life: a subscription may have no message for hours."""
AUDIT_S = 1.0
SILENCE_S = 5.0
"""A stream without an event or a fill for this time is filled."""
LATE_S = 5.0
"""A stream is ended this long after its deadline, if the fleet has not ended it."""
QUIET_S = 1.0
"""A stream that is silent for this time may have moved to any source, or have been ended by the batcher."""
UNITS_AT_ONCE = 4
"""Tokens in columns that are delivered before the clock is read."""
END_UNITS = 4
"""Cost of an end in units of work: the last frames, and the release of the request."""
MAX_WAITING = 256
"""Messages that wait to be delivered; from then on the connection is not read, the broker keeps the rest."""


class Relay:
    """Delivers the events that one gateway receives to its live streams.

    Attributes:
        streams: live ones, by request id.
        followed: channel of another gateway whose requests this one reads → number of streams that need it.
        lose: for tests: returns whether the next message is dropped.
        last_error: why there is no subscription; empty while there is one.
        messages: received messages that are not delivered yet.
    """

    def __init__(self, client: PoolClient, gateway: str, lose: Callable[[], bool] | None = None) -> None:
        self.client = client
        self.channel = client.keys.events(gateway)
        self.lose = lose
        self.streams: dict[str, Stream] = {}
        self.followed: Counter[str] = Counter()
        self.connection: FastConnection | None = None
        self.last_error = "not connected to the broker yet"
        self.failures = FailureLog(log, "the subscription")
        self.subscribed = asyncio.Event()
        self.messages = PacedQueue()
        self.sources = Sources()
        self.filler = Filler(client, self.sources, self.streams)

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.listen())
            tasks.create_task(self.messages.run())
            tasks.create_task(self.filler.run())
            tasks.create_task(self.filler.offers.run())
            tasks.create_task(self.audit())

    # --- streams --------------------------------------------------------------------------------------------

    def add(self, stream: Stream) -> None:
        """Give the stream its events from now on. It is not filled before its request is admitted."""
        self.streams[stream.request.request_id] = stream

    def note_admitted(self, stream: Stream) -> None:
        """Note that Redis has the stream's request; its deadline is known now, and it may be filled."""
        stream.admitted = True
        stream.deadline_s = min(stream.deadline_s, time.monotonic() + stream.request.ttl_ms / 1000)
        if stream.request.request_id in self.filler.doubtful:
            self.filler.requested.set()

    def remove(self, stream: Stream) -> None:
        request_id = stream.request.request_id
        if self.streams.get(request_id) is stream:  # else it was replaced by another reader's
            del self.streams[request_id]
            self.filler.forget(request_id)

    def release(self, stream: Stream) -> None:
        """Remove a stream, and unfollow its channel if that is another gateway's."""
        self.remove(stream)
        if stream.request.channel != self.channel:
            self.unfollow_channel(stream.request.channel)

    def follow_channel(self, channel: str) -> None:
        """Subscribe to another gateway's channel, now or with the next connection."""
        self.followed[channel] += 1
        if self.followed[channel] == 1 and self.connection is not None:
            self.connection.send("SUBSCRIBE", channel)

    def unfollow_channel(self, channel: str) -> None:
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
                self.last_error = describe_error(error)
                self.failures.failed(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def subscribe(self) -> None:
        """Receive messages for as long as the connection holds."""
        self.connection = connection = await FastConnection.connect(self.client.redis, self.on_reply)
        try:
            connection.send("SUBSCRIBE", self.channel, *self.followed)
            while not (await asyncio.wait([connection.closed], timeout=until_beat(PING_S)))[0]:
                connection.send("PING")
            connection.closed.result()
        finally:
            self.connection = None
            connection.close()

    def on_reply(self, reply: Any) -> None:
        """Handle one reply of the subscribed connection; an error ends the subscription."""
        match reply:
            case [b"message", channel, data]:
                if not (self.lose and self.lose()):
                    self.messages.add(self.deliver(data, channel.decode()))
                    self.throttle()
            case [b"subscribe", channel, _]:
                if channel.decode() == self.channel:
                    self.subscribed.set()
                    self.failures.succeeded()
                    self.last_error = ""
                    self.filler.offers.connected.set()
                self.catch_up(channel.decode())
            case Exception() if self.connection is not None:
                self.connection.fail(reply)

    def throttle(self) -> None:
        """Read the connection only while not too many messages wait."""
        if self.connection is not None:
            self.connection.set_reading(len(self.messages.parts) < MAX_WAITING)

    def deliver(self, data: bytes, channel: str = "") -> Iterator[int]:
        """Give the events of one message to their streams, and request what is missing. Yields the cost of
        each event in units of work.
        """
        self.throttle()
        try:
            events = decode(Events, data)
            rows = events.columns.rows() if events.columns is not None else iter(())
        except WireError as error:
            log.error("undecodable message: %s", error)
            self.filler.request_fill(self.streams.values())
            return
        lost_after = self.sources.note(events, channel)
        if lost_after is not None:
            self.request_lost(events, lost_after)
        for tokens in events.tokens:
            self.give(tokens, events.source)
            yield 1
        yield from self.deliver_rows(rows, events.source)
        for terminal in events.terminals:
            self.give(terminal, events.source)
            yield END_UNITS

    def deliver_rows(self, rows: Iterator[TokenRow], source: str) -> Iterator[int]:
        """Give each token of columns to its stream, as `deliver` does."""
        streams, num_units, now_s = self.streams, 0, time.monotonic()
        for row in rows:
            request_id, attempt, index, record, text = row
            if (stream := streams.get(request_id)) is None:
                continue
            if not stream.add_next(source, attempt, index, record, text, now_s):
                self.give(single_token(*row), source)
            num_units += 1
            if num_units == UNITS_AT_ONCE:
                yield num_units
                num_units = 0
        count_latencies()
        yield num_units

    def give(self, event: Tokens | Terminal, source: str) -> None:
        """Give an event to its stream, if that is live. If tokens before it are missing, request a fill."""
        if (stream := self.streams.get(event.request_id)) is None:
            return
        try:
            fits = stream.add_event(event, source) if isinstance(event, Tokens) else stream.end(event)
        except WireError as error:
            log.error("undecodable event: %s", error)
            self.filler.request_fill([stream])
        else:
            if not fits:
                self.filler.request_fill([stream], stream.times.heard_s)

    # --- filling --------------------------------------------------------------------------------------------

    def request_lost(self, events: Events, after: int) -> None:
        """Request what was lost before a message: the flushes of its source after `after`, and streams that
        may have begun or ended there meanwhile, unless an event soon shows that they go on.
        """
        if events.flush:
            self.filler.request_flushes(events.source, after, events.flush)
        now = time.monotonic()
        suspects = (
            stream
            for stream in self.streams.values()
            if not stream.terminal
            and (stream.source in (events.source, "") or now - stream.times.heard_s > QUIET_S)
        )
        self.filler.request_fill(suspects, now)

    def catch_up(self, channel: str) -> None:
        """Request what was published on a channel before it was subscribed. The gateway's own channel is the
        first one of a connection, so it stands for all: nothing was heard since the last connection.
        """
        streams = [
            stream for stream in self.streams.values() if channel in (self.channel, stream.request.channel)
        ]
        for source, heard_on in {(stream.source, stream.request.channel) for stream in streams}:
            if flush := self.sources.last_flush(source, heard_on):
                self.filler.request_flushes(source, flush, 0)
        self.filler.request_fill(streams)

    async def audit(self) -> None:
        """Never returns."""
        while True:
            await asyncio.sleep(until_beat(AUDIT_S))
            self.request_overdue()

    def request_overdue(self) -> None:
        """Fill silent streams and those with a gap; end those that are LATE_S past their deadline."""
        now = time.monotonic()
        for stream in self.streams.values():
            if now - stream.deadline_s > LATE_S and not stream.terminal:
                time_out(stream)
            silent_s = now - stream.times.last_event_s
            if not stream.terminal and (silent_s > SILENCE_S or stream.has_gap):
                stream.times.last_event_s = now
                self.filler.request_fill([stream])
