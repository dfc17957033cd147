"""Jobs that may not run before a time."""

import time
from datetime import UTC, datetime

import pytest

from common.jobs.record import LIVE, SCHEDULED
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_worker import FakeWorker
from tests.support.jobs import KEYS, TEXT, Service, killed_gateway, running_gateway
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
