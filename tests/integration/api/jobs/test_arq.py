"""Gateways as clients of arq know them, with jobs that are deferred."""

import json
import math
import pickle
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.jobs import Job, JobStatus, SerializationError

from api.jobs import arq_worker
from deploy.launcher.embedded_broker import Broker
from tests.support.broker_state import KEYS
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import (
    CHAT,
    IDS,
    QUEUE,
    TEXT,
    answer,
    arq_client,
    enqueue,
    killed_gateway,
    result,
    running_gateway,
)
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import wait_for, wait_until


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    """A fleet that answers."""
    async with working(broker.url, model_tokenizer().backend, answer) as fake, running_gateway(broker.url):
        yield fake


@pytest.fixture
async def client(broker: Broker) -> AsyncIterator[ArqRedis]:
    async with arq_client(broker.url) as pool:
        yield pool


async def test_arq_clients_get_their_answers(client: ArqRedis, worker: FakeWorker) -> None:
    generate_job = await enqueue(client, "generate", "Count.", {"details": True}, _job_id="g")
    chat_job = await enqueue(client, "chat", CHAT["messages"], max_tokens=50)
    generated, chat = await result(generate_job), await result(chat_job)
    assert (await generate_job.status()) == JobStatus.complete
    assert generated["generated_text"] == TEXT
    assert generated["details"]["generated_tokens"] == len(IDS) + 1
    assert chat["choices"][0]["message"]["content"] == TEXT
    assert json.loads(await client.get(KEYS.result("g"))) == generated


INVALID: list[tuple[Any, dict[str, Any], str]] = [
    (("generate", "a", {"top_p": 7}), {}, "top_p`: Input"),
    (("generate", b"\xff"), {}, "bytes"),
    (("generate", "a"), {"not_before": 1}, "use arq's `_defer_until`"),
    (("chat", CHAT["messages"]), {"not_before": 1}, "`not_before` is no parameter of a job"),
    (("generate", "a", {"temperature": math.nan}), {}, "must be JSON: Out of range float"),
    (("chat", CHAT["messages"]), {"logit_bias": {"7": -math.inf}}, "must be JSON: Out of range float"),
    (("train", "a"), {}, "'train' not found"),
    (("chat", CHAT["messages"], 5), {}, "`chat` takes messages, and other arguments by their names"),
]


async def test_an_invalid_arq_job_fails_with_the_http_error(client: ArqRedis, worker: FakeWorker) -> None:
    for args, kwargs, words in INVALID:
        with pytest.raises(SerializationError, match=words):
            await result(await enqueue(client, *args, **kwargs))


class Trap:
    """An object that notes that somebody unpickled it."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a job was unpickled",))


async def test_a_pickled_job_is_refused_without_unpickling_and_its_client_can_read_why(
    client: ArqRedis, worker: FakeWorker, broker: Broker
) -> None:
    pickling = await create_pool(RedisSettings.from_dsn(broker.url), default_queue_name=QUEUE)
    pickled = await enqueue(pickling, "generate", Trap())
    with pytest.raises(ValueError, match=r"job_serializer=msgpack\.packb"):
        await result(pickled)
    assert (await result(await enqueue(client, "generate", "Count.")))["generated_text"] == TEXT
    await pickling.aclose()


GARBAGE: list[Any] = [
    b"\xc1",
    b"\x00",
    msgpack.packb([1]),
    msgpack.packb({"f": ["generate"], "a": [], "k": {}, "t": None, "et": 1}),
    msgpack.packb({"f": "generate", "a": 5, "k": {}, "t": None, "et": 1}),
    msgpack.packb({"f": "generate", "a": [], "k": {1: 2}, "t": None, "et": 1}, strict_types=False),
    msgpack.packb({"f": "generate", "a": ["a"], "k": {}, "t": 2**40, "et": 1}),
    msgpack.packb({"f": "generate", "a": ["a"], "k": {}, "t": None, "et": 2**62}),
    msgpack.packb({"f": "generate", "a": ["a" * 3000], "k": {}, "t": None, "et": 1}),
    pickle.dumps({"f": "generate", "a": ("a",), "k": {}, "t": None, "et": 1}),
]


async def test_malformed_arq_keys_do_not_kill_a_gateway(
    client: ArqRedis, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arq_worker, "MAX_JOBS", 2)
    now_ms = round(time.time() * 1000)
    async with (
        working(broker.url, model_tokenizer().backend, answer),
        running_gateway(broker.url, payload_limit=2000),
    ):
        for i, data in enumerate(GARBAGE):
            await client.set(f"arq:job:garbage{i}", data)
            await client.zadd(QUEUE, {f"garbage{i}": now_ms})
        await client.rpush("arq:job:list", "mine")  # type: ignore[misc]
        await client.zadd(QUEUE, {b"\xff\xfe": now_ms, "list": now_ms, "": now_ms})  # type: ignore[type-var]
        await client.zadd("arq:abort", {b"\xff\xfe": now_ms})
        for i in range(len(GARBAGE)):
            with pytest.raises(SerializationError, match="unable to deserialize job"):
                await result(Job(f"garbage{i}", client, QUEUE, msgpack.unpackb))
        assert (await result(await enqueue(client, "generate", "Count.")))["generated_text"] == TEXT
        await wait_for(lambda: client.zcard(QUEUE), 0)


async def test_an_aborted_job_is_cancelled(client: ArqRedis, broker: Broker) -> None:
    async with (
        working(
            broker.url, model_tokenizer().backend, lambda _: Answer(IDS * 500, ends=False), step_s=0.01
        ) as worker,
        running_gateway(broker.url),
    ):
        job = await enqueue(client, "generate", "Count.", _job_id="a")
        await wait_until(lambda: worker.live)
        with pytest.raises(SerializationError, match="CancelledError"):
            await job.abort(timeout=90, poll_delay=0.05)
        await wait_until(lambda: not worker.live)
        assert "cancelled" in json.loads(await wait_until(lambda: client.get(KEYS.result("a"))))["error"]


async def test_an_abort_of_no_job_ends_no_later_one(client: ArqRedis, worker: FakeWorker) -> None:
    assert not await Job("a", client, QUEUE, msgpack.unpackb).abort(poll_delay=0.01)
    job = await enqueue(client, "generate", "Count.", _job_id="a")
    await client.zadd("arq:abort", {"never": 1})
    assert (await result(job))["generated_text"] == TEXT

    await wait_for(lambda: client.exists("arq:abort"), 0)


async def test_a_job_survives_its_gateways(client: ArqRedis, broker: Broker) -> None:
    """The first is killed, the second is stopped. The third waits for what they began: nothing is generated
    twice.
    """
    async with working(broker.url, model_tokenizer().backend, answer) as worker:
        await worker.pause()
        async with killed_gateway(broker.url):
            job = await enqueue(client, "generate", "Count.", _job_id="a")
            await wait_for(lambda: client.xlen(KEYS.submit), 1)
        async with running_gateway(broker.url, "g1-test", worker_ttl_s=1.0):
            await wait_for(lambda: client.xlen(KEYS.submit), 2)
        async with running_gateway(broker.url, "g2-test"):
            await wait_for(lambda: client.xlen(KEYS.submit), 3)
            worker.going.set()
            assert (await result(job))["generated_text"] == TEXT
        assert len(worker.seen) == 1


async def test_a_job_whose_claim_expired_while_its_gateway_was_stopped_runs_once(
    client: ArqRedis, worker: FakeWorker
) -> None:
    """A stopped process renews no claim; the job is still its own when it goes on."""
    await worker.pause()
    job = await enqueue(client, "generate", "Count.", _job_id="a")
    await wait_for(lambda: client.xlen(KEYS.submit), 1)
    for _ in range(2):  # with the second one, what the first has started would have counted its try
        await client.delete("arq:in-progress:a")
        await wait_until(lambda: client.exists("arq:in-progress:a"))
    assert await client.get("arq:retry:a") == b"1"
    worker.going.set()
    assert (await result(job))["generated_text"] == TEXT


async def test_many_jobs_wait_concurrently(client: ArqRedis, worker: FakeWorker) -> None:
    """There are more of them than arq's default of ten."""
    await worker.pause()
    jobs = [await enqueue(client, "generate", "Count.") for _ in range(40)]
    await wait_for(lambda: client.xlen(KEYS.submit), 40)
    worker.going.set()
    assert {(await result(job))["generated_text"] for job in jobs} == {TEXT}


async def test_a_job_is_found_behind_all_that_others_run(client: ArqRedis, worker: FakeWorker) -> None:
    others = [f"other-{i}" for i in range(5 * arq_worker.MAX_JOBS)]
    await client.mset({f"arq:in-progress:{name}": 1 for name in others})
    await client.zadd(QUEUE, dict.fromkeys(others, 1))
    assert (await result(await enqueue(client, "generate", "Count.")))["generated_text"] == TEXT


WAIT_S = 0.3


async def test_deferred_jobs_run_at_their_time_and_not_before(client: ArqRedis, worker: FakeWorker) -> None:
    due_s = time.time() + WAIT_S
    at = await enqueue(client, "generate", "Count.", _defer_until=datetime.fromtimestamp(due_s, UTC))
    after = await enqueue(client, "generate", "Count.", _defer_by=WAIT_S)
    for job in (at, after):
        assert (await result(job))["generated_text"] == TEXT
        info = await job.result_info()
        assert info is not None and info.start_time.timestamp() >= due_s - 0.001
    assert len(worker.seen) == 2
