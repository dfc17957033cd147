"""Jobs of other services, as a plain client of Redis sees them: their answers, frames and errors, also
where gateways died, or the broker lost its last writes; those that may not run before a time; and
`tokenfleet jobs`, which shows, cancels and tries jobs again.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from api.app import Gateway
from api.jobs.arq_worker import ArqWorker
from api.jobs.consumer import submit_lost
from api.jobs.job import read_job
from api.jobs.records import LIVE, SCHEDULED, retry_dead
from api.protocols.protocol import Context
from api.requests.service_terms import MAX_DEADLINE_MS
from common import api_keys
from common.api_keys import KeyFields
from common.broker.client import connect
from common.broker.pool_client import PoolClient
from common.messages.request import Generate
from common.settings.settings import Settings
from deploy.cli.command_line import run as run_command
from deploy.launcher.embedded_broker import Broker
from tests.support.answers import CHAT_PATH, first_part, positions, post
from tests.support.broker_state import KEYS
from tests.support.fleet.gateways import SETTINGS, answering
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import CHAT, IDS, TEXT, Service, answer, killed_gateway, running_gateway
from tests.support.keys.issued import add_key
from tests.support.tokenizer import TOKENIZER, ids, model_tokenizer
from tests.support.waiting import PATIENCE_S, in_background, wait_for, wait_until


@pytest.fixture
async def service(redis: Redis) -> AsyncIterator[Service]:
    service = Service(redis)
    yield service
    for task in service.tasks:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    async with working(broker.url, TOKENIZER, answer) as fake:
        yield fake


async def test_a_job_gets_the_answer_of_http(service: Service, worker: FakeWorker) -> None:
    received = await service.listen("ext:me")
    async with running_gateway(worker.url):
        job_id = await service.submit(
            inputs="Count.", parameters={"details": True}, reply_to="ext:me", reply="stream"
        )
        result = await service.result(job_id)
        await wait_until(lambda: len(received) == len(IDS) + 1)
        await service.settled()
    assert result["generated_text"] == TEXT
    assert result["details"]["finish_reason"] == "eos_token"
    assert [frame["token"]["id"] for frame in received] == [*IDS, 2]
    assert [frame["generated_text"] for frame in received] == [None] * len(IDS) + [TEXT]
    assert await service.stream(job_id) == received
    assert await service.stream(job_id, after="4-0") == received[4:]
    hour = [
        await service.redis.ttl(key) for key in (KEYS.result(job_id), KEYS.reply(job_id), KEYS.job(job_id))
    ]
    assert all(3500 < ttl <= 3600 for ttl in hour)


async def test_jobs_beyond_submit_limit_are_rejected(service: Service, worker: FakeWorker) -> None:
    await worker.pause()
    async with running_gateway(worker.url, submit_limit=3):
        for i in range(5):
            await service.submit(id=f"j{i}", inputs="Count.", reply="stream")
        errors = [await service.result(f"j{i}") for i in (3, 4)]
        assert errors == [{"error": "Model is overloaded", "error_type": "overloaded"}] * 2
        assert await service.stream("j3") == errors[:1]
        await wait_for(lambda: worker.redis.xlen(worker.keys.requests), 3)
        await service.redis.xadd(KEYS.submit, {"cancel": "j2"})  # there is no room, and none is needed
        await wait_for(lambda: service.redis.xlen(KEYS.submit), 3)
        worker.going.set()
        assert [await service.result(f"j{i}") for i in range(2)] == [{"generated_text": TEXT}] * 2
        assert (await service.result("j2"))["error_type"] == "cancelled"
        await service.settled()
        await worker.pause()
        await service.submit(id="j3", inputs="Count.", reply="stream")
        await wait_for(lambda: worker.redis.xlen(worker.keys.requests), 1)
        assert await service.redis.exists(KEYS.result("j3"), KEYS.reply("j3")) == 0
        worker.going.set()
        assert await service.result("j3") == {"generated_text": TEXT}
        assert len(await service.stream("j3")) == len(IDS) + 1
    assert len(worker.seen) == 4


async def test_a_job_is_cancelled_before_or_while_it_runs(service: Service, broker: Broker) -> None:
    received = await service.listen("ext:me")
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS * 500, ends=False), step_s=0.01) as worker,
        running_gateway(broker.url) as gateway,
    ):
        await service.submit(id="runs", inputs="Count.", reply_to="ext:me")
        await wait_until(lambda: len(received) > 3)
        await service.redis.xadd(KEYS.submit, {"cancel": "runs"})
        result = await service.result("runs")
        await wait_until(lambda: received[-1] == result)
        assert "cancelled" in result["error"]
        await service.redis.xadd(KEYS.submit, {"cancel": "early"})
        await service.submit(id="early", inputs="Count.")
        assert (await service.result("early"))["error_type"] == "cancelled"
        for name in (b"nobody", b"\xff", b""):
            await service.redis.xadd(KEYS.submit, {"cancel": name})
        await service.settled()
        await wait_until(lambda: not gateway.pool.relay.streams and not worker.live)
        assert len(worker.seen) <= 2


async def test_a_job_is_of_the_class_batch_unless_it_says_otherwise(
    service: Service, worker: FakeWorker
) -> None:
    async with running_gateway(worker.url):
        for i, terms in enumerate(({}, {"priority": "interactive", "tenant": "acme", "deadline_ms": 60_000})):
            await service.submit(id=f"j{i}", inputs="Count.", **terms)
            await service.result(f"j{i}")
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        await service.submit(id="chat", **chat, parameters={"service_tier": "default"})
        await service.result("chat")
        await service.submit(id="wrong", inputs="Count.", priority="urgent")
        assert "`priority`: Input should be one of" in (await service.result("wrong"))["error"]
    assert [(one.class_name, one.tenant) for one in worker.seen] == [
        ("batch", ""),
        ("interactive", "acme"),
        ("standard", ""),
    ]
    assert 50_000 < worker.seen[1].ttl_ms <= 60_000
    assert worker.seen[0].ttl_ms == MAX_DEADLINE_MS, "a job waits in the queue, too, until its own deadline"


async def test_a_job_that_waits_beyond_its_deadline_never_starts(
    service: Service, worker: FakeWorker
) -> None:
    async with running_gateway(worker.url, max_concurrent_requests=1):
        await worker.pause()
        await service.submit(id="first", inputs="Count.")
        await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
        await service.submit(id="late", inputs="Count.", deadline_ms=300)
        error = await service.result("late")
        assert error["error_type"] == "timeout" and "it never started" in error["error"]
        worker.going.set()
        assert await service.result("first") == {"generated_text": TEXT}
    assert len(worker.seen) == 1


GENERATION = {"return_generation_logits": True}
BOTH = {"return_context_logits": True} | GENERATION


async def test_a_job_has_logits_in_its_answer_only(service: Service, broker: Broker, redis: Redis) -> None:
    async with answering(broker.url, Answer(ids(" x y"))) as (_, _, client):
        for job, path, body in (
            ({"inputs": "a b", "parameters": BOTH}, "/generate", {"inputs": "a b", "parameters": BOTH}),
            ({**CHAT, "parameters": BOTH}, CHAT_PATH, CHAT | BOTH),
        ):
            job_id = await service.submit(**job)
            result = first_part(await service.result(job_id))
            assert result == first_part(await post(client, path, body))
            assert positions(result["context_logits"])
            assert 0 < await redis.pttl(KEYS.logits(f"{job_id}#0")) <= 60_000
            refused = await service.answer(**job, reply="stream")
            assert "`return_context_logits` must be false when tokens are streamed" in str(refused)


NO_TIME = ": must be seconds since 1970, or a time with its offset"
WRONG_TIMES: list[tuple[object, str]] = [
    *((wrong, NO_TIME) for wrong in (-1, "tomorrow", "2026-12-01T08:00:00")),
    (19_999_999_999, " must be at most 30 days (2592000 s)"),
]
FAULTY = {"inputs": "a", "parameters": {"top_p": 7}, "not_before": time.time() + 3600}
GARBAGE: list[tuple[str, dict[Any, Any], str]] = [  # name, fields, what the error says
    ("no job", {"jobs": "{}"}, "no field `job`"),
    ("job and cancel", {"job": json.dumps({"inputs": "a"}), "cancel": "x"}, "`job` or `cancel`, not both"),
    ("binary", {b"\xff\xfe": b"\x00\xff"}, "no field `job`"),
    ("not UTF-8", {"job": b"\xff\xfe"}, "not JSON"),
    ("not JSON", {"job": "{"}, "not JSON"),
    ("no object", {"job": "[1]"}, "must be an object"),
    ("no prompt", {"job": "{}"}, "either `inputs` or `messages`"),
    ("two prompts", {"job": json.dumps({"inputs": "a", **CHAT})}, "either `inputs` or `messages`"),
    ("unknown field", {"job": json.dumps({"inputs": "a", "replyto": "ext:x"})}, "replyto"),
    ("wrong type", {"job": json.dumps({"inputs": 5})}, "`inputs`"),
    ("empty prompt", {"job": json.dumps({"inputs": ""})}, "`inputs` cannot be empty"),
    ("wrong id", {"job": json.dumps({"inputs": "a", "id": "a#0"})}, "`id`"),
    ("long id", {"job": json.dumps({"inputs": "a", "id": "a" * 129})}, "`id`"),
    ("a batch's line", {"job": json.dumps({"inputs": "a", "id": f"batch_{0:032x}/1"})}, "a batch's line"),
    ("wrong parameters", {"job": json.dumps({"inputs": "a", "parameters": [1]})}, "`parameters`"),
    ("not ours", {"job": json.dumps({"inputs": "a", "reply_to": "events:g0"})}, "`reply_to`"),
    ("wrong reply", {"job": json.dumps({"inputs": "a", "reply": "mail"})}, "`reply`"),
    (
        "limit",
        {"job": json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 10**6}})},
        "`max_new_tokens`",
    ),
    ("not served", {"job": json.dumps({"inputs": "a", "parameters": {"adapter_id": "a"}})}, "`adapter_id`"),
    ("another model", {"job": json.dumps({"inputs": "a", "model": "gpt-4"})}, "gpt-4"),
    ("too large", {"job": json.dumps({"inputs": "a" * 3000})}, "larger than 2000 bytes"),
    ("deep", {"job": '{"inputs":' + "[" * 201 + "]" * 201 + "}"}, "more than 201 levels deep"),
    ("too deep", {"job": "[" * 1900}, "not JSON"),
    *(
        ("a wrong time", {"job": json.dumps({"inputs": "a", "not_before": at})}, f"`not_before`{words}")
        for at, words in WRONG_TIMES
    ),
    ("a fault before its time", {"job": json.dumps(FAULTY)}, "top_p`: Input"),
    ("chat of nothing", {"job": json.dumps({"messages": []})}, "`messages`"),
    (
        "too many choices",
        {"job": json.dumps({**CHAT, "parameters": {"n": 1000}})},
        "`n`: Input should be less",
    ),
    ("no route", {"job": json.dumps({"input": "a", "url": "/v1/models"})}, "`url` must be one of /gen"),
    (
        "another prompt",
        {"job": json.dumps({"input": "a", "url": "/v1/messages"})},
        "`input` is no prompt of /v1/messages: give `messages`",
    ),
    ("chat with a stream", {"job": json.dumps({**CHAT, "parameters": {"stream": True}})}, "`stream`"),
]


async def test_malformed_entries_are_answered_with_errors(service: Service, worker: FakeWorker) -> None:
    await service.submit(id="taken", inputs="Count.")
    await service.redis.xgroup_create(KEYS.submit, "gateways", id="0")
    await service.redis.xreadgroup("gateways", b"\xff", {KEYS.submit: ">"})  # type: ignore[arg-type]
    async with running_gateway(worker.url, payload_limit=2000):
        entries = [
            (name, (await service.redis.xadd(KEYS.submit, fields)).decode(), words)
            for name, fields, words in GARBAGE
        ]
        for name, entry_id, words in entries:
            error = (await service.result(entry_id))["error"]
            assert words in (error if isinstance(error, str) else error["message"]), name
        await service.submit(id="good", inputs="Count.", messages=None, text_1=None)
        assert await service.result("good") == await service.result("taken") == {"generated_text": TEXT}
        await service.settled()


async def test_the_same_job_joins_and_another_with_its_id_conflicts(
    service: Service, worker: FakeWorker
) -> None:
    first, second, third = [await service.listen(f"ext:{i}") for i in range(3)]
    async with running_gateway(worker.url, "g0") as gateway, running_gateway(worker.url, "g1") as other:
        await worker.pause()
        for i in range(2):
            await service.submit(id="a", inputs="Count.", reply_to=f"ext:{i}")
        await wait_until(
            lambda: (
                sum(len(run.listeners) for one in (gateway, other) for run in one.job_consumer.runs.values())
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


@pytest.mark.parametrize("loses_entries", [False, True])
async def test_another_gateway_continues_the_jobs_of_a_dead_one(
    service: Service, worker: FakeWorker, loses_entries: bool
) -> None:
    """Each frame comes once, on the channel and in the stream, with the text of one generation. Entries that
    the broker has lost, the first gateway has submitted again.
    """
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 5  # no job ends before its gateway
    async with killed_gateway(worker.url):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
        usage = {"stream_options": {"include_usage": True}}
        await service.submit(id="c", **CHAT, parameters={"n": 2} | usage, reply="stream")
        await wait_until(lambda: len(received) >= 3 and len(worker.seen) == 3)
        if loses_entries:
            await service.redis.delete(KEYS.submit)
            await wait_for(lambda: service.redis.xlen(KEYS.submit), 2)
    async with running_gateway(worker.url, "g1", worker_ttl_s=0.3) as other:
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
    *chunks, last = await service.stream("c")
    assert last["usage"] and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
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
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gateways that stop in order while they validate it do not count."""
    validating, ask = asyncio.Event(), Context.ask

    async def ask_or_hang(context: Context, prompts: Any) -> Any:
        if context.pool.gateway == "last":
            return await ask(context, prompts)
        validating.set()
        return await asyncio.Future()

    async def send_nothing(*_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(Context, "ask", ask_or_hang)
    await service.submit(id="slow", inputs="Count.")
    for i in range(3):
        async with running_gateway(worker.url, f"g{i}", worker_ttl_s=0.3):
            await validating.wait()
            validating.clear()
    await service.submit(id="waits", inputs="Count.")
    async with killed_gateway(worker.url, "k0"):
        await validating.wait()
    async with running_gateway(worker.url, "last", worker_ttl_s=0.3):
        assert await service.result("slow") == await service.result("waits") == {"generated_text": TEXT}
    await service.submit(id="fatal", inputs="Count.")
    for i in range(2):
        with monkeypatch.context() as patch:
            async with killed_gateway(worker.url, f"f{i}"):
                validating.clear()
                await validating.wait()
                if i == 1:
                    await service.submit(id="waits-too", inputs="Count.")
                patch.setattr(Redis, "hdel", send_nothing)
    async with running_gateway(worker.url, "last", worker_ttl_s=0.3):
        assert "2 gateways ended while they validated" in (await service.result("fatal"))["error"]
        assert await service.result("waits-too") == {"generated_text": TEXT}


async def test_cut_connections_lose_and_repeat_no_frame(service: Service, worker: FakeWorker) -> None:
    """Connections are cut while jobs are read, admitted, streamed and answered."""
    received = await service.listen("ext:me")
    worker.step_s = 0.02
    async with running_gateway(f"{worker.url}?client_name=gateway") as gateway:
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


async def test_two_gateways_with_one_job_send_each_frame_once(service: Service, worker: FakeWorker) -> None:
    """One of them sends no heartbeats any more, but still works."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 5  # the job does not end before both have it
    silent = Gateway(Settings(redis_url=worker.url, **SETTINGS, worker_ttl_s=0.3), "g0", model_tokenizer())
    async with in_background(silent.pool.relay.run(), silent.job_consumer.run()):
        await silent.pool.workers.refresh()
        await silent.keys.refresh()
        await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
        await wait_until(lambda: received)
        async with running_gateway(worker.url, "g1", worker_ttl_s=0.3) as other:
            await wait_until(lambda: "a" in other.job_consumer.runs and "a" in silent.job_consumer.runs)
            worker.most_tokens = sys.maxsize
            assert await service.result("a") == {"generated_text": TEXT}
            await wait_until(lambda: not other.job_consumer.runs and not silent.job_consumer.runs)
        assert [frame["token"]["id"] for frame in received] == [*IDS, 2]
        assert await service.stream("a") == received
        assert len(worker.seen) == 1
    await silent.pool.client.redis.aclose()


async def test_lost_frames_are_offered_again(service: Service, worker: FakeWorker) -> None:
    """The stream of frames is whole, and the channel hears none twice."""
    received = await service.listen("ext:me")
    worker.step_s, worker.most_tokens = 0.01, 6  # the job does not end before it is disturbed
    async with running_gateway(worker.url):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
        await wait_until(lambda: len(received) == 6)
        await worker.pause()
        job, channel = KEYS.job("a"), KEYS.key("ext:me")
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


async def test_a_job_that_another_gateway_has_answered_is_not_submitted_again(
    service: Service, worker: FakeWorker
) -> None:
    """A gateway that was stopped until its entries were claimed finds them gone."""
    async with running_gateway(worker.url):
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
        b"job": b'{"inputs": "\\u00e9", "parameters": {"top_p": 1e-7}, "tenant": null, "reply": "stream", '
        b'"not_before": 5}'
    }
    job = lost = read_job("5000-0", fields, 2**20)
    for _ in range(2):  # the entry in its place is lost, too
        await submit_lost(service.redis, KEYS, {job.entry_id: job})
        [[entry_id, fields]] = await service.redis.xrevrange(KEYS.submit, count=1)
        job = read_job(entry_id.decode(), fields, 2**20)
        await service.redis.xdel(KEYS.submit, entry_id)
    assert job.entry_id != "5000-0"
    assert (job.id, job.digest, job.in_stream, job.entry_ms) == ("5000-0", lost.digest, True, 5000)


async def test_a_lost_job_of_arq_is_submitted_again(service: Service, worker: FakeWorker) -> None:
    redis = connect(worker.url)
    client = ArqWorker(PoolClient(redis, KEYS), Settings(redis_url=worker.url))
    answer = asyncio.create_task(client.run_in_fleet("a", {"inputs": "Count."}))
    await wait_for(lambda: redis.xlen(KEYS.submit), 1)
    await redis.delete(KEYS.submit)
    async with running_gateway(worker.url):
        assert await asyncio.wait_for(answer, PATIENCE_S) == {"generated_text": TEXT}
        await service.settled()
    await redis.aclose()


# --- jobs with a time, and dead ones ------------------------------------------------------------------------

HEARTBEAT_S = 0.05


async def is_scheduled(service: Service, job_id: str) -> bool:
    return await service.redis.zscore(KEYS.job_set(SCHEDULED), job_id) is not None


async def test_a_job_waits_for_its_time_and_is_run_once(service: Service, worker: FakeWorker) -> None:
    received = await service.listen("ext:me")
    due_s = time.time() + 0.5
    job = {"id": "a", "inputs": "Count.", "not_before": due_s, "deadline_ms": 900_000}
    async with running_gateway(worker.url, heartbeat_s=HEARTBEAT_S):
        await service.submit(**job)
        await service.submit(**job, reply_to="ext:me")
        assert await service.result("a") == {"generated_text": TEXT}
        assert time.time() >= due_s
        await wait_until(lambda: received and received[-1]["generated_text"])
        await service.settled()
    assert len(worker.seen) == 1
    assert not await is_scheduled(service, "a")


async def test_a_scheduled_job_outlives_its_gateway(service: Service, worker: FakeWorker) -> None:
    due_s = time.time() + 1.0
    async with killed_gateway(worker.url):
        await service.submit(
            id="a", inputs="Count.", not_before=datetime.fromtimestamp(due_s, UTC).isoformat()
        )

        async def is_taken() -> bool:
            return await is_scheduled(service, "a") or time.time() > due_s

        await wait_until(is_taken)
    async with (
        running_gateway(worker.url, "g1", heartbeat_s=HEARTBEAT_S),
        running_gateway(worker.url, "g2", heartbeat_s=HEARTBEAT_S),
    ):
        assert await service.result("a") == {"generated_text": TEXT}
        await service.settled()
    assert len(worker.seen) == 1


async def test_a_cancelled_scheduled_job_ends_at_once_wherever_its_answer_goes(
    service: Service, worker: FakeWorker
) -> None:
    received = await service.listen("ext:me")
    job = {"id": "a", "inputs": "Count.", "not_before": time.time() + 3600}
    async with running_gateway(worker.url, heartbeat_s=HEARTBEAT_S):
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


async def test_a_scheduled_job_is_refused_where_too_many_wait(service: Service, worker: FakeWorker) -> None:
    later = {"inputs": "Count.", "not_before": time.time() + 3600}
    async with running_gateway(worker.url, submit_limit=1):
        await service.submit(id="a", **later)
        await wait_until(lambda: is_scheduled(service, "a"))
        assert (await service.answer(**later))["error_type"] == "overloaded"
        assert await service.answer(inputs="Count.") == {"generated_text": TEXT}
    assert await service.redis.zcard(KEYS.job_set(LIVE)) == 0


async def test_a_job_whose_key_has_ended_meanwhile_ends_with_that_error(
    service: Service, worker: FakeWorker
) -> None:
    async with PoolClient.connect(Settings(redis_url=worker.url, **SETTINGS)) as client:
        key = await api_keys.add_key(client, KeyFields(tenant="acme"))
        job = {"id": "a", "inputs": "Count.", "not_before": time.time() + 3600}
        async with running_gateway(worker.url, heartbeat_s=HEARTBEAT_S) as gateway:
            await service.submit(key.text, **job)
            await wait_until(lambda: is_scheduled(service, "a"))
            await api_keys.revoke_key(client, key.record.key_id)
            await wait_until(lambda: gateway.keys.by_id[key.record.key_id].revoked)
            await service.redis.zadd(KEYS.job_set(SCHEDULED), {"a": 1})  # its time has come
            assert (await service.result("a"))["error_type"] == "unauthorized"
            await service.settled()
    record = await service.redis.hgetall(KEYS.job_record("a"))  # type: ignore[misc]
    assert (record[b"tenant"], record[b"state"]) == (b"acme", b"failed")


async def test_a_job_that_was_accepted_is_tried_again_after_its_key_was_rotated(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one with the old text of the key is refused."""
    monkeypatch.setattr("api.jobs.consumer.POLL_S", 0.0)
    async with PoolClient.connect(Settings(redis_url=worker.url, **SETTINGS)) as client:
        key = await api_keys.add_key(client, KeyFields(tenant="acme"))
        async with running_gateway(worker.url, heartbeat_s=HEARTBEAT_S) as gateway:
            worker.answer = BrokenEngine()
            await service.submit(key.text, id="a", inputs="Count.")
            assert (await service.result("a"))["error_type"] == "generation"
            await service.settled()
            rotated = await api_keys.rotate_key(client, key.record.key_id)
            await wait_until(lambda: gateway.keys.by_id[key.record.key_id] == rotated.record)
            worker.answer = answer
            assert await retry_dead(gateway.pool, "a")
            assert await service.result("a") == {"generated_text": TEXT}
            await service.submit(key.text, id="b", inputs="Count.")
            assert (await service.result("b"))["error_type"] == "unauthorized"
    assert [one.tenant for one in worker.seen] == ["acme", "acme"]


async def test_a_cancel_with_a_wrong_key_holds_up_no_job(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.consumer.POLL_S", 2 * PATIENCE_S)
    key = await add_key(service.redis)
    async with running_gateway(worker.url):
        await service.redis.xadd(KEYS.submit, {"cancel": "a", "api_key": "wrong"})
        await service.submit(key.text, id="a", inputs="Count.")
        assert await service.result("a") == {"generated_text": TEXT}


async def test_a_tenant_at_its_share_holds_up_no_other(service: Service, worker: FakeWorker) -> None:
    async with running_gateway(worker.url, max_concurrent_requests=2) as gateway:
        await service.answer(inputs="Count.", tenant="b")
        await worker.pause()
        for name in ("a0", "a1"):
            await service.submit(id=name, inputs="Count.", tenant="a")
            await wait_until(lambda name=name: name in gateway.job_consumer.runs)  # type: ignore[misc]
        await service.submit(id="b0", inputs="Count.", tenant="b")
        await wait_for(lambda: worker.redis.xlen(worker.keys.requests), 2)
        worker.going.set()
        for name in ("a0", "a1", "b0"):
            assert await service.result(name) == {"generated_text": TEXT}
    assert [one.tenant for one in worker.seen] == ["b", "a", "b", "a"]


async def test_jobs_that_come_before_the_keys_are_known_are_served(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for others, too."""
    monkeypatch.setattr("api.jobs.consumer.NUM_WAITING", 0)
    key = await add_key(service.redis, tenant="acme")
    settings = Settings(redis_url=worker.url, **SETTINGS | {"max_concurrent_requests": 1})
    gateway = Gateway(settings, "g0", model_tokenizer())
    for name in ("a", "b"):
        await service.submit(key.text, id=name, inputs="Count.")
    async with in_background(gateway.pool.relay.run(), gateway.job_consumer.run()):
        await gateway.pool.workers.refresh()
        await wait_until(lambda: len(gateway.job_consumer.held) == 2)
        await gateway.keys.refresh()
        for name in ("a", "b"):
            assert await service.result(name) == {"generated_text": TEXT}
    await gateway.pool.client.redis.aclose()


async def test_a_job_with_room_for_one_choice_alone_leaves_none_running(
    service: Service, worker: FakeWorker
) -> None:
    worker.most_tokens = 0
    key = await add_key(service.redis, budget_tokens=len(ids("Count.")) + 1)
    job = {"id": "a", "prompt": "Count.", "parameters": {"n": 2}}
    async with running_gateway(worker.url):
        await service.redis.xadd(KEYS.submit, {"job": json.dumps(job), "api_key": key.text})
        assert "budget" in (await service.result("a"))["error"]["message"]
        await wait_for(lambda: service.redis.hgetall(KEYS.usage_pending), {})


async def test_jobs_that_wait_for_others_are_seen_and_cancelled(
    service: Service, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.jobs.consumer.NUM_WAITING", 0)
    settings = Settings(redis_url=broker.url, **SETTINGS | {"max_concurrent_requests": 1})
    gateway = Gateway(settings, "g0", model_tokenizer())
    async with gateway.running():
        await service.submit(id="later", inputs="Count.", not_before=time.time() + 3600)
        await wait_until(lambda: is_scheduled(service, "later"))
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
    hook = {"url": "https://hooks.example/jobs"}
    last = {"webhook": hook | {"secret": "whsec_" + 32 * "A"}}
    for i, more in enumerate(({}, {}, last)):
        await service.submit(id=f"later-{i}", inputs="Count.", not_before=time.time() + 3600 - i, **more)
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
    assert json.loads(await run("show", "later-2"))["job"]["webhook"] == hook, "and shows no secret"
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
