"""Relay: one subscription for all streams of a gateway; gaps are filled from Redis.

Messages may be lost, one by one or with the connection. A loss shows in a stream (an index beyond its
tokens), in a source (a skipped sequence number) or in silence. Then the committed tokens of the streams that
may be concerned are read.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

from api.event_loop import RETRY_PAUSE_S, Pace, PacedQueue, attempt, repeat_forever, retry_forever
from api.requests import request_scripts
from api.requests.request_scripts import OfferReply, cancel_request
from api.streams.stream import Stream, count_latencies
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, FailureLog, FastConnection, describe_error
from common.broker.committed import Committed, logged_messages, read_slice
from common.broker.pool_client import PoolClient
from common.messages import events
from common.messages.codec import WireError, decode, from_map, unpack
from common.messages.events import FINISHED, Events, Terminal, TokenColumns, TokenRow, Tokens, single_token
from common.messages.records import RECORD, pack_columns, unpack_records
from common.process.event_loop import until_beat
from common.process.logs import for_request, plural

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
            self.filler.request_flushes(events.source, after)
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
                self.filler.request_flushes(source, flush)
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


# --- gaps ---------------------------------------------------------------------------------------------------
# Filling reads as little as it can, in this order: the lost flushes of a source's log; for requests that are
# still in doubt the hash, and the string from the first missing token on; if that is not enough, the log of
# the worker that holds the request. It works in slices, so the event loop is never held for long.


LOG_ENTRIES_IN_ONE_READ = 8
"""Each takes a gateway up to a millisecond."""
LOGITS_PIECES_IN_ONE_READ = 16
"""Of up to 4 MiB each."""
AFTER_SEAL = f"({2**64 - 1}-"
"""How a position after a seal begins: nothing follows it."""
MAX_SOURCES = 4096
"""Pairs of source and channel that are remembered: those heard last."""
RETRY_S = 1.0
STREAMS_IN_ONE_READ = 64
"""Streams whose strings are read at once."""
TOKENS_AT_ONCE = 256
"""Tokens that one stream gets at once; its reader then renders as many."""
TOKENS_PER_UNIT = 8
JITTER_PER_STREAM_S = 0.0001
"""Longest pause before a fill, for each stream in doubt: so gateways that lost the same message do not all
read at once.
"""
MAX_JITTER_S = 0.25


class Sources:
    """The last message of each source (a process that publishes to this gateway) on each channel.

    Attributes:
        last: (source, channel) → (its sequence number, its flush); those heard last are at the end.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[str, str], tuple[int, int]] = {}

    def note(self, events: Events, channel: str) -> int | None:
        """Note a message. If messages before it were lost, return the flush after which they came, else None.

        A message without events repeats the last number, so that the loss of the last message is noticed.
        """
        key = events.source, channel
        number, flush = self.last.pop(key, (0, 0))
        self.last[key] = max(number, events.sequence), max(flush, events.flush)
        if len(self.last) > MAX_SOURCES:
            del self.last[next(iter(self.last))]
        return flush if events.sequence > number + events.has_events else None

    def last_flush(self, source: str, channel: str) -> int:
        """The flush of the last message from `source` on `channel`; 0 if there was none."""
        return self.last.get((source, channel), (0, 0))[1]


class Filler:
    """Fills the streams of one gateway in rounds; what is requested during a round is filled in the next one.

    Attributes:
        streams: the relay's, by request id.
        lost: source → the flush after which some of its flushes were lost.
        offers: offers the streams that Redis turns out to lack.
        doubtful: request id → monotonic time; an event after it shows that the stream misses nothing.
    """

    def __init__(self, client: PoolClient, sources: Sources, streams: dict[str, Stream]) -> None:
        self.client = client
        self.sources = sources
        self.streams = streams
        self.offers = Offers(client, streams)
        self.lost: dict[str, int] = {}
        self.doubtful: dict[str, float] = {}
        self.requested = asyncio.Event()
        self.pace = Pace()
        self.failures = FailureLog(log, "filling streams")

    def request_fill(self, streams: Iterable[Stream], since_s: float = math.inf) -> None:
        """Request a fill of these streams, unless they get an event after `since_s` that fits."""
        for stream in streams:
            request_id = stream.request.request_id
            self.doubtful[request_id] = max(since_s, self.doubtful.get(request_id, 0.0))
            self.requested.set()

    def request_flushes(self, source: str, after: int) -> None:
        """Request the tokens of a source's flushes after this one."""
        self.lost[source] = min(self.lost.get(source, after), after)
        self.requested.set()

    def forget(self, request_id: str) -> None:
        self.doubtful.pop(request_id, None)

    # --- rounds ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.requested.wait()
            jitter_s = min(MAX_JITTER_S, JITTER_PER_STREAM_S * len(self.doubtful))
            await asyncio.sleep(random.uniform(0, jitter_s))
            self.requested.clear()
            lost, self.lost = self.lost, {}
            doubtful = self.take_admitted()
            with self.failures.caught():
                await self.fill(lost, doubtful)
                continue
            self.request_again(lost, doubtful)
            await asyncio.sleep(RETRY_S)

    def take_admitted(self) -> dict[str, float]:
        """Remove and return the doubtful streams whose requests are admitted."""
        taken = {name: since_s for name, since_s in self.doubtful.items() if self.streams[name].admitted}
        for name in taken:
            del self.doubtful[name]
        return taken

    def request_again(self, lost: dict[str, int], doubtful: dict[str, float]) -> None:
        for source, after in lost.items():
            self.request_flushes(source, after)
        for name, since_s in doubtful.items():
            if name in self.streams:
                self.request_fill([self.streams[name]], since_s)

    async def fill(self, lost: dict[str, int], doubtful: dict[str, float]) -> None:
        if not lost and not doubtful:
            return
        for source, after in lost.items():
            await self.fill_from_log(source, after)
        unsure = [name for name, since_s in doubtful.items() if self.is_unsure(name, since_s)]
        for i in range(0, len(unsure), STREAMS_IN_ONE_READ):
            await self.fill_from_strings(unsure[i : i + STREAMS_IN_ONE_READ])
        for worker, streams in self.group_by_worker(unsure, lost).items():
            await self.fill_from_log(worker, min(self.first_missing(stream, worker) for stream in streams))

    def is_unsure(self, request_id: str, since_s: float) -> bool:
        """Whether no event after `since_s` has shown that a stream misses nothing."""
        stream = self.streams.get(request_id)
        return (
            stream is not None and not stream.terminal and (stream.has_gap or stream.times.heard_s < since_s)
        )

    def group_by_worker(self, request_ids: list[str], read: Iterable[str]) -> dict[str, list[Stream]]:
        """The streams whose strings were not enough, by the worker whose log has the rest.

        Args:
            read: workers whose logs were read in this round.
        """
        groups: dict[str, list[Stream]] = {}
        for name in request_ids:
            stream = self.streams.get(name)
            if stream is None or stream.terminal or not stream.worker:
                continue
            if stream.has_gap or stream.worker not in read:
                groups.setdefault(stream.worker, []).append(stream)
        return groups

    def first_missing(self, stream: Stream, worker: str) -> int:
        """The flush of a worker's log after which a stream may miss tokens."""
        if stream.has_gap or stream.source != worker:
            return 0
        return self.sources.last_flush(worker, stream.request.channel)

    # --- logs -----------------------------------------------------------------------------------------------

    async def fill_from_log(self, worker: str, after: int) -> None:
        async for entry in read_log(self.client, worker, after):
            for tokens in tokens_of(entry, self.streams):
                await self.add_logged(tokens, worker)
            await self.pace.step()

    async def add_logged(self, tokens: Tokens, worker: str) -> None:
        stream = self.streams.get(tokens.request_id)
        if stream is not None:
            await self.detokenize_late(stream)
            with contextlib.suppress(WireError):
                if not stream.terminal:
                    stream.add_tokens(tokens, worker)
            await self.pace.step()

    # --- strings and ends -----------------------------------------------------------------------------------

    async def fill_from_strings(self, request_ids: list[str]) -> None:
        streams = [self.streams[name] for name in request_ids if name in self.streams]
        offsets = {
            stream.request.request_id: stream.num_tokens * stream.request.width * RECORD.size
            for stream in streams
        }
        lacked_prompt = [stream for stream in streams if stream.prompt.is_missing and stream.has_gap]
        async with asyncio.timeout(CONNECT_TIMEOUT_S):  # of a request that has ended all of its string
            states = await read_slice(self.client, offsets, of_ended=True)
        for stream in streams:
            name = stream.request.request_id
            await self.apply_state(stream, states[name], offsets[name])
            if stream in lacked_prompt and stream.prompt.is_missing and not stream.terminal:
                stream.fail_prompt()
            await self.pace.step()

    async def apply_state(self, stream: Stream, state: Committed, offset: int) -> None:
        """Add the end and the tokens that this stream lacks.

        Args:
            offset: byte of the request's string where the state's records begin.
        """
        if not state.known:
            self.offers.offer_unknown(stream)
        elif state.terminal:
            stream.note_state(state)
            await self.apply_end(stream, state)
        elif state.worker and not stream.lineage.check(
            state.worker, state.attempt, state.base, stream.num_tokens
        ):
            self.offers.request_offer([stream])
        else:
            stream.note_state(state)
            await self.add_records(stream, offset, state.records)

    async def apply_end(self, stream: Stream, state: Committed) -> None:
        width, is_answer = stream.request.width, state.terminal in FINISHED
        if is_answer and (state.width != width or state.num_tokens != state.num_final):
            stream.fail("its result cannot be read")  # somebody else wrote to the key
            return
        shown = state.records[: stream.num_tokens * state.token_bytes]
        if is_answer and unpack_records(shown, width)[0] != stream.ids:
            self.offers.request_offer([stream], reopen=True)
            return
        if is_answer:
            await self.add_records(stream, 0, state.records)
            await self.read_logits(stream, state.num_final)
        num_tokens = state.num_final if is_answer else 0
        request_id = stream.request.request_id
        stream.end(Terminal(request_id, state.terminal, num_tokens, state.error, state.error_type))

    async def read_logits(self, stream: Stream, num_tokens: int) -> None:
        """Read the logits of a finished answer, if it returns some."""
        logits = stream.request.logits
        if logits is None or stream.logits is not None or stream.terminal:
            return
        num_bytes = logits.num_bytes(len(stream.prompt_ids), num_tokens)
        stream.logits = await read_logits(self.client, stream.request.request_id, num_bytes)
        if stream.logits is None:
            stream.fail("its logits cannot be read")

    async def add_records(self, stream: Stream, offset: int, records: bytes) -> None:
        """Add tokens without their texts, in slices; `offset` is where the records begin in the string."""
        width = stream.request.width
        token_bytes = width * RECORD.size
        index, num_bytes = offset // token_bytes, TOKENS_AT_ONCE * token_bytes
        for i in range(0, len(records), num_bytes):
            await self.detokenize_late(stream)
            ids, logprobs, tops = unpack_records(records[i : i + num_bytes], width)
            if index + TOKENS_AT_ONCE > stream.num_tokens:
                stream.add_committed(index, ids, logprobs, tops)
                await self.pace.step(len(ids) // TOKENS_PER_UNIT)
            index += TOKENS_AT_ONCE

    async def detokenize_late(self, stream: Stream) -> None:
        """Let the stream's detokenizer see the tokens that came with their text."""
        while stream.late_text.see(stream.ids, TOKENS_AT_ONCE):
            await self.pace.step(TOKENS_AT_ONCE // TOKENS_PER_UNIT)


async def read_logits(pool: PoolClient, request_id: str, num_bytes: int) -> bytes | None:
    """Return the first `num_bytes` of a request's logits, read in slices; None if there are fewer."""
    key, num_read = pool.keys.logits(request_id), 0
    pieces: list[bytes] = []
    while num_read < num_bytes:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            found = await pool.redis.lrange(  # type: ignore[misc]
                key, len(pieces), len(pieces) + LOGITS_PIECES_IN_ONE_READ - 1
            )
        if not found:
            return None
        pieces += found
        num_read += sum(map(len, found))
    return b"".join(pieces)[:num_bytes]


async def read_log(pool: PoolClient, worker: str, after: int) -> AsyncIterator[bytes]:
    """Yield the messages of a worker's log after a flush."""
    first = f"({after}-0"
    while True:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            entries = await pool.redis.xrange(pool.keys.log(worker), first, "+", LOG_ENTRIES_IN_ONE_READ)
        for entry_id, fields in entries:
            first = f"({entry_id.decode()}"
            for message in logged_messages(fields):
                yield message
        if len(entries) < LOG_ENTRIES_IN_ONE_READ or first.startswith(AFTER_SEAL):
            return


def tokens_of(message: bytes, requests: Container[str]) -> list[Tokens]:
    """The tokens of those requests alone in a message of a log; none if it cannot be read."""
    try:
        fields = unpack(Events, message)
        tokens = [from_map(Tokens, item) for item in fields["t"] if item["id"] in requests]
        if columns := fields.get("c"):
            rows = from_map(TokenColumns, columns).rows()
            tokens += [single_token(*row) for row in rows if row[0] in requests]
        return tokens
    except (WireError, KeyError, TypeError):
        return []


# --- offers -------------------------------------------------------------------------------------------------
# A gateway tells a broker that may have lost requests what its streams have. A restored broker lacks what was
# written last: requests, placements, tokens that clients have seen. The gateway has these in its streams.
# Tokens that a client has seen are committed again, and the request goes on after them.


FORGOTTEN = "the broker does not know the request any more: its data was deleted, or lost"
STREAMS_AT_ONCE = 16


def time_out(stream: Stream) -> None:
    """End a stream with the error of a missed deadline, which the fleet has not sent."""
    error_type, why = events.ERRORS["timeout"]
    stream.fail(why, error_type)


def supersede(stream: Stream) -> None:
    """End a stream whose request has a newer reader."""
    why = "another connection goes on with this answer"
    stream.end(Terminal(stream.request.request_id, "error", 0, why, "superseded"))


class Offers:
    """Offers streams on request; and all of them when the broker is another server than before, as after a
    restart or a failover.

    Attributes:
        streams: the relay's, by request id.
        pending: id of a stream to offer → whether its request has ended in Redis with other tokens.
        connected: set when a connection to the broker was made.
        server_id: the last known id of the broker's server. Another one, as after a restart or a failover,
            may lack what was written last.
    """

    def __init__(self, client: PoolClient, streams: dict[str, Stream]) -> None:
        self.client = client
        self.streams = streams
        self.pending: dict[str, bool] = {}
        self.requested = asyncio.Event()
        self.connected = asyncio.Event()
        self.server_id = ""
        self.num_offers = 0
        self.failures = FailureLog(log, "offering streams")

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.offer_pending())
            tasks.create_task(repeat_forever(self.watch_server, "asking which server the broker is"))

    def request_offer(self, streams: Iterable[Stream], reopen: bool = False) -> None:
        """Offer these streams soon. `reopen`: their requests have ended in Redis with other tokens."""
        for stream in streams:
            name = stream.request.request_id
            self.pending[name] = reopen or self.pending.get(name, False)
            self.requested.set()

    def offer_unknown(self, stream: Stream) -> None:
        """Offer a stream whose keys are gone; end it after its deadline, because then they have expired."""
        if time.monotonic() > stream.deadline_s:
            time_out(stream)
        elif stream.released:
            stream.fail(FORGOTTEN)
        else:
            self.request_offer([stream])

    async def watch_server(self) -> None:
        """Once connected, offer all streams if the broker is not the server of before."""
        await self.connected.wait()
        self.connected.clear()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                server_id = str((await self.client.redis.info("server"))["run_id"])
        except ERRORS:
            self.connected.set()
            raise
        if self.server_id and server_id != self.server_id:
            num_streams = plural(len(self.streams), "stream")
            log.warning("the broker was restarted or replaced: offering it %s", num_streams)
            self.request_offer(self.streams.values())
        self.server_id = server_id

    async def offer_pending(self) -> None:
        while True:
            await self.requested.wait()
            self.requested.clear()
            names, self.pending = list(self.pending.items()), {}
            for i in range(0, len(names), STREAMS_AT_ONCE):
                part = [
                    (self.streams[name], reopen)
                    for name, reopen in names[i : i + STREAMS_AT_ONCE]
                    if name in self.streams
                ]
                await asyncio.gather(*(self.offer(stream, reopen) for stream, reopen in part))

    async def offer(self, stream: Stream, reopen: bool) -> None:
        """Offer one stream; if the broker fails, request it again."""
        if not stream.admitted or stream.terminal or stream.released:
            return
        ttl_ms = stream.request.ttl_ms - round((time.monotonic() - stream.times.started_s) * 1000)
        if ttl_ms <= 0:
            time_out(stream)
            return
        with self.failures.caught():
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reply = await self.send(stream, ttl_ms, reopen)
            self.num_offers += 1
            self.apply(stream, reply)
            if reply.outcome == "queued" and (stream.terminal or stream.released):
                await attempt(lambda: self.cancel(stream), retry_forever)
            return
        await asyncio.sleep(RETRY_PAUSE_S)
        self.request_offer([stream], reopen)

    async def cancel(self, stream: Stream) -> None:
        """Cancel a request whose stream ended here while it was offered. Its keys expire."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await cancel_request(self.client, stream.request.request_id)

    def apply(self, stream: Stream, reply: OfferReply) -> None:
        """Apply the reply to an offer."""
        request_id = stream.request.request_id
        extra = for_request(request_id, stream.request.traceparent)
        shown = plural(stream.num_tokens, "token")
        match reply.outcome:
            case "queued":
                log.warning("request %s is queued again, after %s", request_id, shown, extra=extra)
            case "void":
                log.warning("request %s goes on after %s", request_id, shown, extra=extra)
            case "superseded":
                supersede(stream)
            case "foreign":
                stream.fail(FORGOTTEN)
        stream.note_offered(reply.attempt)

    async def send(self, stream: Stream, ttl_ms: int, reopen: bool) -> OfferReply:
        """Run the script `offer`."""
        call = request_scripts.offer(
            self.client.keys,
            replace(stream.request, ttl_ms=ttl_ms, num_shown=stream.num_tokens),
            made_by=stream.lineage.worker,
            made_in=stream.lineage.attempt,
            records=pack_columns(stream.ids, stream.logprobs, stream.tops),
            prompt_records=stream.prompt.records or b"",
            num_cached=stream.prompt.num_cached if stream.ids else None,
            reopen=reopen,
            answer=stream.answer,
            reader=stream.reader,
            connection=stream.connection,
        )
        return await self.client.run(call)
