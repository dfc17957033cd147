"""What a relay makes of messages that come whole, twice, late, out of order or not at all."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.inference import relay as relay_module
from api.inference.relay import Relay
from api.inference.stream import Stream
from api.lifecycle import Gateway
from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.events import Events, LogEntry, Terminal, Tokens
from common.messages.packing import pack_floats, pack_ids, unpack_ids
from common.messages.records import pack_records, pack_tokens
from common.messages.request import Generate, StoppingParams
from deploy.serve.broker import Broker
from tests.support.fleet.gateways import model_tokenizer, ready, serving, stream
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.waiting import wait_until

TOKENIZER = model_tokenizer().backend
IDS: list[int] = TOKENIZER.encode(" zero one two three four five six seven eight nine").ids
KEYS = Keys("default")


def tokens(first: int, last: int, attempt: int = 1, request_id: str = "r") -> Tokens:
    """Tokens `first` up to `last`, exclusive, of the scripted answer; attempt n adds n - 1 to each id, so
    that it shows.
    """
    ids = [token_id + attempt - 1 for token_id in IDS[first:last]]
    return Tokens(
        request_id,
        attempt,
        first,
        pack_ids(ids),
        pack_floats([0.0] * len(ids)),
        [TOKENIZER.decode([i]) for i in ids],
    )


def new_stream(request_id: str = "r", stopping: dict[str, Any] | None = None, **options: Any) -> Stream:
    limits = StoppingParams(100, **stopping or {})
    return Stream(Generate(request_id, "", pack_ids([28]), limits, **options), model_tokenizer())


def end(num_tokens: int, request_id: str = "r") -> Terminal:
    return Terminal(request_id, "length", num_tokens)


STREAMS: list[
    tuple[str, list[Tokens | Terminal], list[bool], list[int], bool]
] = [  # what comes; whether it fits; ids then; ended
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
    ("shown ids are facts", [tokens(0, 2), tokens(0, 3, 2)], [True, True], [*IDS[:2], IDS[2] + 1], False),
    (
        "a lower attempt after a gap",
        [tokens(0, 1), tokens(2, 3, 2), tokens(1, 2, 1)],
        [True, False, True],
        IDS[:1],
        False,
    ),
]


@pytest.mark.parametrize(
    ("comes", "fits", "ids", "ended"), [case[1:] for case in STREAMS], ids=[case[0] for case in STREAMS]
)
async def test_a_stream_takes_each_token_once(
    comes: list[Tokens | Terminal], fits: list[bool], ids: list[int], ended: bool
) -> None:
    one = new_stream()
    assert [one.add_event(word) if isinstance(word, Tokens) else one.end(word) for word in comes] == fits
    assert (one.ids, one.terminal is not None, one.ended.is_set()) == (ids, ended, ended)


@pytest.mark.parametrize(
    ("stopping", "ids", "ready"),
    [
        ({}, IDS[:3], 3),
        ({}, [*IDS[:2], 2], 2),
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
    one = new_stream(stopping=stopping)
    one.add_event(
        Tokens(
            "r",
            1,
            0,
            pack_ids(ids),
            pack_floats([0.0] * len(ids)),
            [TOKENIZER.decode([i], skip_special_tokens=False) for i in ids],
        )
    )
    assert one.num_ready == ready
    one.end(Terminal("r", "error", 0, "gone"))
    assert one.num_ready == len(ids)


def say(sequence: int, *words: Tokens | Terminal, source: str = "w0") -> bytes:
    said = [word for word in words if isinstance(word, Tokens)]
    return encode(Events(source, sequence, said, [word for word in words if isinstance(word, Terminal)]))


SEQUENCES: list[
    tuple[str, list[bytes], bool]
] = [  # messages; whether the last one shows that something was missed
    ("from the first", [say(1, tokens(0, 1))], False),
    ("not from the first", [say(2, tokens(0, 1))], True),
    ("one by one", [say(1, tokens(0, 1)), say(2, tokens(1, 2))], False),
    ("one left out", [say(1, tokens(0, 1)), say(3, tokens(0, 1))], True),
    ("the last repeated", [say(1, tokens(0, 1)), say(1)], False),
    ("the last repeated, which was lost", [say(1, tokens(0, 1)), say(2)], True),
    ("the first repeated, which was lost", [say(1)], True),
    ("each source counts by itself", [say(1, tokens(0, 1)), say(1, tokens(1, 2), source="w1")], False),
    ("an old one again", [say(1, tokens(0, 1)), say(2, tokens(1, 2)), say(1, tokens(0, 1))], False),
    ("not a message", [b"\xc1"], True),
    ("lengths that differ", [say(1, Tokens("r", 1, 0, pack_ids([1, 2]), pack_floats([0.0]), ["a"]))], True),
    (
        "likeliest tokens of none",
        [say(1, Tokens("r", 1, 0, b"", b"", [], pack_ids([1]), pack_floats([0.0])))],
        True,
    ),
    (
        "half a likeliest token",
        [say(1, Tokens("r", 1, 0, pack_ids([1]), pack_floats([0.0]), ["a"], b"abc", b"abc"))],
        True,
    ),
    ("half an id", [say(1, Tokens("r", 1, 0, b"abc", b"", []))], True),
    ("a request that is not ours", [say(1, tokens(5, 6, request_id="x"))], False),
]


@pytest.mark.parametrize(
    ("messages", "missed"), [case[1:] for case in SEQUENCES], ids=[case[0] for case in SEQUENCES]
)
async def test_gaps_request_fills(messages: list[bytes], missed: bool) -> None:
    relay = Relay(connect("redis://127.0.0.1:1"), KEYS, "g0")
    relay.add(new_stream())
    for message in messages:
        relay.to_fill.clear()
        relay.on_message(message)
    assert bool(relay.to_fill) == missed


# --- filling ------------------------------------------------------------------------------------------------


@pytest.fixture
async def redis(broker: Broker) -> AsyncIterator[Redis]:
    async with connect(broker.url) as client:
        yield client


@pytest.fixture
async def relay(redis: Redis) -> AsyncIterator[Relay]:
    one = Relay(redis, KEYS, "g0")
    task = asyncio.create_task(one.run())
    await one.subscribed.wait()
    yield one
    task.cancel()
    await asyncio.wait([task])


async def commit(redis: Redis, spilled: int, logged: int, request_id: str = "r") -> None:
    """The first tokens of the answer stand in the string, the others in the log of w0."""
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
            KEYS.log("w0"), {"entry": encode(LogEntry([tokens(i, i + 1, request_id=request_id)]))}
        )


async def test_a_gap_is_filled_with_the_same_text(redis: Redis, relay: Relay) -> None:
    one = new_stream()
    relay.add(one)
    relay.admitted(one)
    await commit(redis, 3, 6)
    await redis.publish(relay.channel, say(1, tokens(0, 1)))
    await redis.publish(relay.channel, say(2, tokens(4, 5)))
    await wait_until(lambda: one.num_tokens == 6)
    await redis.publish(relay.channel, say(3, tokens(6, 7)))
    await redis.publish(relay.channel, say(5, tokens(8, 9)))
    await commit(redis, 9, 9)
    await wait_until(lambda: one.num_tokens == 9)
    assert one.ids == IDS[:9]
    assert one.texts == [TOKENIZER.decode([i]) for i in IDS[:9]]


@pytest.mark.parametrize("garbage", [b"not JSON", b"5", b'{"ids": 5, "logprobs": ["a"]}', b"\xff"])
async def test_an_overwritten_result_ends_its_own_stream_only(
    redis: Redis, relay: Relay, garbage: bytes
) -> None:
    spoilt, other = new_stream(), new_stream("other")
    for one in (spoilt, other):
        relay.add(one)
        relay.admitted(one)
        await commit(redis, 3, 3, one.request.request_id)
    await redis.hset(KEYS.request("r"), "terminal", "length")  # type: ignore[misc]
    await redis.set(KEYS.result("r"), garbage)
    relay.request_fill([spoilt, other])
    await wait_until(lambda: spoilt.terminal and other.num_tokens == 3)
    assert spoilt.terminal.error == "its result cannot be read" and not other.terminal  # type: ignore[union-attr]


async def test_a_prompt_is_read_before_the_first_token_is_shown(redis: Redis, relay: Relay) -> None:
    """It stands in Redis since the first token; where it does not, somebody wrote to the key."""
    asked = {"prompt_ids": pack_ids([28, 29, 30]), "prompt_logprobs": 1}
    one, missing, short = (
        Stream(Generate(name, "", stopping=StoppingParams(100), **asked), model_tokenizer())  # type: ignore[arg-type]
        for name in ("r", "missing", "short")
    )
    records = pack_records(
        pack_ids([29, 30]), pack_floats([-0.5, -1.5]), pack_ids([7, 8]), pack_floats([-0.25, -1.0])
    )
    for each in (one, missing, short):
        relay.add(each)
        relay.admitted(each)
        await commit(redis, 0, 2, each.request.request_id)
    await redis.hset(KEYS.request("r"), "prompt", records)  # type: ignore[arg-type, misc]
    await redis.hset(KEYS.request("short"), "prompt", records[:-1])  # type: ignore[arg-type, misc]
    assert not one.add_event(tokens(0, 1)) and not one.ids
    await redis.publish(
        relay.channel,
        say(1, tokens(0, 1), tokens(0, 1, request_id="missing"), tokens(0, 1, request_id="short")),
    )
    await wait_until(lambda: one.num_tokens == 2 and missing.terminal and short.terminal)
    assert one.prompt_tokens() == [(28, None, []), (29, -0.5, [(7, -0.25)]), (30, -1.5, [(8, -1.0)])]
    assert (
        one.add_event(tokens(2, 3))
        and one.ids == IDS[:3]
        and one.texts == [TOKENIZER.decode([i]) for i in IDS[:3]]
    )
    assert {each.terminal and each.terminal.error for each in (missing, short)} == {
        "the log-probabilities of its prompt cannot be read"
    }
    assert not missing.ids and not short.ids


async def test_an_answer_that_failed_before_its_first_token_has_no_prompt(redis: Redis, relay: Relay) -> None:
    told, filled = new_stream("told", prompt_logprobs=0), new_stream("filled", prompt_logprobs=0)
    for each in (told, filled):
        relay.add(each)
        relay.admitted(each)
        await commit(redis, 0, 0, each.request.request_id)
    assert told.end(Terminal("told", "error", 0, "gone"))
    await redis.hset(KEYS.request("filled"), "terminal", "error")  # type: ignore[misc]
    await redis.set(KEYS.result("filled"), b'{"error": "gone"}')
    relay.request_fill([filled])
    await wait_until(lambda: filled.terminal)
    assert told.terminal and filled.terminal and told.terminal.error == filled.terminal.error == "gone"


async def test_nothing_is_read_before_the_request_is_admitted(redis: Redis, relay: Relay) -> None:
    """Until then Redis does not know the request, which must not end it."""
    early, other = new_stream("early"), new_stream("other")
    relay.add(early)
    relay.add(other)
    relay.admitted(other)
    relay.request_fill([early, other])
    await wait_until(lambda: other.terminal)
    assert other.terminal and other.terminal.error == "the request is not known any more"
    assert not early.terminal
    await commit(redis, 2, 2, "early")
    relay.admitted(early)
    await wait_until(lambda: early.num_tokens == 2)


async def test_fills_do_not_pile_up(redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[list[str]] = []
    going = asyncio.Event()

    async def slow_read(redis: Redis, keys: Keys, request_ids: list[str]) -> dict[str, Any]:
        reads.append(sorted(request_ids))
        await going.wait()
        return {}

    monkeypatch.setattr(relay_module, "read", slow_read)
    streams = [new_stream(str(i)) for i in range(3)]
    for one in streams:
        relay.add(one)
        relay.admitted(one)
    relay.request_fill(streams[:1])
    await wait_until(lambda: len(reads) == 1)
    for _ in range(100):
        relay.request_fill(streams[1:])
        relay.request_fill(streams[2:])
    relay.remove(streams[1])
    going.set()
    await wait_until(lambda: len(reads) == 2 and not relay.fill_requested.is_set())
    assert reads == [["0"], ["2"]]


async def test_a_silent_stream_is_filled(redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.1)
    one = new_stream()
    relay.add(one)
    relay.admitted(one)
    await commit(redis, 1, 4)
    await wait_until(lambda: one.num_tokens == 4)


async def test_a_cut_subscription_comes_back(
    redis: Redis, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 60.0)
    one = new_stream()
    relay.add(one)
    relay.admitted(one)
    await commit(redis, 0, 4)
    await redis.client_kill_filter(_type="pubsub")
    await wait_until(lambda: one.num_tokens == 4)
    await redis.publish(relay.channel, say(1, tokens(4, 5)))
    await wait_until(lambda: one.num_tokens == 5)


# --- whole streams ------------------------------------------------------------------------------------------

TEXTS = [
    "The lighthouse keeper counted the ships every evening, one by one, "
    "and wrote their names in a blue book.",
    "🙂🚀🎉 emoji party: 👩‍👩‍👧‍👦 🏳️‍🌈 and नमस्ते, आप कैसे हैं? 日本の首都は東京です。",
    "def main():\n\tpass\n\n\n   # e\u0301 \u200b end",
]


def scripted(request: Generate) -> Answer:
    """The prompt is the number of the text."""
    number = int(TOKENIZER.decode(unpack_ids(request.prompt_ids)).split()[-1])
    return Answer(TOKENIZER.encode(TEXTS[number % len(TEXTS)]).ids)


async def converse(client: httpx.AsyncClient, count: int) -> list[bytes]:
    bodies = [{"inputs": f"text {i}", "parameters": {"details": True}} for i in range(count)]
    return await asyncio.gather(*(stream(client, body) for body in bodies))


async def undisturbed(broker: Broker, count: int) -> list[bytes]:
    async with working(broker.url, TOKENIZER, scripted), serving(broker.url) as (gateway, client):
        await ready(gateway)
        return await converse(client, count)


async def nothing_left(gateway: Gateway, worker: FakeWorker) -> None:
    """Neither in the gateway nor in Redis."""
    await wait_until(
        lambda: not gateway.pool.relay.streams and not gateway.pool.admission.cleanups and not worker.live
    )
    assert not gateway.pool.relay.to_fill
    kinds = {key.decode().split(":")[2] for key in await worker.redis.keys("*")}
    assert kinds <= {
        "log",
        "reports",
        "worker",
        "workers",
        "gateway",
        "processes",
        "control",
        "requests",
        "submit",
        "metrics",
    }
    assert await worker.redis.xlen(KEYS.requests) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_lost_messages_change_no_byte(broker: Broker, seed: int) -> None:
    expected = await undisturbed(broker, 12)
    chance = random.Random(seed)
    async with (
        working(broker.url, TOKENIZER, scripted, step_s=0.005) as worker,
        serving(broker.url, lambda: chance.random() < 0.1) as (gateway, client),
    ):
        await ready(gateway)
        assert await converse(client, 12) == expected
        assert gateway.pool.relay.num_fills > 1
        await nothing_left(gateway, worker)


async def test_streams_finish_with_all_messages_lost(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(relay_module, "AUDIT_S", 0.1)
    expected = await undisturbed(broker, 3)
    async with (
        working(broker.url, TOKENIZER, scripted) as worker,
        serving(broker.url, lambda: True) as (gateway, client),
    ):
        await ready(gateway)
        assert await converse(client, 3) == expected
        await nothing_left(gateway, worker)


async def test_cut_connections_change_no_byte(broker: Broker) -> None:
    expected = await undisturbed(broker, 6)
    async with (
        working(broker.url, TOKENIZER, scripted, step_s=0.01) as worker,
        serving(broker.url) as (gateway, client),
    ):
        await ready(gateway)
        talk = asyncio.create_task(converse(client, 6))
        await wait_until(lambda: len(worker.live) == 6)
        for _ in range(3):
            await worker.redis.client_kill_filter(_type="pubsub")
            await wait_until(lambda: not gateway.pool.relay.subscribed.is_set())
            await wait_until(gateway.pool.relay.subscribed.is_set)
        assert await talk == expected
        await nothing_left(gateway, worker)


async def test_requests_of_clients_that_leave_are_cancelled(broker: Broker) -> None:
    """In the middle of a stream, before its first token, while waiting for a whole answer, and before
    anything was said.
    """
    answers = {
        "text 0": Answer(IDS, ends=False),
        "text 1": Answer([], ends=False),
        "text 2": Answer(IDS, ends=False),
        "text 3": Answer(IDS, ends=False),
    }

    def answer(request: Generate) -> Answer:
        return answers[TOKENIZER.decode(unpack_ids(request.prompt_ids))]

    async def read_some() -> None:
        async with client.stream("POST", "/generate_stream", json={"inputs": "text 0"}) as response:
            async for _ in response.aiter_raw():
                return

    async with working(broker.url, TOKENIZER, answer) as worker, serving(broker.url) as (gateway, client):
        await ready(gateway)
        await read_some()
        for path, text in (("/generate_stream", "text 1"), ("/generate", "text 2")):
            task = asyncio.create_task(client.post(path, json={"inputs": text}))
            await wait_until(
                lambda text=text: (  # type: ignore[misc]
                    worker.seen and TOKENIZER.decode(unpack_ids(worker.seen[-1].prompt_ids)) == text
                )
            )
            task.cancel()
            await asyncio.wait([task])
        await nothing_left(gateway, worker)
        await worker.pause()
        task = asyncio.create_task(client.post("/generate", json={"inputs": "text 3"}))
        await wait_until(lambda: worker.redis.xlen(KEYS.requests))
        task.cancel()
        await wait_until(
            lambda: worker.redis.hexists(KEYS.request(list(gateway.pool.relay.streams)[-1]), "cancel")
        )
        worker.going.set()
        await wait_until(lambda: len(worker.seen) == 4)
        await nothing_left(gateway, worker)


async def test_a_cancel_waits_for_the_broker(broker: Broker) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS, ends=False)) as worker,
        serving(broker.url) as (gateway, client),
    ):
        await ready(gateway)
        task = asyncio.create_task(client.post("/generate", json={"inputs": "a"}))
        await wait_until(lambda: worker.seen)
        await worker.redis.config_set("maxmemory", 1)
        try:
            task.cancel()
            await wait_until(lambda: gateway.pool.admission.cleanups)
        finally:
            await worker.redis.config_set("maxmemory", 0)
        await nothing_left(gateway, worker)


# --- channels of other gateways -----------------------------------------------------------------------------


async def test_another_gateways_channel_is_followed(redis: Redis, relay: Relay) -> None:
    """From then on, through a lost connection, and no longer than it is needed."""
    mine, theirs = KEYS.events("g0"), KEYS.events("g9")
    one = new_stream()
    relay.add(one)

    async def heard(channel: str) -> bool:
        return (await redis.pubsub_numsub(channel))[0][1] == 1  # type: ignore[no-any-return]

    for _ in range(2):
        relay.follow(theirs)
    await wait_until(lambda: heard(theirs))
    await redis.publish(theirs, say(1, tokens(0, 1)))
    await wait_until(lambda: one.num_tokens == 1)
    await redis.publish(mine, say(1, tokens(1, 2)))
    await wait_until(lambda: one.num_tokens == 2)
    await redis.client_kill_filter(_type="pubsub")
    await wait_until(lambda: heard(theirs))
    await redis.publish(theirs, say(2, tokens(2, 3)))
    await wait_until(lambda: one.num_tokens == 3)
    relay.unfollow(theirs)
    assert await heard(theirs)
    relay.unfollow(theirs)

    async def left() -> bool:
        return not await heard(theirs)

    await wait_until(left)
    assert (await redis.pubsub_numsub(mine))[0][1] == 1
