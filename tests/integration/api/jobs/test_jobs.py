"""Jobs of other services: what a bare client of Redis sees of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from api.jobs.reply import Reply
from api.jobs.runner import JobRun
from api.lifecycle import Gateway
from common.broker.keys import Keys
from common.messages.request import Generate
from common.settings.settings import Settings
from deploy.serve.broker import Broker
from tests.support.fleet.gateways import SETTINGS, model_tokenizer, ready
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.waiting import PATIENCE_S, wait_until

TOKENIZER = model_tokenizer().backend
IDS: list[int] = TOKENIZER.encode(" zero one two three four five six seven eight nine").ids
KEYS = Keys("default")
TEXT = " zero one two three four five six seven eight nine"
CHAT = {"messages": [{"role": "user", "content": "Count."}]}


def answer(_: Generate) -> Answer:
    return Answer(IDS)


@contextlib.asynccontextmanager
async def gateway(url: str, name: str = "g0-test", **settings: Any) -> AsyncIterator[Gateway]:
    one = Gateway(Settings(redis_url=url, **(SETTINGS | settings)), name, model_tokenizer())
    async with one.running():
        await ready(one)
        yield one


class Service:
    """Another service: it knows names of keys, JSON, and nothing else."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.heard: dict[str, list[Any]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def submit(self, **job: Any) -> str:
        return (await self.redis.xadd(KEYS.submit, {"job": json.dumps(job)})).decode()  # type: ignore[no-any-return]

    async def listen(self, name: str) -> list[Any]:
        """What will be heard on a channel."""
        heard = self.heard[name] = []
        pubsub = self.redis.pubsub()
        await pubsub.subscribe(KEYS.channel(name))
        await pubsub.get_message(timeout=5)

        async def collect(heard: list[Any]) -> None:
            async for message in pubsub.listen():
                heard += [json.loads(message["data"])]

        self.tasks.append(asyncio.create_task(collect(heard)))
        return heard

    async def result(self, job_id: str, timeout_s: float = PATIENCE_S) -> Any:
        return json.loads(await wait_until(lambda: self.redis.get(KEYS.result(job_id)), timeout_s))

    async def stream(self, job_id: str, after: str = "0") -> list[Any]:
        return [
            json.loads(fields[b"frame"])
            for _, fields in await self.redis.xrange(KEYS.reply(job_id), f"({after}")
        ]

    async def settled(self) -> None:
        """Returns when no entry is left."""

        async def empty() -> bool:
            return await self.redis.xlen(KEYS.submit) == 0  # type: ignore[no-any-return]

        await wait_until(empty)


@pytest.fixture
async def service(redis: Redis) -> AsyncIterator[Service]:
    one = Service(redis)
    yield one
    for task in one.tasks:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def worker(broker: Broker) -> AsyncIterator[FakeWorker]:
    async with working(broker.url, TOKENIZER, answer) as one:
        yield one


async def test_a_job_gets_the_answer_of_http(service: Service, worker: FakeWorker, broker: Broker) -> None:
    heard = await service.listen("ext:me")
    async with gateway(broker.url):
        job_id = await service.submit(
            inputs="Count.", parameters={"details": True}, reply_to="ext:me", reply="stream"
        )
        result = await service.result(job_id)
        await wait_until(lambda: len(heard) == len(IDS) + 1)
        await service.settled()
    assert result["generated_text"] == TEXT
    assert result["details"]["finish_reason"] == "eos_token"
    assert [frame["token"]["id"] for frame in heard] == [*IDS, 2]
    assert [frame["generated_text"] for frame in heard] == [None] * len(IDS) + [TEXT]
    assert await service.stream(job_id) == heard
    assert await service.stream(job_id, after="4-0") == heard[4:]
    hour = [
        await service.redis.ttl(key) for key in (KEYS.result(job_id), KEYS.reply(job_id), KEYS.job(job_id))
    ]
    assert all(3500 < ttl <= 3600 for ttl in hour)


async def test_an_entry_that_comes_while_the_run_detaches_is_answered(
    service: Service, worker: FakeWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is read as a live one, and by then its run has told the last frame and does nothing but tidy
    up.
    """
    tidy, tidying, go_on = JobRun.detach, asyncio.Event(), asyncio.Event()

    async def slowly(self: JobRun) -> None:
        tidying.set()
        await go_on.wait()
        await tidy(self)

    async def live(self: Reply) -> str:
        return "live"

    async with gateway(broker.url):
        monkeypatch.setattr(JobRun, "detach", slowly)
        await service.submit(id="a", inputs="Count.")
        await tidying.wait()
        monkeypatch.setattr(Reply, "register", live)
        heard = await service.listen("ext:me")
        await service.submit(id="a", inputs="Count.", reply_to="ext:me")
        await wait_until(lambda: len(heard) == len(IDS) + 1)
        go_on.set()
        await service.settled()


async def test_a_chat_job_gets_the_answer_of_http(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    heard = await service.listen("ext:me")
    async with gateway(broker.url):
        await service.submit(
            id="c",
            **CHAT,
            parameters={"n": 2, "stream_options": {"include_usage": True}},
            reply_to="ext:me",
            reply="stream",
        )
        result = await service.result("c")
        await wait_until(lambda: heard and heard[-1].get("usage"))
    assert result["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in result["choices"]] == [TEXT, TEXT]
    for i in range(2):
        deltas = [
            choice["delta"].get("content") or ""
            for chunk in heard
            for choice in chunk["choices"]
            if choice["index"] == i
        ]
        assert "".join(deltas) == TEXT
    assert {chunk["object"] for chunk in heard} == {"chat.completion.chunk"}
    assert await service.stream("c") == heard


async def test_a_job_has_prompt_logprobs_in_its_answer_only(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    asked = {"inputs": "Count to ten.", "parameters": {"decoder_input_details": True}}
    async with gateway(broker.url):
        result = await service.result(await service.submit(**asked))
        refused = await service.result(await service.submit(**asked, reply="stream"))
    ids = TOKENIZER.encode("Count to ten.").ids
    assert [(token["id"], token["logprob"]) for token in result["details"]["prefill"]] == [(ids[0], None)] + [
        (token_id, -0.5 * i) for i, token_id in enumerate(ids) if i
    ]
    assert (refused["error_type"], "`decoder_input_details`" in refused["error"]) == ("validation", True)


async def test_an_invalid_job_is_answered_with_its_error(service: Service, broker: Broker) -> None:
    heard = await service.listen("ext:me")
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS[:3], error="the engine broke")),
        gateway(broker.url),
    ):
        await service.submit(id="a", inputs="Count.", reply_to="ext:me")
        result = await service.result("a")
        await wait_until(lambda: len(heard) == 4)
    assert (
        result
        == heard[-1]
        == {"error": "Request failed during generation: the engine broke", "error_type": "generation"}
    )


GARBAGE: list[tuple[str, dict[Any, Any], str]] = [  # name, fields, what the error says
    ("no job", {"jobs": "{}"}, "no field `job`"),
    ("binary", {b"\xff\xfe": b"\x00\xff"}, "no field `job`"),
    ("not UTF-8", {"job": b"\xff\xfe"}, "not JSON"),
    ("not JSON", {"job": "{"}, "not JSON"),
    ("no object", {"job": "[1]"}, "must be an object"),
    ("nothing asked", {"job": "{}"}, "either `inputs` or `messages`"),
    ("both asked", {"job": json.dumps({"inputs": "a", **CHAT})}, "either `inputs` or `messages`"),
    ("unknown field", {"job": json.dumps({"inputs": "a", "replyto": "ext:x"})}, "replyto"),
    ("wrong type", {"job": json.dumps({"inputs": 5})}, "`inputs`"),
    ("wrong id", {"job": json.dumps({"inputs": "a", "id": "a#0"})}, "`id`"),
    ("long id", {"job": json.dumps({"inputs": "a", "id": "a" * 129})}, "`id`"),
    ("wrong parameters", {"job": json.dumps({"inputs": "a", "parameters": [1]})}, "`parameters`"),
    ("not ours", {"job": json.dumps({"inputs": "a", "reply_to": "events:g0"})}, "`reply_to`"),
    ("wrong reply", {"job": json.dumps({"inputs": "a", "reply": "mail"})}, "`reply`"),
    (
        "limit",
        {"job": json.dumps({"inputs": "a", "parameters": {"max_new_tokens": 10**6}})},
        "`max_new_tokens`",
    ),
    ("not served", {"job": json.dumps({"inputs": "a", "parameters": {"watermark": True}})}, "`watermark`"),
    ("another model", {"job": json.dumps({"inputs": "a", "model": "gpt-4"})}, "gpt-4"),
    ("too large", {"job": json.dumps({"inputs": "a" * 3000})}, "larger than 2000 bytes"),
    ("deep", {"job": '{"inputs":' + "[" * 500 + "]" * 500 + "}"}, "deep"),
    ("too deep", {"job": "[" * 1900}, "not JSON"),
    ("chat of nothing", {"job": json.dumps({"messages": []})}, "`messages`"),
    ("chat with a stream", {"job": json.dumps({**CHAT, "parameters": {"stream": True}})}, "`stream`"),
]


async def test_malformed_entries_are_answered_with_errors(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with gateway(broker.url, payload_limit=2000):
        entries = [
            (name, (await service.redis.xadd(KEYS.submit, fields)).decode(), words)
            for name, fields, words in GARBAGE
        ]
        for name, entry_id, words in entries:
            error = (await service.result(entry_id))["error"]
            assert words in (error if isinstance(error, str) else error["message"]), name
        await service.submit(id="good", inputs="Count.")
        assert await service.result("good") == {"generated_text": TEXT}
        await service.settled()


async def test_overwritten_keys_harm_no_other_job(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    await service.redis.set(KEYS.submit, "mine")
    await service.redis.set(KEYS.job("spoiled"), "mine")
    await service.redis.set(KEYS.reply("fine"), "mine")
    await service.redis.rpush(KEYS.result("fine"), "mine")  # type: ignore[misc]
    async with gateway(broker.url) as one:
        await service.redis.delete(KEYS.submit)
        await service.submit(id="spoiled", inputs="Count.")
        assert "overwritten" in (await service.result("spoiled"))["error"]
        await service.redis.delete(KEYS.submit)
        await wait_until(lambda: service.redis.exists(KEYS.submit))
        await service.redis.delete(KEYS.result("fine"))
        await service.submit(id="fine", inputs="Count.", reply="stream")
        assert await service.result("fine") == {"generated_text": TEXT}
        await service.settled()
        await wait_until(lambda: not one.job_consumer.held and not one.pool.relay.streams)


async def test_the_same_job_joins_and_another_with_its_id_conflicts(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    first, second, third = [await service.listen(f"ext:{i}") for i in range(3)]
    async with gateway(broker.url, "g0") as one, gateway(broker.url, "g1") as other:
        await worker.pause()
        for i in range(2):
            await service.submit(id="a", inputs="Count.", reply_to=f"ext:{i}")
        await wait_until(
            lambda: (
                sum(len(run.replies) for gate in (one, other) for run in gate.job_consumer.runs.values()) == 2
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


async def test_a_job_waits_for_room_in_the_queue(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    async with gateway(broker.url, max_concurrent_requests=2):
        for i in range(8):
            await service.submit(id=f"j{i}", inputs="Count.", parameters={"best_of": 1})
        assert [await service.result(f"j{i}") for i in range(8)] == [{"generated_text": TEXT}] * 8


async def test_a_job_waits_for_a_worker(service: Service, broker: Broker) -> None:
    one = Gateway(Settings(redis_url=broker.url, **SETTINGS), "g0", model_tokenizer())
    async with one.running():
        await service.submit(id="a", inputs="Count.")
        await wait_until(lambda: one.job_consumer.runs)
        async with working(broker.url, TOKENIZER, answer):
            assert await service.result("a") == {"generated_text": TEXT}


async def test_jobs_beyond_submit_limit_are_rejected(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    await worker.pause()
    async with gateway(broker.url, submit_limit=3):
        for i in range(5):
            await service.submit(id=f"j{i}", inputs="Count.")
        errors = [await service.result(f"j{i}") for i in (3, 4)]
        assert errors == [{"error": "Model is overloaded", "error_type": "overloaded"}] * 2
        worker.going.set()
        assert [await service.result(f"j{i}") for i in range(3)] == [{"generated_text": TEXT}] * 3
        await service.settled()
    assert len(worker.seen) == 3


async def test_a_job_is_cancelled_before_or_while_it_runs(service: Service, broker: Broker) -> None:
    heard = await service.listen("ext:me")
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer(IDS * 500, ends=False), step_s=0.01) as worker,
        gateway(broker.url) as one,
    ):
        await service.submit(id="runs", inputs="Count.", reply_to="ext:me")
        await wait_until(lambda: len(heard) > 3)
        await service.redis.xadd(KEYS.submit, {"cancel": "runs"})
        result = await service.result("runs")
        await wait_until(lambda: heard[-1] == result)
        assert "cancelled" in result["error"]
        await service.redis.xadd(KEYS.submit, {"cancel": "early"})
        await service.submit(id="early", inputs="Count.")
        assert (await service.result("early"))["error_type"] == "cancelled"
        for name in (b"nobody", b"\xff", b""):
            await service.redis.xadd(KEYS.submit, {"cancel": name})
        await service.settled()
        await wait_until(lambda: not one.pool.relay.streams and not worker.live)
        assert len(worker.seen) <= 2


async def test_another_gateway_continues_the_jobs_of_a_dead_one(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """Each frame once, on the channel and in the stream, with the text of one generation."""
    heard = await service.listen("ext:me")
    worker.step_s = 0.05
    dead = Gateway(Settings(redis_url=broker.url, **SETTINGS, worker_ttl_s=0.3), "g0", model_tokenizer())
    life = [
        asyncio.create_task(loop)
        for loop in (dead.pool.relay.run(), dead.pool.workers.run(), dead.job_consumer.run())
    ]
    await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
    await service.submit(id="c", **CHAT, parameters={"n": 2}, reply="stream")
    await wait_until(lambda: len(heard) >= 3)
    for task in life:  # no farewell
        task.cancel()
    await asyncio.wait(life)
    async with gateway(broker.url, "g1", worker_ttl_s=0.3) as other:
        await wait_until(lambda: other.pool.relay.followed == {KEYS.events("g0"): 3})
        assert await service.result("a") == {"generated_text": TEXT}
        assert [choice["message"]["content"] for choice in (await service.result("c"))["choices"]] == [
            TEXT
        ] * 2
        await service.settled()
        await wait_until(lambda: len(heard) == len(IDS) + 1)
        assert not other.pool.relay.followed and not other.pool.relay.streams
    assert [frame["token"]["id"] for frame in heard] == [*IDS, 2]
    assert await service.stream("a") == heard
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
    await dead.pool.redis.aclose()


async def test_cut_connections_lose_and_repeat_no_frame(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """Jobs whose reading, admission, frames or answers fall into a gap."""
    heard = await service.listen("ext:me")
    worker.step_s = 0.02
    async with gateway(f"{broker.url}?client_name=gateway") as one:
        for i in range(12):
            await service.submit(
                id=f"j{i}", inputs="Count.", reply="stream", **({"reply_to": "ext:me"} if i == 0 else {})
            )
            for client in await service.redis.client_list():
                if client["name"] == "gateway":
                    await service.redis.client_kill_filter(_id=client["id"])
            await wait_until(one.pool.relay.subscribed.is_set)
        assert [await service.result(f"j{i}", 30) for i in range(12)] == [{"generated_text": TEXT}] * 12
        await service.settled()
    for i in range(12):
        assert [frame["token"]["id"] for frame in await service.stream(f"j{i}")] == [*IDS, 2]
    await wait_until(lambda: len(heard) == len(IDS) + 1)
    assert heard == await service.stream("j0")
    assert len(worker.seen) == 12


async def test_two_gateways_with_one_job_send_each_frame_once(
    service: Service, worker: FakeWorker, broker: Broker
) -> None:
    """A gateway that shows no signs of life any more, and works all the same."""
    heard = await service.listen("ext:me")
    worker.step_s = 0.05
    silent = Gateway(Settings(redis_url=broker.url, **SETTINGS, worker_ttl_s=0.3), "g0", model_tokenizer())
    life = [asyncio.create_task(loop) for loop in (silent.pool.relay.run(), silent.job_consumer.run())]
    await silent.pool.workers.refresh()
    await service.submit(id="a", inputs="Count.", reply_to="ext:me", reply="stream")
    await wait_until(lambda: heard)
    async with gateway(broker.url, "g1", worker_ttl_s=0.3) as other:
        await wait_until(lambda: "a" in other.job_consumer.runs and "a" in silent.job_consumer.runs)
        assert await service.result("a") == {"generated_text": TEXT}
        await wait_until(lambda: not other.job_consumer.runs and not silent.job_consumer.runs)
    assert [frame["token"]["id"] for frame in heard] == [*IDS, 2]
    assert await service.stream("a") == heard
    assert len(worker.seen) == 1
    for task in life:
        task.cancel()
    await asyncio.wait(life)
    await silent.pool.redis.aclose()
