"""Jobs at a broker that has lost its last writes, as one restored from its file may have."""

import asyncio
import sys

from api.jobs.arq_client import ArqClient
from api.jobs.consumer import submit_lost
from api.jobs.job import read_job
from common.broker.client import connect
from common.broker.pool_client import PoolClient
from deploy.launcher.embedded_broker import Broker
from tests.support.fleet.scripted_worker import FakeWorker
from tests.support.jobs import CHAT, IDS, KEYS, TEXT, Service, killed_gateway, running_gateway
from tests.support.waiting import PATIENCE_S, wait_until


async def test_lost_frames_are_offered_again(service: Service, worker: FakeWorker, broker: Broker) -> None:
    """The stream of frames is whole, and the channel hears none twice."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 6  # the job does not end before it is disturbed
    async with running_gateway(broker.url):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
        await wait_until(lambda: len(received) == 6)
        await worker.pause()
        job, channel = KEYS.job("a"), KEYS.channel("ext:me")
        kept = {"stream:0": 2, f"{channel}:0": 3, "entries": 2}
        async with service.redis.pipeline() as pipe:
            pipe.hset(job, mapping=kept)
            pipe.delete(KEYS.reply("a"))
            for i, frame in enumerate(received[:2], 1):
                pipe.xadd(KEYS.reply("a"), {"frame": frame["token"]["text"]}, id=f"{i}-0")
            await pipe.execute()
        worker.most_tokens = sys.maxsize
        worker.going.set()
        assert await service.result("a") == {"generated_text": TEXT}
        await wait_until(lambda: len(received) == len(IDS) + 1)
        again = [fields for _, fields in await service.redis.xrange(KEYS.reply("a"), "3")]
        assert len(again) == len(IDS) - 1
        await service.settled()
    assert [frame["token"]["id"] for frame in received] == [*IDS, 2]


async def test_a_job_whose_entry_was_lost_outlives_its_gateway(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """The gateway submits the job again; another one goes on with it, without a missing or repeated frame."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 5  # the job does not end before its gateway
    async with killed_gateway(broker.url):
        job_id = await service.submit(**CHAT, reply_to="ext:me", reply="stream")
        await wait_until(lambda: len(received) >= 3)
        await worker.pause()
        await service.redis.delete(KEYS.submit)
        await wait_until(lambda: service.redis.xlen(KEYS.submit))
    async with running_gateway(broker.url, "g1", worker_ttl_s=0.3):
        worker.most_tokens = sys.maxsize
        worker.going.set()
        await service.settled()
        await wait_until(lambda: received[-1]["choices"][0]["finish_reason"])
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in received) == TEXT
    assert await service.stream(job_id) == received
    assert len(worker.seen) == 1


async def test_a_job_that_another_gateway_has_answered_is_not_submitted_again(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """A gateway that was stopped until its entries were claimed finds them gone."""
    async with running_gateway(broker.url):
        job_id = await service.submit(inputs="Count.")
        await service.result(job_id)
        await service.settled()
    ended = read_job(job_id, {b"job": b'{"inputs": "Count."}'}, 2**20)
    await submit_lost(service.redis, KEYS, {job_id: ended})
    assert not await service.redis.xlen(KEYS.submit)


async def test_a_job_that_is_submitted_again_keeps_its_content_and_its_time(
    service: Service, broker: Broker
) -> None:
    """Its deadline and the `created` of its chunks count from the first of its entries."""
    fields = {
        b"job": b'{"inputs": "\\u00e9", "parameters": {"top_p": 1e-7}, "tenant": null, "reply": "stream"}'
    }
    job = lost = read_job("5000-0", fields, 2**20)
    for _ in range(2):  # the entry in its place is lost, too
        await submit_lost(service.redis, KEYS, {job.entry_id: job})
        [[entry_id, fields]] = await service.redis.xrevrange(KEYS.submit, count=1)
        job = read_job(entry_id.decode(), fields, 2**20)
        await service.redis.xdel(KEYS.submit, entry_id)
    assert job.entry_id != "5000-0"
    assert (job.id, job.digest, job.in_stream, job.entry_ms) == ("5000-0", lost.digest, True, 5000)


async def test_a_job_worker_submits_a_lost_job_again(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    redis = connect(broker.url)
    client = ArqClient(PoolClient(redis, KEYS))
    polling = asyncio.create_task(client.run())
    answer = asyncio.create_task(client.run_job("a", {"inputs": "Count."}, {}))
    await wait_until(lambda: client.waiting)
    await redis.delete(KEYS.submit)
    async with running_gateway(broker.url):
        assert await asyncio.wait_for(answer, PATIENCE_S) == {"generated_text": TEXT}
        await service.settled()
    assert not client.waiting
    polling.cancel()
    await redis.aclose()
