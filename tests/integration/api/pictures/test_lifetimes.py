"""How long the broker keeps pictures: while a request that has them lives, and a moment longer."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.pictures.keep import hold_pictures, keep_picture, let_go_pictures
from common.broker.lua import run_script
from common.messages.request import Generate
from common.settings.fixed import FixedLimits
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS
from tests.support.fleet.scripted_worker import Answer, FakeWorker
from tests.support.pictures.gateways import data_url, image_part, png, showing, user
from tests.support.pictures.processors import make_processor
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
LINGER_MS = 30_000
ENDLESS = Answer([40], ends=False)
MAX = 1000


def body(content: bytes, **more: Any) -> dict[str, Any]:
    return {"messages": user("What?", image_part(data_url(content))), "max_tokens": 9, **more}


async def keep(redis: Redis, digest: str, content: bytes, max_bytes: int = MAX) -> str:
    return await run_script(redis, keep_picture(KEYS, digest, content=content, max_bytes=max_bytes))


async def left_ms(redis: Redis, digest: str) -> int:
    return int(await redis.pttl(KEYS.picture(digest)))


async def test_a_picture_is_kept_as_long_as_the_last_request_that_holds_it(redis: Redis) -> None:
    assert await keep(redis, "a", b"") == "missing"
    assert await keep(redis, "a", b"red") == "kept"
    assert 0 < await left_ms(redis, "a") <= LINGER_MS
    for name, life_ms in (("r1", 100_000), ("r2", 200_000), ("r3", 50_000)):
        assert await run_script(redis, hold_pictures(KEYS, name, ["a", "a"], life_ms=life_ms))
    assert 190_000 < await left_ms(redis, "a") <= 200_000
    assert await keep(redis, "a", b"") == "kept"  # another request has it, and shortens nothing
    assert await left_ms(redis, "a") > 190_000
    await run_script(redis, let_go_pictures(KEYS, "r2", ["a"]))
    assert 90_000 < await left_ms(redis, "a") <= 100_000
    for name in ("r1", "r3"):
        await run_script(redis, let_go_pictures(KEYS, name, ["a"]))
    assert 0 < await left_ms(redis, "a") <= LINGER_MS
    assert await redis.exists(KEYS.picture_holders("a")) == 0
    assert 0 < await redis.pttl(KEYS.pictures) <= LINGER_MS


async def test_a_request_holds_all_of_its_pictures_or_none(redis: Redis) -> None:
    await keep(redis, "a", b"red")
    assert not await run_script(redis, hold_pictures(KEYS, "r1", ["a", "lost"], life_ms=99_000))
    assert await left_ms(redis, "a") <= LINGER_MS
    await run_script(redis, let_go_pictures(KEYS, "r1", ["a", "lost"]))
    assert await redis.exists(KEYS.picture("lost")) == 0


async def test_pictures_of_the_pool_have_a_bound_and_each_counts_once(redis: Redis) -> None:
    assert await keep(redis, "a", bytes(600)) == "kept"
    assert await keep(redis, "a", bytes(600)) == "kept"
    assert await keep(redis, "b", bytes(401)) == "full"
    assert await keep(redis, "b", bytes(400)) == "kept"
    await redis.delete(KEYS.picture("a"))
    await redis.zadd(KEYS.pictures, {"a 600": 1})  # it has expired
    assert await keep(redis, "c", bytes(600)) == "kept"


async def test_pictures_live_with_their_requests(broker: Broker, tmp_path: Path) -> None:
    """Two requests with one picture: the bytes are there until both have ended."""
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ENDLESS, request_timeout_s=500) as (worker, gateway, client):
        content = png()
        tasks = [asyncio.create_task(client.post(CHAT, json=body(content))) for _ in range(2)]
        await wait_until(lambda: len(worker.live) == 2)
        digest = worker.seen[0].pictures[0].digest
        assert await worker.redis.zcard(KEYS.picture_holders(digest)) == 2
        assert await left_ms(worker.redis, digest) > 500_000
        for task, num_left in zip(tasks, (1, 0), strict=True):
            task.cancel()
            await held_by(num_left, worker, digest)
        assert 0 < await left_ms(worker.redis, digest) <= LINGER_MS
        await wait_until(lambda: not gateway.pool.admission.cleanups)


async def held_by(number: int, worker: FakeWorker, digest: str) -> None:
    """Wait until so many requests hold a picture."""

    async def is_held() -> bool:
        return bool(await worker.redis.zcard(KEYS.picture_holders(digest)) == number)

    await wait_until(is_held)


async def test_a_pool_whose_pictures_take_all_room_asks_to_wait(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_processor("qwen2_vl", tmp_path)
    small, large = png(), png((80, 90))
    monkeypatch.setattr(FixedLimits, "max_kept_pictures_bytes", len(small) + 20)
    async with showing(broker.url, tmp_path, Answer([40])) as (worker, _, client):
        assert (await client.post(CHAT, json=body(small))).status_code == 200
        refused = await client.post(CHAT, json=body(large))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "pictures of live requests take all room" in refused.text
        assert len(worker.seen) == 1


async def test_a_refused_request_lets_go_of_its_pictures(broker: Broker, tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, ENDLESS, max_concurrent_requests=1) as (worker, _, client):
        first = asyncio.create_task(client.post(CHAT, json=body(png())))
        await wait_until(lambda: len(worker.live) == 1)
        refused = await client.post(CHAT, json=body(png(color="blue")))
        assert refused.status_code == 429
        digests = {one.digest for request in worker.seen for one in request.pictures}
        members = [member.decode().split()[0] for member in await worker.redis.zrange(KEYS.pictures, 0, -1)]
        other = next(digest for digest in members if digest not in digests)
        assert await worker.redis.zcard(KEYS.picture_holders(other)) == 0
        first.cancel()


async def test_a_picture_that_the_broker_loses_before_admission_is_asked_for_again(
    broker: Broker, tmp_path: Path
) -> None:
    make_processor("qwen2_vl", tmp_path)
    async with showing(broker.url, tmp_path, Answer([40])) as (worker, gateway, client):
        hold = gateway.pool.pictures.keeper.hold

        async def lose(request: Generate) -> None:
            await worker.redis.delete(*(KEYS.picture(one.digest) for one in request.pictures))
            await hold(request)

        gateway.pool.admission.pictures.hold = lose  # type: ignore[method-assign]
        answered: httpx.Response = await client.post(CHAT, json=body(png()))
        assert answered.status_code == 503
        assert "the broker has lost a picture of the request: send it again" in answered.text
        assert worker.seen == []
