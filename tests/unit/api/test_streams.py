"""Fixtures of the relay's tests.
A stream takes events in order, twice, late, or with gaps; that of a beam search in any slices.
The relay reads from Redis whatever events did not bring, and little else; it follows other channels.
What a gateway offers to a broker that lost it, against real scripts.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from api.requests.request_scripts import OfferReply
from api.streams.relay import Relay
from api.streams.stream import Stream, all_outputs, is_absent
from api.streams.stream import new_stream as new_stream_of
from batcher import batcher_scripts
from common.broker.client import connect
from common.broker.committed import Committed, read
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.messages.codec import decode, encode
from common.messages.events import Events, Terminal, TokenColumns, Tokens, pack_tokens
from common.messages.records import (
    RECORD,
    pack_columns,
    pack_floats,
    pack_ids,
    pack_records,
    pack_sequences,
    unpack_records,
)
from common.messages.request import BeamParams, Cancel, Generate, Resume, StoppingParams
from tests.support.answers import SEQUENCES, TEXTS
from tests.support.broker_state import KEYS
from tests.support.events import IDS, as_sent, end, event_message, new_stream, tokens
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_for, wait_until


@pytest.fixture
async def relay(redis: Redis) -> AsyncIterator[Relay]:
    """A relay that has subscribed."""
    running = Relay(PoolClient(redis, KEYS), "g0")
    task = asyncio.create_task(running.run())
    await running.subscribed.wait()
    yield running
    task.cancel()
    await asyncio.wait([task])


# --- stream -------------------------------------------------------------------------------------------------

START: int = TOKENIZER.token_to_id("<|im_start|>")  # type: ignore[assignment]


STREAMS: list[
    tuple[str, list[Tokens | Terminal], list[bool], list[int], bool]
] = [  # events; whether each fits; ids afterwards; whether the stream has ended
    ("in order", [tokens(0, 2), tokens(2, 3), end(3)], [True, True, True], IDS[:3], True),
    ("a repeat", [tokens(0, 2), tokens(0, 2), tokens(2, 3)], [True, True, True], IDS[:3], False),
    ("an old part again", [tokens(0, 3), tokens(1, 2)], [True, True], IDS[:3], False),
    ("an overlap", [tokens(0, 2), tokens(1, 4)], [True, True], IDS[:4], False),
    ("a gap", [tokens(0, 2), tokens(3, 4)], [True, False], IDS[:2], False),
    ("a gap at the start", [tokens(1, 2)], [False], [], False),
    ("an end too early", [tokens(0, 2), end(3)], [True, False], IDS[:2], False),
    ("nothing after the end", [tokens(0, 2), end(2), tokens(2, 3), end(3)], [True] * 4, IDS[:2], True),
    ("a lower attempt", [tokens(0, 2, 2), tokens(2, 3, 1)], [True, True], [i + 1 for i in IDS[:2]], False),
    ("a higher attempt", [tokens(0, 2), tokens(2, 3, 2)], [True, True], [*IDS[:2], IDS[2] + 1], False),
    ("shown ids are facts", [tokens(0, 2), tokens(0, 3, 2)], [True, False], IDS[:2], False),
    ("an answer of fewer tokens", [tokens(0, 2), end(1)], [True, False], IDS[:2], False),
    (
        "a lower attempt after a gap",
        [tokens(0, 1), tokens(2, 3, 2), tokens(1, 2, 1)],
        [True, False, True],
        IDS[:1],
        False,
    ),
]


@pytest.mark.parametrize(
    ("events", "fits", "ids", "ended"), [case[1:] for case in STREAMS], ids=[case[0] for case in STREAMS]
)
async def test_a_stream_takes_each_token_once(
    events: list[Tokens | Terminal], fits: list[bool], ids: list[int], ended: bool
) -> None:
    stream = new_stream()
    assert [
        stream.add_event(event) if isinstance(event, Tokens) else stream.end(event) for event in events
    ] == fits
    assert (stream.ids, stream.terminal is not None, stream.ended.is_set()) == (ids, ended, ended)


@pytest.mark.parametrize(
    ("stopping", "ids", "ready"),
    [
        ({}, IDS[:3], 3),
        ({}, [*IDS[:2], 2], 2),
        ({}, [*IDS[:2], START], 3),  # another special token, as [TOOL_CALLS] and <|channel|> are
        ({"stop_ids": [START]}, [*IDS[:2], START], 2),
        ({"ignore_eos": True}, [*IDS[:2], 2], 3),
        ({"stop": [" one"]}, IDS[:2], 1),
        ({"stop": ["ne tw"]}, IDS[:3], 2),
        ({"stop": ["none"]}, IDS[:3], 3),
        ({}, [IDS[0]] * 100, 99),
    ],
)
async def test_only_a_token_that_may_be_the_last_one_is_held_back(
    stopping: dict[str, Any], ids: list[int], ready: int
) -> None:
    stream = new_stream(stopping=stopping)
    stream.add_event(
        Tokens(
            "r",
            1,
            0,
            pack_ids(ids),
            pack_floats([0.0] * len(ids)),
            [TOKENIZER.decode([i], skip_special_tokens=False) for i in ids],
        )
    )
    assert stream.num_ready == ready
    stream.end(Terminal("r", "error", 0, "gone"))
    assert stream.num_ready == len(ids)


# --- beams --------------------------------------------------------------------------------------------------

RECORDS = pack_sequences(SEQUENCES)
NUM_RECORDS = len(RECORDS) // RECORD.size


def new_search(num_returned: int = 4) -> Stream:
    beams = BeamParams(4, num_returned=num_returned)
    return new_stream_of(
        Generate("r", "d", pack_ids([28]), StoppingParams(99, stop=["zzz"]), beams=beams), model_tokenizer()
    )


def feed(search: Stream, num_records: int, slice_size: int) -> None:
    ids, logprobs, _ = unpack_records(RECORDS)
    for begin in range(0, num_records, slice_size):
        end = min(begin + slice_size, num_records)
        search.add_committed(begin, ids[begin:end], logprobs[begin:end], [])


@pytest.mark.parametrize("slice_size", [1, 2, 5, NUM_RECORDS])
@pytest.mark.parametrize("num_returned", [1, 3, 4])
def test_each_sequence_is_an_answer_of_its_own(slice_size: int, num_returned: int) -> None:
    search = new_search(num_returned)
    assert not search.end(Terminal("r", "eos_token", NUM_RECORDS)), "its records are read first"
    feed(search, NUM_RECORDS, slice_size)
    assert search.finished and search.ended.is_set()
    outputs = all_outputs([search])
    assert len(outputs) == num_returned
    for output, expected, text in zip(outputs, SEQUENCES, TEXTS, strict=False):
        assert (output.ids, output.logprobs) == (expected.ids, expected.logprobs)
        assert output.terminal and output.terminal.reason == expected.reason
        assert output.text == text and "".join(output.texts).startswith(text)
        assert not is_absent(output)


@pytest.mark.parametrize("num_records", [0, 3, NUM_RECORDS - 1])
def test_a_sequence_that_is_cut_fails_the_search(num_records: int) -> None:
    search = new_search()
    feed(search, num_records, 2)
    assert search.end(Terminal("r", "length", num_records))
    assert search.terminal and not search.finished and "cannot be read" in search.terminal.error
    assert all(output.terminal for output in all_outputs([search]))


# --- relay --------------------------------------------------------------------------------------------------

TOLD: list[
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


@pytest.mark.parametrize(("messages", "missed"), [case[1:] for case in TOLD], ids=[case[0] for case in TOLD])
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


# --- offers -------------------------------------------------------------------------------------------------


async def publish(relay: Relay, number: int, *events: Tokens | Terminal, source: str = "w1") -> None:
    """A message that has come."""
    list(relay.deliver(event_message(number, *events, source=source)))


async def shown(relay: Relay, num_tokens: int) -> Stream:
    """A stream with tokens that a worker made."""
    stream = new_stream(channel=relay.channel, gateway="g0")
    relay.add(stream)
    relay.note_admitted(stream)
    await publish(relay, 1, tokens(0, num_tokens))
    return stream


async def put(redis: Redis, num_tokens: int, worker: str = "w1", attempt: int = 1, base: int = 0) -> None:
    """The request as the broker has it."""
    fields = {"digest": "d", "worker": worker, "attempt": attempt, "base": base, "width": 1, "cached": 0}
    await redis.hset(KEYS.request("r"), mapping=fields)  # type: ignore[misc]
    if num_tokens:
        await redis.set(KEYS.tokens("r"), pack_tokens(tokens(0, num_tokens)))


async def offer(relay: Relay, stream: Stream) -> None:
    relay.filler.offers.request_offer([stream])
    await wait_until(lambda: relay.filler.offers.num_offers)


async def committed(redis: Redis) -> Committed:
    return (await read(PoolClient(redis, KEYS), ["r"]))["r"]


async def ids(redis: Redis) -> Sequence[int]:
    return unpack_records((await committed(redis)).records)[0]


async def resumes(redis: Redis) -> list[str]:
    """What the batcher is told to resume."""
    entries = await redis.xrange(KEYS.control)
    return [decode(Resume, fields[b"resume"]).request_id for _, fields in entries]


async def test_a_request_that_is_gone_is_queued_again_after_its_tokens(redis: Redis, relay: Relay) -> None:
    stream = await shown(relay, 3)
    stream.answer = b"an answer"
    stream.prompt.num_cached = 16
    relay.filler.request_fill([stream])
    await wait_until(lambda: relay.filler.offers.num_offers)
    [(entry_id, fields)] = await redis.xrange(KEYS.requests)
    request = decode(Generate, fields[b"generate"])
    assert (request.request_id, request.num_shown, request.digest) == ("r", 3, "d")
    assert 0 < request.ttl_ms <= stream.request.ttl_ms
    taken = str(len(fields[b"generate"])).encode()
    assert await redis.hget(KEYS.places, "bytes:standard") == taken  # type: ignore[misc]
    kept = await redis.hmget(KEYS.request("r"), ["entry", "answer", "cached"])  # type: ignore[misc]
    assert kept == [entry_id, b"an answer", b"16"]
    state = await committed(redis)
    assert (await ids(redis), state.worker, state.attempt, state.base) == (IDS[:3], "w1", 1, 3)
    assert not stream.terminal
    await offer(relay, stream)
    assert await redis.xlen(KEYS.requests) == 1


async def test_a_run_that_began_before_the_shown_tokens_is_void(redis: Redis, relay: Relay) -> None:
    """Its worker made other tokens than the one that the broker forgot."""
    stream = await shown(relay, 5)
    await put(redis, 2, "w2", attempt=2, base=2)
    await redis.xadd(KEYS.log("w2"), {"entry": encode(Events("w", 0, [tokens(2, 4, 2)]))})
    await publish(relay, 1, tokens(2, 3, 2), source="w2")
    await publish(relay, 2, tokens(3, 6, 2), source="w2")
    await wait_until(lambda: relay.filler.offers.num_offers)
    state = await committed(redis)
    assert (await ids(redis), state.worker, state.attempt, state.base) == (IDS[:5], "", 3, 5)
    assert await resumes(redis) == ["r"]
    await publish(relay, 3, tokens(5, 7, 2), source="w2")
    assert stream.ids == IDS[:5]
    await publish(relay, 1, tokens(5, 7, 3), source="w3")
    assert stream.ids == [*IDS[:5], IDS[5] + 2, IDS[6] + 2]


async def test_a_result_with_other_tokens_is_withdrawn(redis: Redis, relay: Relay) -> None:
    stream = await shown(relay, 3)
    await put(redis, 0, "w2", attempt=2)
    other = [token_id + 1 for token_id in IDS[:2]]
    records = pack_columns(other, [0.0, 0.0], [])
    end_with = Terminal("r", "length", 2)
    call = batcher_scripts.finish(KEYS, end_with, own_epoch=5, kept_ms=60_000, channel="", payload=b"")
    await run_script(redis, call)
    await redis.set(KEYS.tokens("r"), records)
    await publish(relay, 2, end(2))
    await wait_until(lambda: relay.filler.offers.num_offers)
    state = await committed(redis)
    assert (state.terminal, state.num_final, state.worker) == ("", 0, "")
    assert (await ids(redis), await redis.xlen(KEYS.requests)) == (IDS[:3], 1)
    assert not stream.terminal and not stream.has_gap


async def test_tokens_of_a_former_reader_give_way(redis: Redis, relay: Relay) -> None:
    """The newest one was shown other tokens, after the broker lost those."""
    stream = await shown(relay, 3)
    await put(redis, 0, "w2", attempt=2)
    await redis.hset(KEYS.request("r"), "reader", "1")  # type: ignore[misc]
    await redis.set(KEYS.tokens("r"), pack_tokens(tokens(0, 2, attempt=2)))
    before = await committed(redis)
    await offer(relay, stream)
    assert (await committed(redis), await resumes(redis)) == (before, [])
    assert stream.terminal and stream.terminal.error_type == "superseded"


async def test_log_probabilities_of_the_likeliest_tokens_are_offered(redis: Redis, relay: Relay) -> None:
    stream = new_stream(top_n_tokens=2)
    relay.add(stream)
    relay.note_admitted(stream)
    stream.append([5, 6], [-0.5, -1.0], ["a", "b"], [[(5, -0.5), (7, -2.0)], [(6, -1.0), (8, -3.0)]])
    await offer(relay, stream)
    assert unpack_records((await committed(redis)).records, 3) == ([5, 6], [-0.5, -1.0], stream.tops)


@pytest.mark.parametrize("ends", ["terminal", "released"])
async def test_a_request_that_ends_while_it_is_offered_is_cancelled(
    redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The offer has queued it again, and nobody waits for it."""
    stream = await shown(relay, 3)
    send = relay.filler.offers.send

    async def send_and_end(*args: Any) -> OfferReply:
        answer = await send(*args)
        if ends == "released":
            stream.released = True
        else:
            stream.end(end(3))
        return answer

    monkeypatch.setattr(relay.filler.offers, "send", send_and_end)
    relay.filler.offers.request_offer([stream])
    [(_, fields)] = await wait_until(lambda: redis.xrange(KEYS.control))
    assert decode(Cancel, fields[b"cancel"]).request_id == "r"
    assert (await committed(redis)).cancelled
