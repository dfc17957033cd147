"""Jobs that may not run before a time."""

import json
import time
from datetime import UTC, datetime

import pytest

from api.jobs.scripts import LIVE, SCHEDULED, cancel_job
from api.lifecycle import Gateway
from common import api_keys
from common.api_keys import KeyFields
from common.broker.lua import run_script
from common.broker.pool_client import PoolClient
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import SETTINGS
from tests.support.fleet.scripted_worker import FakeWorker, working
from tests.support.jobs import KEYS, TEXT, Service, answer, killed_gateway, running_gateway
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_until

HEARTBEAT_S = 0.05


async def is_scheduled(service: Service, job_id: str) -> bool:
    return await service.redis.zscore(KEYS.job_set(SCHEDULED), job_id) is not None


async def test_a_job_waits_for_its_time_and_is_run_once(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    received = await service.listen("ext:me")
    due_s = time.time() + 0.5
    job = {"id": "a", "inputs": "Count.", "not_before": due_s, "deadline_ms": 900_000}
    async with running_gateway(broker.url, heartbeat_s=HEARTBEAT_S):
        await service.submit(**job)
        await service.submit(**job, reply_to="ext:me")
        assert await service.result("a") == {"generated_text": TEXT}
        assert time.time() >= due_s
        await wait_until(lambda: received and received[-1]["generated_text"])
        await service.settled()
    assert len(worker.seen) == 1
    assert not await is_scheduled(service, "a")


async def test_a_scheduled_job_outlives_its_gateway(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    due_s = time.time() + 1.0
    async with killed_gateway(broker.url):
        await service.submit(
            id="a", inputs="Count.", not_before=datetime.fromtimestamp(due_s, UTC).isoformat()
        )

        async def is_taken() -> bool:
            return await is_scheduled(service, "a") or time.time() > due_s

        await wait_until(is_taken)
    async with (
        running_gateway(broker.url, "g1", heartbeat_s=HEARTBEAT_S),
        running_gateway(broker.url, "g2", heartbeat_s=HEARTBEAT_S),
    ):
        assert await service.result("a") == {"generated_text": TEXT}
        await service.settled()
    assert len(worker.seen) == 1


async def test_a_cancelled_scheduled_job_ends_at_once_wherever_its_answer_goes(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    received = await service.listen("ext:me")
    job = {"id": "a", "inputs": "Count.", "not_before": time.time() + 3600}
    async with running_gateway(broker.url, heartbeat_s=HEARTBEAT_S):
        await service.submit(**job)
        await service.submit(**job, reply_to="ext:me")
        await wait_until(lambda: is_scheduled(service, "a"))
        await service.settled()  # both entries wait outside of the queue
        await service.redis.xadd(KEYS.submit, {"cancel": "a"})
        answer = await service.result("a")
        assert answer["error_type"] == "cancelled"
        await wait_until(lambda: received == [answer])
        await service.settled()
    assert worker.seen == []


@pytest.mark.parametrize(
    ("not_before", "why"),
    [
        (-1, "seconds since 1970"),
        ("tomorrow", "seconds since 1970"),
        ("2026-12-01T08:00:00", "with its offset"),
        (99_999_999_999, "at most 30 days (2592000 s)"),
    ],
)
async def test_a_wrong_time_is_refused_by_name(
    service: Service, worker: FakeWorker, broker: Broker, not_before: object, why: str
) -> None:
    async with running_gateway(broker.url):
        answer = await service.result(await service.submit(inputs="a", not_before=not_before))
    assert answer["error_type"] == "validation"
    assert answer["error"].startswith("Input validation error: `not_before` ") and why in answer["error"]


async def test_a_faulty_job_is_answered_before_its_time(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    faulty = {"inputs": "a", "parameters": {"top_p": 7}}
    async with running_gateway(broker.url):
        answer = await service.result(await service.submit(**faulty, not_before=time.time() + 3600))
    assert "`top_p`" in answer["error"]


async def test_a_scheduled_job_is_refused_where_too_many_wait(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    later = {"inputs": "Count.", "not_before": time.time() + 3600}
    async with running_gateway(broker.url, submit_limit=1):
        await service.submit(id="a", **later)
        await wait_until(lambda: is_scheduled(service, "a"))
        assert (await service.result(await service.submit(**later)))["error_type"] == "overloaded"
        assert await service.result(await service.submit(inputs="Count.")) == {"generated_text": TEXT}
    assert await service.redis.zcard(KEYS.job_set(LIVE)) == 0


async def test_a_released_job_is_not_refused_for_want_of_room(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """It was accepted when it was submitted."""
    async with running_gateway(broker.url):
        await service.submit(id="a", inputs="Count.", not_before=time.time() + 3600)
        await wait_until(lambda: is_scheduled(service, "a"))
    await run_script(service.redis, cancel_job(KEYS, "a", tenant="", mark_ttl_ms=1))  # releases it
    [(entry_id, fields)] = await service.redis.xrange(KEYS.submit)
    gateway = Gateway(Settings(redis_url=broker.url, **SETTINGS), "g1", model_tokenizer())
    async with gateway.pool.running():
        await gateway.job_consumer.reject(entry_id.decode(), fields)
        assert gateway.job_consumer.held == {entry_id.decode()}
    assert not await service.redis.exists(KEYS.result("a"))


async def test_a_job_whose_key_has_ended_meanwhile_ends_with_that_error(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with PoolClient.connect(Settings(redis_url=broker.url, **SETTINGS)) as client:
        key = await api_keys.add_key(client, KeyFields(tenant="acme"))
        job = {"id": "a", "inputs": "Count.", "not_before": time.time() + 3600}
        async with running_gateway(broker.url, heartbeat_s=HEARTBEAT_S) as gateway:
            await service.redis.xadd(KEYS.submit, {"job": json.dumps(job), "api_key": key.text})
            await wait_until(lambda: is_scheduled(service, "a"))
            await api_keys.revoke_key(client, key.record.key_id)
            await wait_until(lambda: gateway.keys.by_id[key.record.key_id].revoked)
            await service.redis.zadd(KEYS.job_set(SCHEDULED), {"a": 1})  # its time has come
            assert (await service.result("a"))["error_type"] == "unauthorized"
            await service.settled()
    record = await service.redis.hgetall(KEYS.job_record("a"))  # type: ignore[misc]
    assert (record[b"tenant"], record[b"state"]) == (b"acme", b"failed")


async def test_jobs_that_wait_for_others_are_seen_and_cancelled(
    service: Service, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.consumer.NUM_WAITING", 0)
    settings = Settings(redis_url=broker.url, **SETTINGS | {"max_concurrent_requests": 1})
    gateway = Gateway(settings, "g0", model_tokenizer())
    async with gateway.running():
        for i in range(4):
            await service.submit(id=f"j{i}", inputs="Count.")

        async def are_seen() -> bool:
            return await service.redis.zcard(KEYS.job_set(LIVE)) == 4  # type: ignore[no-any-return]

        await wait_until(are_seen)
        await service.redis.xadd(KEYS.submit, {"cancel": "j3"})
        async with working(broker.url, TOKENIZER, answer):
            assert [await service.result(f"j{i}") for i in range(3)] == [{"generated_text": TEXT}] * 3
            assert (await service.result("j3"))["error_type"] == "cancelled"
