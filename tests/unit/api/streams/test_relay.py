"""The relay reads from Redis whatever events did not bring, and little else; it follows other channels."""

from dataclasses import replace

import pytest
from redis.asyncio import Redis

from api.streams import relay as relay_module
from api.streams.relay import Relay
from api.streams.stream import Stream
from common.broker.client import connect
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.events import Events, TokenColumns, Tokens, pack_tokens
from common.messages.records import pack_floats, pack_ids, pack_records
from common.messages.request import Generate, StoppingParams
from tests.support.events import IDS, KEYS, event_message, new_stream, tokens
from tests.support.token_columns import as_sent
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_for, wait_until

# --- relay --------------------------------------------------------------------------------------------------

SEQUENCES: list[
    tuple[str, list[bytes], bool]
] = [  # messages; whether the last one shows that something was missed
    ("from the first", [event_message(1, tokens(0, 1))], False),
    ("not from the first", [event_message(2, tokens(0, 1))], True),
    ("one by one", [event_message(1, tokens(0, 1)), event_message(2, tokens(1, 2))], False),
    ("one left out", [event_message(1, tokens(0, 1)), event_message(3, tokens(0, 1))], True),
    ("the last repeated", [event_message(1, tokens(0, 1)), event_message(1)], False),
    ("the last repeated, which was lost", [event_message(1, tokens(0, 1)), event_message(2)], True),
    ("the first repeated, which was lost", [event_message(1)], True),
    (
        "each source counts by itself",
        [event_message(1, tokens(0, 1)), event_message(1, tokens(1, 2), source="w1")],
        False,
    ),
    (
        "an old one again",
        [event_message(1, tokens(0, 1)), event_message(2, tokens(1, 2)), event_message(1, tokens(0, 1))],
        False,
    ),
    ("not a message", [b"\xc1"], True),
    (
        "lengths that differ",
        [event_message(1, Tokens("r", 1, 0, pack_ids([1, 2]), pack_floats([0.0]), ["a"]))],
        True,
    ),
    (
        "columns that differ in length",
        [encode(Events("w0", 1, columns=TokenColumns(["r"], [1], [1], b"", ["a"])))],
        True,
    ),
    (
        "a token of columns that comes too early",
        [event_message(1, tokens(0, 1)), event_message(2, tokens(2, 3))],
        True,
    ),
    (
        "a token of a newer run, in columns, in place of one that was shown",
        [event_message(1, tokens(0, 2)), event_message(2, tokens(2, 3)), event_message(3, tokens(2, 3, 2))],
        True,
    ),
    (
        "a token of an older run, in columns",
        [event_message(1, tokens(0, 2, 2)), event_message(2, tokens(2, 3))],
        False,
    ),
    ("a request that is not ours", [event_message(1, tokens(5, 6, request_id="x"))], False),
]


@pytest.mark.parametrize(
    ("messages", "missed"), [case[1:] for case in SEQUENCES], ids=[case[0] for case in SEQUENCES]
)
async def test_missed_messages_request_a_fill(messages: list[bytes], missed: bool) -> None:
    relay = Relay(PoolClient(connect("redis://127.0.0.1:1"), KEYS), "g0")
    relay.add(new_stream())
    for message in messages:
        relay.filler.doubtful.clear()
        list(relay.deliver(message))
    assert bool(relay.filler.doubtful) == missed


async def commit(redis: Redis, spilled: int, logged: int, request_id: str = "r") -> None:
    """Put the first tokens of the answer into the string, the others into the log of w0."""
    await redis.hset(  # type: ignore[misc]
        KEYS.request(request_id), mapping={"digest": "d", "worker": "w0", "attempt": 1, "base": 0}
    )
    if spilled:
        await redis.set(
            KEYS.tokens(request_id),
            pack_tokens(Tokens("", 1, 0, pack_ids(IDS[:spilled]), pack_floats([0.0] * spilled))),
        )
    for i in range(spilled, logged):
        await redis.xadd(
            KEYS.log("w0"),
            {"entry": encode(Events("w", 0, **as_sent([tokens(i, i + 1, request_id=request_id)])))},
        )


async def test_a_gap_is_filled_with_the_same_text(redis: Redis, relay: Relay) -> None:
    stream = new_stream()
    relay.add(stream)
    relay.note_admitted(stream)
    await commit(redis, 3, 6)
    await redis.publish(relay.channel, event_message(1, tokens(0, 1)))
    await redis.publish(relay.channel, event_message(2, tokens(4, 5)))
    await wait_until(lambda: stream.num_tokens == 6)
    await redis.publish(relay.channel, event_message(3, tokens(6, 7)))
    await redis.publish(relay.channel, event_message(5, tokens(8, 9)))
    await commit(redis, 9, 9)
    await wait_until(lambda: stream.num_tokens == 9)
    assert stream.ids == IDS[:9]
    assert stream.texts == [TOKENIZER.decode([i]) for i in IDS[:9]]


async def test_a_prompt_is_read_before_the_first_token_is_shown(redis: Redis, relay: Relay) -> None:
    """It is in Redis since the first token; if it is not, somebody wrote to the key."""
    fields = {"prompt_ids": pack_ids([28, 29, 30]), "prompt_logprobs": 1}
    whole, missing, short = (
        Stream(Generate(name, "", stopping=StoppingParams(100), **fields), model_tokenizer())  # type: ignore[arg-type]
        for name in ("r", "missing", "short")
    )
    records = pack_records(
        pack_ids([29, 30]), pack_floats([-0.5, -1.5]), pack_ids([7, 8]), pack_floats([-0.25, -1.0])
    )
    for stream in (whole, missing, short):
        relay.add(stream)
        relay.note_admitted(stream)
        await commit(redis, 0, 2, stream.request.request_id)
    await redis.hset(KEYS.request("r"), "prompt", records)  # type: ignore[arg-type, misc]
    await redis.hset(KEYS.request("short"), "prompt", records[:-1])  # type: ignore[arg-type, misc]
    assert not whole.add_event(tokens(0, 1)) and not whole.ids
    await redis.publish(
        relay.channel,
        event_message(1, tokens(0, 1), tokens(0, 1, request_id="missing"), tokens(0, 1, request_id="short")),
    )
    await wait_until(lambda: whole.num_tokens == 2 and missing.terminal and short.terminal)
    assert whole.prompt.tokens() == [(28, None, []), (29, -0.5, [(7, -0.25)]), (30, -1.5, [(8, -1.0)])]
    assert (
        whole.add_event(tokens(2, 3))
        and whole.ids == IDS[:3]
        and whole.texts == [TOKENIZER.decode([i]) for i in IDS[:3]]
    )
    assert {stream.terminal and stream.terminal.error for stream in (missing, short)} == {
        "the log-probabilities of its prompt cannot be read"
    }
    assert not missing.ids and not short.ids


async def test_a_lost_subscription_is_renewed(
    redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 60.0)
    stream = new_stream()
    relay.add(stream)
    relay.note_admitted(stream)
    await commit(redis, 0, 4)
    await redis.client_kill_filter(_type="pubsub")
    await wait_until(lambda: stream.num_tokens == 4)
    await redis.publish(relay.channel, event_message(1, tokens(4, 5)))
    await wait_until(lambda: stream.num_tokens == 5)


async def test_another_gateways_channel_is_followed(redis: Redis, relay: Relay) -> None:
    """It is subscribed again after a lost connection, and until the last follower unfollows it."""
    mine, theirs = KEYS.events("g0"), KEYS.events("g9")
    stream = new_stream()
    relay.add(stream)

    async def has_subscriber(channel: str) -> bool:
        return (await redis.pubsub_numsub(channel))[0][1] == 1  # type: ignore[no-any-return]

    for _ in range(2):
        relay.follow_channel(theirs)
    await wait_until(lambda: has_subscriber(theirs))
    await redis.publish(theirs, event_message(1, tokens(0, 1)))
    await wait_until(lambda: stream.num_tokens == 1)
    await redis.publish(mine, event_message(1, tokens(1, 2)))
    await wait_until(lambda: stream.num_tokens == 2)
    await redis.client_kill_filter(_type="pubsub")
    await wait_until(lambda: has_subscriber(theirs))
    await redis.publish(theirs, event_message(2, tokens(2, 3)))
    await wait_until(lambda: stream.num_tokens == 3)
    relay.unfollow_channel(theirs)
    assert await has_subscriber(theirs)
    relay.unfollow_channel(theirs)
    await wait_for(lambda: has_subscriber(theirs), False)
    assert (await redis.pubsub_numsub(mine))[0][1] == 1


# --- fill ---------------------------------------------------------------------------------------------------


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
