"""Jobs that may not run before a time, also while processes are killed, and `tokenfleet jobs`, which shows,
cancels and tries jobs again.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import pytest

from api.app import Gateway
from api.jobs.records import LIVE, SCHEDULED
from common import api_keys
from common.api_keys import KeyFields
from common.broker.pool_client import PoolClient
from common.messages.request import Generate
from common.settings.settings import Settings
from deploy.cli.command_line import run as run_command
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import SETTINGS, answering
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import IDS, KEYS, TEXT, Service, answer, killed_gateway, running_gateway
from tests.support.tokenizer import TOKENIZER, model_tokenizer
from tests.support.waiting import wait_for, wait_until

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
        (19_999_999_999, "at most 30 days (2592000 s)"),
    ],
)
async def test_a_wrong_time_is_refused_by_name(
    service: Service, worker: FakeWorker, broker: Broker, not_before: object, why: str
) -> None:
    async with running_gateway(broker.url):
        answer = await service.result(await service.submit(inputs="a", not_before=not_before))
    assert answer["error_type"] == "validation"
    assert answer["error"].startswith("Input validation error: `not_before`") and why in answer["error"]


async def test_a_faulty_job_is_answered_before_its_time(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    faulty = {"inputs": "a", "parameters": {"top_p": 7}}
    async with running_gateway(broker.url):
        answer = await service.result(await service.submit(**faulty, not_before=time.time() + 3600))
    assert "top_p`: Input" in answer["error"]


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

        await wait_for(lambda: service.redis.zcard(KEYS.job_set(LIVE)), 4)
        await service.redis.xadd(KEYS.submit, {"cancel": "j3"})
        async with working(broker.url, TOKENIZER, answer):
            assert [await service.result(f"j{i}") for i in range(3)] == [{"generated_text": TEXT}] * 3
            assert (await service.result("j3"))["error_type"] == "cancelled"


Run = Callable[..., Awaitable[str]]


class BrokenEngine:
    """Answers of a worker whose engine fails until it is mended."""

    def __init__(self) -> None:
        self.is_broken = True

    def __call__(self, _: Generate) -> Answer:
        return Answer(IDS[:3], error="forward") if self.is_broken else Answer(IDS)


@pytest.fixture
def engine() -> BrokenEngine:
    return BrokenEngine()


@pytest.fixture
async def run(
    broker: Broker, engine: BrokenEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Run]:
    """Runs `tokenfleet jobs` at a gateway → what it prints."""
    monkeypatch.setenv("COLUMNS", "300")
    async with answering(broker.url, engine, heartbeat_s=0.05) as (_, _, client):

        async def run(*words: str, code: int = 0) -> str:
            assert (
                await asyncio.to_thread(run_command, ["jobs", *words, "--url", str(client.base_url)]) == code
            )
            captured = capsys.readouterr()
            return captured.err if code else captured.out

        yield run


async def test_a_dead_job_is_kept_with_its_reason_and_tried_again(
    service: Service, run: Run, engine: BrokenEngine
) -> None:
    job = {"id": "team/a", "inputs": "Count.", "tenant": "acme", "reply": "stream"}
    await service.submit(**job)
    assert (await service.result("team/a"))["error_type"] == "generation"
    await service.settled()
    line = (await run("dead")).splitlines()[1]
    assert line.split()[:4] == ["team/a", "dead", "generate", "acme"]
    assert "generation: Request failed during generation: the model's forward failed for this request" in line
    shown = json.loads(await run("show", "team/a"))
    assert (shown["state"], shown["status"], shown["job"]) == ("dead", 424, job)
    engine.is_broken = False
    assert await run("retry", "team/a") == "team/a is tried again\n"

    await wait_for(lambda: service.result("team/a"), {"generated_text": TEXT})
    await service.settled()
    assert [frame["generated_text"] for frame in await service.stream("team/a")][-1] == TEXT
    assert json.loads(await run("show", "team/a"))["retries"] == 1
    assert await run("dead") == "there are no such jobs\n"
    assert (await run("list", "--status", "done")).splitlines()[1].split()[:2] == ["team/a", "done"]
    assert "is not dead" in await run("retry", "team/a", code=1)


async def test_jobs_are_listed_by_state_tenant_and_a_part_of_their_ids(
    service: Service, run: Run, engine: BrokenEngine
) -> None:
    engine.is_broken = False
    await service.submit(id="done-1", inputs="Count.", tenant="acme")
    await service.submit(id="done-2", inputs="Count.")
    await service.submit(id="faulty", inputs="a", parameters={"top_p": 7})
    for i in range(3):
        await service.submit(id=f"later-{i}", inputs="Count.", not_before=time.time() + 3600 - i)
    await wait_until(lambda: service.redis.zscore(KEYS.job_set("scheduled"), "later-2"))
    await service.settled()

    async def listed(*words: str) -> list[str]:
        return [line.split()[0] for line in (await run("list", *words)).splitlines()[1:]]

    assert {*await listed()} == {"later-2", "later-1", "later-0", "faulty", "done-1", "done-2"}
    assert await listed("--status", "scheduled") == ["later-2", "later-1", "later-0"]
    assert await listed("--status", "failed") == ["faulty"]
    assert await listed("--tenant", "acme") == ["done-1"]
    assert {*await listed("--search", "done")} == {"done-1", "done-2"}
    first = (await run("list", "--limit", "2")).splitlines()
    assert [line.split()[0] for line in first[1:]] == ["later-2", "later-1", "more"]
    cursor = first[-1].split("'")[1]
    assert (await listed("--cursor", cursor))[0] == "later-0"
    assert await run("cancel", "later-0") == "later-0 is cancelled\n"
    assert (await service.result("later-0"))["error_type"] == "cancelled"
    await service.settled()
    assert await listed("--status", "cancelled") == ["later-0"]
    assert "The job has ended" in await run("cancel", "later-0", code=1)
    assert "There is no job 'nobody'" in await run("cancel", "nobody", code=1)
    assert "`cursor` must be" in await run("list", "--cursor", "x", code=1)


async def test_a_job_that_misses_its_deadline_is_dead(service: Service, run: Run) -> None:
    await service.submit(id="late", inputs="Count.", deadline_ms=1)
    assert (await service.result("late"))["error_type"] == "timeout"
    await service.settled()
    assert "timeout: Request failed" in await run("dead")
