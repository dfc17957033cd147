"""API keys of jobs: an entry carries one where there are keys, and a job belongs to its tenant."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from common import api_keys
from common.api_keys import IssuedKey
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_worker import FakeWorker, working
from tests.support.jobs import CHAT, KEYS, TEXT, answer, running_gateway
from tests.support.keys.issued import add_key, client_of
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

COUNT = {"inputs": "Count."}
ANSWER = {"generated_text": TEXT}


@pytest.fixture
async def acme(redis: Redis) -> IssuedKey:
    return await add_key(redis, tenant="acme", service_class="standard")


@pytest.fixture
async def worker(broker: Broker, acme: IssuedKey) -> AsyncIterator[FakeWorker]:
    async with (
        working(broker.url, TOKENIZER, answer) as worker,
        running_gateway(broker.url, api_key="sesame"),
    ):
        yield worker


async def submit(redis: Redis, key: str | None, **job: Any) -> None:
    sent: dict[Any, Any] = {} if key is None else {"api_key": key}
    await redis.xadd(KEYS.submit, {"job": json.dumps(job), **sent})


async def result(redis: Redis, job_id: str) -> Any:
    return json.loads(await wait_until(lambda: redis.get(KEYS.result(job_id))))


async def test_a_job_is_served_for_its_key_alone(redis: Redis, worker: FakeWorker, acme: IssuedKey) -> None:
    await submit(redis, acme.text, id="a", **COUNT)
    assert await result(redis, "a") == ANSWER
    request = worker.seen[-1]
    assert (request.key_id, request.tenant, request.class_name) == (acme.record.key_id, "acme", "standard")
    await submit(redis, None, id="b", **COUNT)
    await submit(redis, "wrong", id="c", **CHAT)
    await submit(redis, acme.text, id="d", tenant="other", **COUNT)
    await submit(redis, "sesame", id="e", tenant="other", priority="interactive", **COUNT)
    assert (await result(redis, "b"))["error_type"] == "unauthorized"
    assert (await result(redis, "c"))["error"]["code"] == "invalid_api_key"
    assert "`tenant`" in (await result(redis, "d"))["error"]
    assert await result(redis, "e") == ANSWER
    assert (worker.seen[-1].tenant, worker.seen[-1].class_name) == ("other", "interactive")


async def test_nobody_reads_or_cancels_the_job_of_another_tenant(
    redis: Redis, worker: FakeWorker, acme: IssuedKey
) -> None:
    other = await add_key(redis, tenant="other")
    await worker.pause()
    await submit(redis, acme.text, id="a", **COUNT)

    async def is_queued() -> bool:
        return bool(await redis.xlen(KEYS.requests))

    await wait_until(is_queued)
    before = {entry for entry, _ in await redis.xrange(KEYS.submit)}
    await submit(redis, None, id="a", **COUNT)
    await submit(redis, other.text, id="a", **COUNT)
    stolen = [entry.decode() for entry, _ in await redis.xrange(KEYS.submit) if entry not in before]
    assert [(await result(redis, entry))["error_type"] for entry in stolen] == ["unauthorized", "conflict"]
    keys: list[dict[Any, Any]] = [{}, {"api_key": other.text}]
    for key in keys:
        await redis.xadd(KEYS.submit, {"cancel": "a"} | key)

    async def are_read() -> bool:
        return await redis.xlen(KEYS.submit) == 1  # type: ignore[no-any-return]

    await wait_until(are_read)
    assert not await redis.hexists(KEYS.job("a"), "cancel")  # type: ignore[misc]
    worker.going.set()
    assert await result(redis, "a") == ANSWER


async def test_the_job_of_a_revoked_key_ends(redis: Redis, worker: FakeWorker, acme: IssuedKey) -> None:
    await worker.pause()
    await submit(redis, acme.text, id="a", **COUNT)

    async def is_queued() -> bool:
        return bool(await redis.xlen(KEYS.requests))

    await wait_until(is_queued)
    await api_keys.revoke_key(client_of(redis), acme.record.key_id)
    failed = await result(redis, "a")
    assert failed["error_type"] == "unauthorized" and "its API key was revoked" in failed["error"]
    worker.going.set()
    await wait_until(lambda: not worker.live)


async def test_a_job_waits_for_its_key_and_holds_up_no_other(
    redis: Redis, worker: FakeWorker, acme: IssuedKey
) -> None:
    slow = await add_key(redis, requests_per_minute=1, service_class="standard")
    for job_id in ("a", "b"):
        await submit(redis, slow.text, id=job_id, **COUNT)
    await submit(redis, acme.text, id="c", **COUNT)
    assert await result(redis, "c") == ANSWER

    async def num_results() -> int:
        return await redis.exists(KEYS.result("a"), KEYS.result("b"))  # type: ignore[no-any-return]

    await wait_until(num_results)
    assert await num_results() == 1
    use = KEYS.key_use(slow.record.key_id)
    await redis.hset(use, "at_ms", str(int(await redis.hget(use, "at_ms")) - 60_000))  # type: ignore[misc]
    assert [await result(redis, job_id) for job_id in ("a", "b")] == [ANSWER] * 2
