"""Jobs that are submitted twice, or run by several gateways because one died or only seemed dead."""

import asyncio
import sys
from typing import Any

import pytest
from redis.asyncio import Redis

from api.jobs import validated_job
from api.jobs.job import Job
from api.jobs.reply import Reply
from api.jobs.runner import JobRun
from api.lifecycle import Gateway
from api.requests.pool import Pool
from common.settings.settings import Settings
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.gateways import SETTINGS
from tests.support.fleet.scripted_worker import FakeWorker
from tests.support.jobs import CHAT, IDS, KEYS, TEXT, Service, killed_gateway, running_gateway
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import wait_until


async def test_an_entry_that_comes_while_the_run_detaches_is_answered(
    service: Service, worker: FakeWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is read while the job is registered as live, and joins a run that has sent its last frame."""
    tidy, tidying, go_on = JobRun.detach, asyncio.Event(), asyncio.Event()

    async def slowly(self: JobRun) -> None:
        tidying.set()
        await go_on.wait()
        await tidy(self)

    async def live(self: Reply) -> str:
        return "live"

    async with running_gateway(broker.url):
        monkeypatch.setattr(JobRun, "detach", slowly)
        await service.submit(id="a", inputs="Count.")
        await tidying.wait()
        monkeypatch.setattr(Reply, "register", live)
        received = await service.listen("ext:me")
        await service.submit(id="a", inputs="Count.", reply_to="ext:me")
        await wait_until(lambda: len(received) == len(IDS) + 1)
        go_on.set()
        await service.settled()


async def test_the_same_job_joins_and_another_with_its_id_conflicts(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    first, second, third = [await service.listen(f"ext:{i}") for i in range(3)]
    async with running_gateway(broker.url, "g0") as gateway, running_gateway(broker.url, "g1") as other:
        await worker.pause()
        for i in range(2):
            await service.submit(id="a", inputs="Count.", reply_to=f"ext:{i}")
        await wait_until(
            lambda: (
                sum(len(run.replies) for each in (gateway, other) for run in each.job_consumer.runs.values())
                == 2
            )
        )
        entry_id = await service.submit(id="a", inputs="Count again.", reply_to="ext:2")
        await wait_until(lambda: third)
        worker.going.set()
        assert await service.result("a") == {"generated_text": TEXT}
        assert (
            third
            == [await service.result(entry_id)]
            == [{"error": "another job has this id", "error_type": "conflict"}]
        )
        await wait_until(lambda: len(first) == len(second) == len(IDS) + 1)
        await service.settled()
        await service.submit(id="a", inputs="Count.", reply_to="ext:2", reply="stream")
        await wait_until(lambda: len(third) == 2)
        assert first == second
        assert third[1] == first[-1]
        assert await service.stream("a") == third[1:]
        assert len(worker.seen) == 1


async def test_another_gateway_continues_the_jobs_of_a_dead_one(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """Each frame comes once, on the channel and in the stream, with the text of one generation."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 5  # no job ends before its gateway
    async with killed_gateway(broker.url):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
        await service.submit(id="c", **CHAT, parameters={"n": 2}, reply="stream")
        await wait_until(lambda: len(received) >= 3)
    async with running_gateway(broker.url, "g1", worker_ttl_s=0.3) as other:
        await wait_until(lambda: other.pool.relay.followed == {KEYS.events("g0"): 3})
        worker.most_tokens = sys.maxsize
        assert await service.result("a") == {"generated_text": TEXT}
        assert [choice["message"]["content"] for choice in (await service.result("c"))["choices"]] == [
            TEXT
        ] * 2
        await service.settled()
        await wait_until(lambda: len(received) == len(IDS) + 1)
        assert not other.pool.relay.followed and not other.pool.relay.streams
    assert [frame["token"]["id"] for frame in received] == [*IDS, 2]
    assert await service.stream("a") == received
    chunks = await service.stream("c")
    for i in range(2):
        deltas = [
            choice["delta"].get("content") or ""
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == i
        ]
        assert "".join(deltas) == TEXT
    assert len(worker.seen) == 3


async def test_a_job_that_ended_two_gateways_is_failed_by_name(
    service: Service, worker: FakeWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways that stop in order while they validate it do not count."""
    validating, validate = asyncio.Event(), validated_job.validate_generate_job

    async def validate_or_hang(pool: Pool, job: Job, model: str) -> Any:
        if pool.gateway == "last":
            return await validate(pool, job, model)
        validating.set()
        return await asyncio.Future()

    async def send_nothing(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(validated_job, "validate_generate_job", validate_or_hang)
    await service.submit(id="slow", inputs="Count.")
    for i in range(3):
        async with running_gateway(broker.url, f"g{i}", worker_ttl_s=0.3):
            await validating.wait()
            validating.clear()
    await service.submit(id="waits", inputs="Count.")
    async with killed_gateway(broker.url, "k0"):
        await validating.wait()
    async with running_gateway(broker.url, "last", worker_ttl_s=0.3):
        assert await service.result("slow") == await service.result("waits") == {"generated_text": TEXT}
    await service.submit(id="fatal", inputs="Count.")
    for i in range(2):
        with monkeypatch.context() as patch:
            async with killed_gateway(broker.url, f"f{i}"):
                validating.clear()
                await validating.wait()
                if i == 1:
                    await service.submit(id="waits-too", inputs="Count.")
                patch.setattr(Redis, "hdel", send_nothing)
    async with running_gateway(broker.url, "last", worker_ttl_s=0.3):
        assert "2 gateways ended while they validated" in (await service.result("fatal"))["error"]
        assert await service.result("waits-too") == {"generated_text": TEXT}


async def test_cut_connections_lose_and_repeat_no_frame(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """Connections are cut while jobs are read, admitted, streamed and answered."""
    received = await service.listen("ext:me")
    worker.step_s = 0.02
    async with running_gateway(f"{broker.url}?client_name=gateway") as gateway:
        for i in range(12):
            await service.submit(
                id=f"j{i}", inputs="Count.", reply="stream", **({"reply_to": "ext:me"} if i == 0 else {})
            )
            for client in await service.redis.client_list():
                if client["name"] == "gateway":
                    await service.redis.client_kill_filter(_id=client["id"])
            await wait_until(gateway.pool.relay.subscribed.is_set)
        assert [await service.result(f"j{i}") for i in range(12)] == [{"generated_text": TEXT}] * 12
        await service.settled()
    for i in range(12):
        assert [frame["token"]["id"] for frame in await service.stream(f"j{i}")] == [*IDS, 2]
    await wait_until(lambda: len(received) == len(IDS) + 1)
    assert received == await service.stream("j0")
    assert len(worker.seen) == 12


async def test_two_gateways_with_one_job_send_each_frame_once(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """One of them sends no heartbeats any more, but still works."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 5  # the job does not end before both have it
    silent = Gateway(Settings(redis_url=broker.url, **SETTINGS, worker_ttl_s=0.3), "g0", model_tokenizer())
    life = [asyncio.create_task(loop) for loop in (silent.pool.relay.run(), silent.job_consumer.run())]
    await silent.pool.workers.refresh()
    await silent.keys.refresh(silent.keys.source(silent.pool.client))
    await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
    await wait_until(lambda: received)
    async with running_gateway(broker.url, "g1", worker_ttl_s=0.3) as other:
        await wait_until(lambda: "a" in other.job_consumer.runs and "a" in silent.job_consumer.runs)
        worker.most_tokens = sys.maxsize
        assert await service.result("a") == {"generated_text": TEXT}
        await wait_until(lambda: not other.job_consumer.runs and not silent.job_consumer.runs)
    assert [frame["token"]["id"] for frame in received] == [*IDS, 2]
    assert await service.stream("a") == received
    assert len(worker.seen) == 1
    for task in life:
        task.cancel()
    await asyncio.wait(life)
    await silent.pool.client.redis.aclose()
