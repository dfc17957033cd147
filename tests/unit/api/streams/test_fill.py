"""The filler reads what was lost, and little else."""

import asyncio
import itertools
from dataclasses import replace

from redis.asyncio import Redis

from api.streams import fill
from api.streams.fill import Sources
from api.streams.relay import Relay
from api.streams.stream import Stream
from common.messages.codec import encode
from common.messages.events import Events, Terminal, Tokens, pack_tokens
from common.messages.records import RECORD
from tests.support.events import IDS, KEYS, new_stream, tokens
from tests.support.token_columns import as_sent
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until


class Source:
    """A worker with some requests; each flush has a token of each."""

    def __init__(self, redis: Redis, relay: Relay, name: str, num_streams: int = 2) -> None:
        self.redis = redis
        self.relay = relay
        self.name = name
        self.num_flushes = self.number = 0
        self.attempt = 1
        self.num_cached = 0
        self.streams = [new_stream(f"{name}.{i}", channel=relay.channel) for i in range(num_streams)]

    async def start(self) -> None:
        for stream in self.streams:
            fields = {"digest": "d", "worker": self.name, "attempt": self.attempt, "base": self.num_flushes}
            await self.redis.hset(KEYS.request(stream.request.request_id), mapping=fields)  # type: ignore[misc]
            self.relay.add(stream)
            self.relay.note_admitted(stream)

    def new_tokens(self, streams: list[Stream]) -> list[Tokens]:
        index = self.num_flushes - 1
        return [
            replace(
                tokens(index, index + 1, request_id=stream.request.request_id),
                attempt=self.attempt,
                num_cached=0 if index else self.num_cached,
            )
            for stream in streams
        ]

    async def flush(self, lost: bool = False, without: int = 0) -> None:
        """Commit one token of each request, and publish it unless it is lost; the last ones get none."""
        self.num_flushes += 1
        self.number += 1
        streams = self.streams[: len(self.streams) - without]
        await self.redis.xadd(
            KEYS.log(self.name),
            {"entry": encode(Events("w", 0, **as_sent(self.new_tokens(streams))))},
            id=f"{self.num_flushes}-0",
        )
        if not lost:
            sent = as_sent(self.new_tokens(streams))
            events = Events(self.name, self.number, flush=self.num_flushes, **sent)
            await self.redis.publish(self.relay.channel, encode(events))

    async def spill(self) -> None:
        """Move what the log has into the strings, but the last flush."""
        for stream in self.streams:
            committed = tokens(0, self.num_flushes, request_id=stream.request.request_id)
            await self.redis.set(KEYS.tokens(stream.request.request_id), pack_tokens(committed))
        await self.redis.xtrim(KEYS.log(self.name), minid=f"{self.num_flushes}-0")

    def all_have(self, num_tokens: int) -> bool:
        return all(stream.ids == IDS[:num_tokens] for stream in self.streams)


async def calls(redis: Redis, command: str) -> int:
    stats = await redis.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_one_lost_message_reads_one_flush_of_its_source_and_no_request(
    redis: Redis, relay: Relay
) -> None:
    """The next message shows that all its requests go on: no hash and no string is read."""
    mine, other = Source(redis, relay, "w0"), Source(redis, relay, "w1")
    for source in (mine, other):
        await source.start()
        for _ in range(3):
            await source.flush()
    await wait_until(lambda: mine.all_have(3) and other.all_have(3))
    await redis.config_resetstat()
    await mine.flush(lost=True)
    await mine.flush()
    await wait_until(lambda: mine.all_have(5))
    for stream in mine.streams:
        assert stream.texts == [TOKENIZER.decode([token_id]) for token_id in IDS[:5]]
    assert (await calls(redis, "xrange"), await calls(redis, "hmget")) == (1, 0)
    assert other.all_have(3)


async def test_only_a_request_that_the_next_message_does_not_have_is_asked_for(
    redis: Redis, relay: Relay
) -> None:
    source = Source(redis, relay, "w0", num_streams=8)
    await source.start()
    await source.flush()
    await wait_until(lambda: source.all_have(1))
    await redis.hset(KEYS.request("w0.7"), mapping={"terminal": "length", "num_tokens": 1})  # type: ignore[misc]
    await redis.set(KEYS.tokens("w0.7"), RECORD.pack(IDS[0], 0.0))
    await redis.config_resetstat()
    source.number += 1  # the message with its end is lost
    await source.flush(without=1)
    await wait_until(lambda: source.streams[7].terminal)
    assert source.streams[7].ids == IDS[:1] and await calls(redis, "hmget") == 1


async def test_a_string_is_read_from_the_missing_token_on_when_the_log_was_trimmed(
    redis: Redis, relay: Relay
) -> None:
    source = Source(redis, relay, "w0")
    await source.start()
    for _ in range(2):
        await source.flush()
    await wait_until(lambda: source.all_have(2))
    for _ in range(3):
        await source.flush(lost=True)
    await source.spill()
    await source.flush()
    await wait_until(lambda: source.all_have(6))


async def test_how_much_of_the_prompt_was_cached_is_read_with_the_first_token(
    redis: Redis, relay: Relay
) -> None:
    """From the log, and from the request where the log was trimmed."""
    in_log, in_string = Source(redis, relay, "w0", 1), Source(redis, relay, "w1", 1)
    for source in (in_log, in_string):
        await source.start()
    in_log.num_cached = 48
    await redis.hset(KEYS.request("w1.0"), "cached", "32")  # type: ignore[misc]
    for source in (in_log, in_string):
        await source.flush(lost=True)
    await in_string.spill()
    relay.filler.request_fill([*in_log.streams, *in_string.streams])
    await wait_until(lambda: in_log.all_have(1) and in_string.all_have(1))
    assert [one.streams[0].prompt.num_cached for one in (in_log, in_string)] == [48, 32]


async def test_a_request_that_moved_is_read_where_it_is(redis: Redis, relay: Relay) -> None:
    """All that its new worker published was lost; the old one is silent."""
    old, new = Source(redis, relay, "w0", 1), Source(redis, relay, "w1", 1)
    await old.start()
    await old.flush()
    await wait_until(lambda: old.all_have(1))
    new.streams = old.streams
    new.num_flushes = 1
    new.attempt = 2
    await new.start()
    for _ in range(2):
        await new.flush(lost=True)
    relay.filler.request_fill(old.streams)
    await wait_until(lambda: new.all_have(3))


async def test_a_long_answer_is_filled_in_slices(redis: Redis, relay: Relay) -> None:
    """Its reader gets at most TOKENS_AT_ONCE at a time, and other tasks have their turn in between."""
    source, num_tokens = Source(redis, relay, "w0", 1), 2000
    [stream] = source.streams
    await source.start()
    one = tokens(0, 1)
    many = Tokens("w0.0", 1, 0, one.ids * num_tokens, one.logprobs * num_tokens)
    await redis.set(KEYS.tokens("w0.0"), pack_tokens(many))
    seen = [0]

    async def watch() -> None:
        while stream.num_tokens < num_tokens:
            await stream.changed.wait()
            stream.changed.clear()
            seen.append(stream.num_tokens)

    watcher = asyncio.create_task(watch())
    relay.filler.request_fill([stream])
    await asyncio.wait_for(watcher, 60)
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 2 * fill.TOKENS_AT_ONCE


async def test_an_end_that_comes_early_waits_for_the_tokens_before_it(redis: Redis, relay: Relay) -> None:
    source = Source(redis, relay, "w0", 1)
    await source.start()
    await source.flush()
    await wait_until(lambda: source.all_have(1))
    await source.flush(lost=True)
    end = Events("w0", 3, terminals=[Terminal("w0.0", "length", 2)], flush=2)
    await redis.publish(relay.channel, encode(end))
    await wait_until(lambda: source.streams[0].terminal)
    assert source.all_have(2)


# --- sources ------------------------------------------------------------------------------------------------


def message(number: int, flush: int, source: str = "w0") -> Events:
    return Events(source, number, terminals=[Terminal("r", "length", 0)], flush=flush)


def test_lost_messages_lie_after_the_last_flush_that_was_heard() -> None:
    heard = Sources()
    assert heard.note(message(1, 7), "c") is None
    assert heard.note(message(2, 9), "c") is None
    assert heard.note(message(4, 12), "c") == 9
    assert heard.note(Events("w0", 4, flush=12), "c") is None, "the last number, repeated"
    assert heard.note(Events("w0", 5, flush=13), "c") == 12
    assert heard.last_flush("w0", "c") == 13 and heard.last_flush("w0", "other") == 0


def test_a_source_is_remembered_however_long_it_is_silent() -> None:
    """It is forgotten only after MAX_SOURCES others were heard."""
    heard = Sources()
    heard.note(message(1, 1), "c")
    for i in range(fill.MAX_SOURCES - 1):
        heard.note(message(1, 1, f"w{i + 1}"), "c")
    assert heard.note(message(2, 2), "c") is None
    heard.note(message(1, 1, "one more"), "c")
    assert len(heard.last) == fill.MAX_SOURCES and heard.last_flush("w0", "c") == 2
