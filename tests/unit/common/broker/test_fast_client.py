import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.broker import client as access
from common.broker.fast_client import FastConnection, SerialClient
from deploy.broker import Broker
from tests.support import brokers


@pytest.fixture
async def line(broker: Broker) -> AsyncIterator[SerialClient]:
    async with access.connect(broker.url) as redis:
        one = SerialClient(redis)
        yield one
        one.hang_up()


async def identity(line: SerialClient) -> str:
    return str(await line.ask("CLIENT", "ID"))


async def test_words_of_every_kind_go_and_come(line: SerialClient) -> None:
    assert await line.ask("RPUSH", "wire", "é", b"\xff\0", -7) == 3
    assert await line.ask("LRANGE", "wire", 0, -1) == ["é".encode(), b"\xff\0", b"-7"]
    assert await line.ask("GET", "nothing") is None
    megabytes = b"x" * 2**23
    assert await line.ask("ECHO", megabytes) == megabytes
    await line.ask("DEL", "wire")


async def test_what_is_refused_is_raised_and_the_line_holds(line: SerialClient) -> None:
    before = await identity(line)
    with pytest.raises(ResponseError, match="unknown command"):
        await line.ask("NONSENSE")
    assert await identity(line) == before


async def test_a_lost_line_is_an_error_and_dialled_anew(line: SerialClient, redis: Redis) -> None:
    before = await identity(line)
    asked = asyncio.create_task(line.ask("BLPOP", "nothing", 0))
    while not (await redis.info("clients"))["blocked_clients"]:  # noqa: ASYNC110 (the broker is asked, no event of ours)
        await asyncio.sleep(0.01)
    await redis.client_kill_filter(_id=before)
    with pytest.raises(access.ERRORS):
        await asked
    assert await identity(line) != before


async def test_whoever_asks_next_gets_no_answer_of_one_who_went(line: SerialClient, redis: Redis) -> None:
    asked = asyncio.create_task(line.ask("BLPOP", "went", 0))
    while not (await redis.info("clients"))["blocked_clients"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    assert await line.ask("ECHO", "next") == b"next"
    await redis.lpush("went", "late")
    assert await line.ask("ECHO", "again") == b"again"
    await redis.delete("went")


async def test_a_broker_that_is_away_and_comes_back() -> None:
    with brokers.running() as one:
        async with access.connect(one.url) as redis:
            line = SerialClient(redis)
            assert await line.ask("PING") == b"PONG"
            with pytest.raises(access.ERRORS):
                await line.ask("SHUTDOWN", "NOSAVE", "NOW")
            with pytest.raises(access.ERRORS):
                await line.ask("PING")
            again = brokers.start(one)
            assert await line.ask("PING") == b"PONG"
            line.hang_up()
            again.kill()


async def test_a_password_is_said() -> None:
    with brokers.running("--requirepass", "correct") as locked:
        async with access.connect(f"redis://:correct@127.0.0.1:{locked.port}") as redis:
            line = SerialClient(redis)
            assert await line.ask("PING") == b"PONG"
            line.hang_up()


async def test_scripts_survive_a_broker_that_forgot_them(
    line: SerialClient, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twice.lua").write_text("return {KEYS[1], 2 * tonumber(ARGV[1])}\n")
    monkeypatch.setattr(access, "SCRIPTS", tmp_path)
    answer = line.script("twice")
    assert await answer(keys=["a"], args=[20]) == [b"a", 40]
    await redis.script_flush()
    assert await answer(keys=["a"], args=[4]) == [b"a", 8]


async def test_a_wire_hears_what_nobody_asked_for(redis: Redis) -> None:
    heard: asyncio.Queue[list[bytes]] = asyncio.Queue()
    wire = await FastConnection.dial(redis, heard.put_nowait)
    wire.say("SUBSCRIBE", "here")
    assert await heard.get() == [b"subscribe", b"here", 1]
    await redis.publish("here", b"\0one")
    assert await heard.get() == [b"message", b"here", b"\0one"]
    wire.close()
    with pytest.raises(access.ERRORS):
        await wire.over
