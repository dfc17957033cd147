"""Who is admitted to the queue: exactly as many as the limit over all gateways, 429 while it is full, 503
while nothing can serve it, by class, tenant and deadline, and to the pool that its `model` names.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from redis.asyncio import Redis
from tokenizers import Tokenizer

from api import errors
from api.app import Gateway
from api.errors import LOADING_S
from api.requests import pool as pool_module
from api.requests.registry import IDLE_S
from api.streams import relay as relay_module
from common.broker.directory import SILENT_S
from common.broker.keys import Keys
from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.answers import CHAT, tgi_error
from tests.support.broker.listening import announced
from tests.support.engine import tiny_tokenizers
from tests.support.fleet.batchers import batcher, batching
from tests.support.fleet.gateways import answering, nothing_left, ready, serving
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.jobs import Service
from tests.support.kubernetes.manifests import FOLDER
from tests.support.machine.clock import Clock
from tests.support.tokenizer import TOKENIZER, ids
from tests.support.waiting import wait_for, wait_until

LIMIT, NUM_POSTS, NUM_JOBS = 10, 100, 60
BODY = {"inputs": "a"}


async def test_a_hundred_posts_at_once_beside_many_jobs_get_exactly_ten_places(broker: Broker) -> None:
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
        contextlib.AsyncExitStack() as stack,
    ):
        clients: list[httpx.AsyncClient] = []
        for i in range(3):
            serving_one = serving(broker.url, name=f"g{i}-test", max_concurrent_requests=LIMIT)
            gateway, client = await stack.enter_async_context(serving_one)
            await ready(gateway)
            clients.append(client)
        await worker.pause()
        redis, keys, service = worker.redis, worker.keys, Service(worker.redis)
        for i in range(NUM_JOBS):
            await service.submit(id=f"j{i}", inputs="b", parameters={"max_new_tokens": 1})

        async def places(name: str) -> int:
            return int(await redis.hget(keys.places, f"requests:{name}") or 0)  # type: ignore[misc]

        await wait_for(lambda: places("batch"), LIMIT)
        posts = [asyncio.create_task(clients[i % 3].post("/generate", json=BODY)) for i in range(NUM_POSTS)]
        await wait_until(lambda: sum(post.done() for post in posts) == NUM_POSTS - LIMIT)
        assert (await places("standard"), await places("batch")) == (LIMIT, LIMIT)
        urgent = asyncio.create_task(clients[0].post("/generate", json=BODY, headers={"x-priority": "-1"}))

        await wait_for(lambda: places("interactive"), 1)
        worker.going.set()
        answers = await asyncio.gather(*posts, urgent)
        assert Counter(answer.status_code for answer in answers) == {200: LIMIT + 1, 429: NUM_POSTS - LIMIT}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
        for i in range(NUM_JOBS):
            assert "generated_text" in await service.result(f"j{i}"), "it has waited for room"

        async def everything_is_back() -> bool:
            return not await redis.exists(keys.places) and not await redis.xlen(keys.requests)

        await wait_until(everything_is_back)


IDS = ids(" one two three four five six")
COMPLETION = {"prompt": "x", "n": 2, "max_tokens": 50, "temperature": 1.0}


def endless(_: Generate) -> Answer:
    """Answer with some tokens and no end: the scripted fleet keeps no deadlines."""
    return Answer(IDS, ends=False)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "AUDIT_S", 0.05)
    monkeypatch.setattr(relay_module, "LATE_S", 0.1)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("answer", "streamed"),
    [(endless, True), (lambda request: Answer(IDS, ends=request.request_id.endswith(".0")), False)],
)
async def test_all_choices_end_with_a_timeout_and_are_cancelled(
    broker: Broker, answer: Any, streamed: bool
) -> None:
    async with answering(broker.url, answer, request_timeout_s=1) as (worker, gateway, client):
        response = await client.post("/v1/completions", json=COMPLETION | {"stream": streamed})
        assert "was not finished before its deadline" in response.text
        assert response.status_code == (200 if streamed else 408)
        assert response.headers.get("x-should-retry") == (None if streamed else "false")
        await nothing_left(gateway, worker)


@pytest.mark.usefixtures("soon")
async def test_a_request_whose_keys_have_expired_is_told_that_it_timed_out(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens after a gateway stood still for longer than the deadline."""
    monkeypatch.setattr(relay_module, "LATE_S", 3600.0)
    async with answering(broker.url, endless, request_timeout_s=0.5) as (worker, gateway, client):
        async with client.stream(
            "POST", "/generate_stream", json={"inputs": "x", "parameters": {"max_new_tokens": 50}}
        ) as response:
            await wait_until(lambda: worker.live and gateway.pool.relay.streams)
            [stream] = gateway.pool.relay.streams.values()
            await wait_until(lambda: time.monotonic() > stream.deadline_s)
            await worker.redis.delete(worker.keys.request(stream.request.request_id))
            gateway.pool.relay.filler.request_fill([stream])
            content = (await response.aread()).decode()
        assert "was not finished before its deadline" in content and '"timeout"' in content
        await nothing_left(gateway, worker)


@pytest.mark.parametrize("limits", [{"max_concurrent_requests": 1}, {"max_queued_bytes": 500}])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_full_queue_is_429_before_any_frame(
    broker: Broker, limits: dict[str, Any], path: str
) -> None:
    async with answering(broker.url, Answer([11]), **limits) as (worker, gateway, client):
        await worker.pause()
        first = asyncio.create_task(client.post("/generate_stream", json=BODY))
        await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
        second = await client.post(path, json=BODY)
        assert (tgi_error(second), second.json()["error"]) == ((429, "overloaded"), "Model is overloaded")
        assert len(gateway.pool.relay.streams) == 1
        worker.going.set()
        assert (await first).status_code == 200
        await wait_until(lambda: not worker.live)
        assert (await client.post(path, json=BODY)).status_code == 200


async def test_503_before_a_worker_is_ready(broker: Broker) -> None:
    async with (
        serving(broker.url) as (gateway, client),
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
    ):
        await ready(gateway)
        await worker.announce("draining")
    async with serving(broker.url) as (gateway, client):
        response = await client.post("/generate_stream", json=BODY)
        assert tgi_error(response) == (503, "unavailable") and "no worker is ready yet" in response.text
        assert response.headers["retry-after"] == str(errors.LOADING_S)


async def test_workers_are_read_again_before_a_503(broker: Broker) -> None:
    """Another gateway may have seen the worker first, and the client may know that it is ready."""
    async with serving(broker.url, heartbeat_s=3600) as (_, client):
        assert (await client.post("/generate", json=BODY)).status_code == 503
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await wait_until(lambda: worker.redis.zcard(worker.keys.workers))
            await wait_until(lambda: answers(client))


async def test_503_after_the_last_worker_died(broker: Broker) -> None:
    """Requests wait for the next one for worker_grace_s; then they are refused. The limits of the dead worker
    are still known.
    """
    async with batching(broker.url), serving(broker.url, worker_grace_s=2.0) as (gateway, client):
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker:
            await worker.pause()
            await worker.announce()  # a slow start may outlast its heartbeat
            await ready(gateway)
            waiting = asyncio.create_task(client.post("/generate", json=BODY))
            await wait_until(lambda: worker.redis.xlen(worker.keys.requests))
            await worker.redis.delete(worker.keys.workers)
        await wait_until(lambda: gateway.pool.workers.ready_s + 2.0 < asyncio.get_running_loop().time())  # type: ignore[operator]
        response = await client.post("/generate", json=BODY)
        assert tgi_error(response) == (503, "unavailable") and "no worker for" in response.text
        assert gateway.pool.workers.max_total_tokens == 1024
        assert not waiting.done()
        async with working(broker.url, TOKENIZER, lambda _: Answer([11])):
            assert (await waiting).status_code == 200
            await ready(gateway)


async def test_503_long_after_the_last_batcher_worked(broker: Broker) -> None:
    """A queued request would not be placed then, nor ended at its deadline."""
    async with (
        working(broker.url, TOKENIZER, lambda _: Answer([11])) as worker,
        serving(broker.url, worker_grace_s=1.0) as (gateway, client),
    ):

        async def served() -> bool:
            await worker.announce()  # a slow start may outlast its heartbeat
            return await answers(client)

        async with batching(broker.url):
            await wait_until(lambda: gateway.pool.batcher.works)
            await wait_until(served)

        async def refused() -> bool:
            await worker.announce()
            response = await client.post("/generate", json=BODY)
            return response.status_code == 503 and "no batcher is active" in response.text

        await wait_until(refused)
        async with batching(broker.url):
            await wait_until(served)


@pytest.fixture
def own_broker() -> Iterator[Broker]:
    with brokers.running() as broker:
        yield broker


async def test_503_names_the_broker_s_error(own_broker: Broker) -> None:
    """As soon as the broker works again, requests are served."""
    admin = redis.Redis.from_url(own_broker.url)
    password = redis.Redis.from_url(own_broker.url, password="secret")
    troubles = {
        "out of memory": (lambda: admin.config_set("maxmemory", 1), lambda: admin.config_set("maxmemory", 0)),
        "READONLY": (lambda: admin.replicaof("127.0.0.1", "1"), lambda: admin.replicaof("NO", "ONE")),
        "refused user name or password": (
            lambda: (admin.config_set("requirepass", "secret"), kill_all(admin)),  # type: ignore[func-returns-value]
            lambda: password.config_set("requirepass", ""),
        ),
    }
    async with (
        working(own_broker.url, TOKENIZER, lambda _: Answer([11])),
        serving(own_broker.url) as (gateway, client),
    ):
        for words, (begin, end) in troubles.items():
            await ready(gateway)
            begin()  # type: ignore[no-untyped-call]

            async def refused(words: str = words) -> bool:
                response = await client.post("/generate_stream", json=BODY)
                return (
                    response.status_code == 503
                    and tgi_error(response) == (503, "unavailable")
                    and words in response.text
                )

            await wait_until(refused)
            end()  # type: ignore[no-untyped-call]

            async def served() -> bool:
                return (await client.post("/generate", json=BODY)).status_code == 200

            await wait_until(served)
        await wait_until(lambda: not gateway.pool.relay.streams)


def kill_all(admin: redis.Redis) -> None:
    for client in admin.client_list():  # type: ignore[union-attr]
        if client["id"] != str(admin.client_id()):
            admin.client_kill_filter(_id=client["id"], skipme=True)


@pytest.mark.slow
async def test_503_while_the_broker_is_silent_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pool_module, errors):
        monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    with brokers.running() as broker:
        pid = redis.Redis.from_url(broker.url).info("server")["process_id"]  # type: ignore[index]
        async with answering(broker.url, Answer([11])) as (_, gateway, client):
            os.kill(pid, signal.SIGSTOP)
            response = await client.post("/generate", json=BODY)
            assert tgi_error(response) == (503, "unavailable") and "did not answer in time" in response.text
            for path in ("/fleet", "/fleet/requests/r", "/v1/models/other"):
                response = await client.get(path)
                assert response.status_code == 503 and "did not answer in time" in response.text
            assert await names_of(client) == ["smollm2"]
            os.kill(pid, signal.SIGCONT)
            await wait_until(lambda: not gateway.pool.relay.streams)
            await wait_until(lambda: answers(client))
            os.kill(pid, signal.SIGKILL)
            await wait_until(lambda: gateway.pool.relay.last_error)

            async def refused() -> bool:
                response = await client.post("/generate", json=BODY)
                assert tgi_error(response) == (503, "unavailable")
                return "no connection to the broker" in response.text

            await wait_until(refused)
            for path in ("/health", "/readyz"):
                assert tgi_error(await client.get(path)) == (503, "healthcheck")
            live = await client.get("/livez")
            assert (live.status_code, live.content) == (200, b""), "the gateway itself is well"
            assert (await client.head("/livez")).status_code == 200
            assert (await client.get("/load")).status_code == 200


@pytest.mark.parametrize(("num_answered", "status"), [(1, 429), (0, 503)])
async def test_a_request_whose_turn_does_not_come_is_429_while_the_broker_answers_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, num_answered: int, status: int
) -> None:
    monkeypatch.setattr(pool_module, "CONNECT_TIMEOUT_S", 0.2)
    async with answering(broker.url, Answer([11])) as (worker, gateway, client):
        own = gateway.pool
        for _ in range(pool_module.MAX_COMMANDS):
            await own.admissions.acquire()
        waiting = asyncio.create_task(client.post("/generate", json=BODY))
        await wait_until(lambda: gateway.pool.relay.streams)
        own.num_answered += num_answered
        response = await waiting
        assert response.status_code == status, response.text
        assert response.headers.get("retry-after") == ("1" if status == 429 else None)
        assert not worker.live
        for _ in range(pool_module.MAX_COMMANDS):
            own.admissions.release()
        await wait_until(lambda: not gateway.pool.relay.streams)
        await wait_until(lambda: answers(client))


async def answers(client: httpx.AsyncClient) -> bool:
    return (await client.post("/generate", json=BODY)).status_code == 200


DETAILED = {"inputs": "a", "parameters": {"max_new_tokens": 3, "details": True}}
SCALER, *_ = yaml.safe_load_all((FOLDER / "overlays/keda/scaler.yaml").read_text())
LIVE: str = SCALER["spec"]["triggers"][0]["metadata"]["valueLocation"]
"""What the scaler of deploy/kubernetes reads."""


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


async def has_live(client: httpx.AsyncClient, count: int) -> bool:
    lines = (await client.get("/metrics")).text.splitlines()
    return f"{LIVE} {count:.1f}" in lines


async def test_a_request_to_a_pool_without_workers_waits_for_the_one_that_is_started(broker: Broker) -> None:
    """That holds for a gateway that has never seen a worker, and hours after the last one has gone."""
    with batcher(broker.url):
        async with serving(broker.url, scale_to_zero=True) as (gateway, client):
            await wait_until(lambda: is_ready(client))
            for name in ("w0", "w1"):
                waiting = asyncio.create_task(client.post("/generate", json=DETAILED))
                await wait_until(lambda: has_live(client, 1))
                async with modeless_worker(broker.url, name) as engine:
                    answer = await waiting
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["details"]["generated_tokens"] == 3
                    await wait_until(lambda: has_live(client, 0))
                    await wait_until(lambda: gateway.pool.workers.ready_s)
                    engine.draining.set()
                    await engine.serving
                gateway.pool.workers.ready_s = gateway.pool.workers.ready_s or 0.0
                gateway.pool.workers.ready_s -= 7200


async def test_a_request_that_waits_has_a_position_in_the_queue(broker: Broker) -> None:
    """More urgent requests are before it, less urgent ones are not."""
    stream = DETAILED | {"resume_s": 60}
    with batcher(broker.url):
        async with (
            serving(broker.url, scale_to_zero=True) as (_, client),
            contextlib.AsyncExitStack() as stack,
        ):
            await wait_until(lambda: is_ready(client))
            paths = []
            for name in ("batch", "standard", "interactive"):
                sent = client.stream("POST", "/generate_stream", json=stream, headers={"x-priority": name})
                answer = await stack.enter_async_context(sent)
                paths.append(answer.headers["content-location"].removesuffix("/stream"))

            async def positions() -> list[tuple[int | None, str]]:
                shown = [(await client.get(path)).json() for path in paths]
                return [(one["queue_position"], one["state"]) for one in shown]

            await wait_for(lambda: positions(), [(3, "queued"), (2, "queued"), (1, "queued")])
            async with modeless_worker(broker.url, "w0"):
                await wait_for(lambda: positions(), [(None, "finished")] * 3)


async def test_limits_are_the_model_s_until_a_worker_says_its_own(broker: Broker) -> None:
    """A request beyond them is refused at once, though no worker is there to refuse it."""
    with batcher(broker.url):
        async with serving(broker.url, scale_to_zero=True) as (gateway, client):
            await wait_until(lambda: is_ready(client))
            body = {"inputs": "a", "parameters": {"max_new_tokens": 9000}}
            answer = await client.post("/generate", json=body)
            assert tgi_error(answer) == (422, "validation") and "8192" in answer.text
            async with modeless_worker(broker.url, "w0", num_blocks=10):
                await wait_until(lambda: gateway.pool.workers.limits.max_total_tokens == 160)


COUNT_IDS = ids(" zero one two three")
KEYS = Keys("b")


def answer(_: Generate) -> Answer:
    return Answer(COUNT_IDS)


@pytest.fixture
async def worker(broker: Broker, redis: Redis) -> AsyncIterator[FakeWorker]:
    """The only worker of pool `b`."""
    async with working(broker.url, TOKENIZER, answer, pool="b") as one, announced(broker.url, "b"):
        yield one


@contextlib.asynccontextmanager
async def gateway_of_default(url: str) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway whose own pool is `default`."""
    async with answering(url, answer) as (_, gateway, client):
        yield gateway, client


async def complete(client: httpx.AsyncClient, model: str) -> str:
    body = {"model": model, "prompt": "Count.", "max_tokens": 20}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def job_consumers(redis: Redis, keys: Keys) -> list[str]:
    if not await redis.exists(keys.submit):
        return []
    groups = [group["name"].decode() for group in await redis.xinfo_groups(keys.submit)]
    return [
        one["name"].decode() for group in groups for one in await redis.xinfo_consumers(keys.submit, group)
    ]


async def test_a_foreign_pool_serves_requests_and_leaves_its_jobs_alone(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (_, client):
        assert await complete(client, "b") == " zero one two three"
        assert len(worker.seen) == 1
        own = Keys("default")
        for keys in (KEYS, own):
            await redis.xadd(keys.submit, {"job": '{"id": "a", "inputs": "Count."}'})
        await wait_until(lambda: redis.exists(own.result("a")))
        assert await job_consumers(redis, own) == ["g0-test"]
        assert await job_consumers(redis, KEYS) == []
        assert len(worker.seen) == 1


async def test_a_foreign_pool_has_a_tokenizer_and_a_template_of_its_own(
    broker: Broker, redis: Redis, tmp_path: Path
) -> None:
    """Those that its entry names. Its names are listed until it is silent."""
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_tokenizers.byte_level(folder)
    config = {"chat_template": "{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names: dict[str, Any] = {"models": ["org/tiny"], "model_id": str(tmp_path)}
    regex = {"structured_outputs": {"regex": "[ab]{4}"}}
    chat = CHAT | {"model": "b", "messages": [{"role": "user", "content": "The sky"}]} | regex
    async with gateway_of_default(broker.url) as (_, client):
        async with (
            working(broker.url, own, lambda _: Answer(own.encode("abab").ids), pool="b") as worker,
            announced(broker.url, "b", tokenizer_name=str(folder), **names),
        ):
            await wait_for(lambda: names_of(client), ["smollm2", "org/tiny", "b"])
            for path, body, prompt in (
                ("/v1/completions", {"model": "b", "prompt": "The sky"}, "The sky"),
                ("/v1/chat/completions", chat, "<|im_end|>The sky"),
            ):
                response = await client.post(path, json=body)
                assert response.status_code == 200 and "abab" in response.text, response.text
                assert unpack_ids(worker.seen[-1].prompt_ids) == own.encode(prompt).ids
            assert worker.seen[-1].sampling and worker.seen[-1].sampling.grammar
        await redis.zincrby(Keys.pools, -SILENT_S - 1, "b")
        await wait_for(lambda: names_of(client), ["smollm2"])


async def names_of(client: httpx.AsyncClient) -> list[str]:
    return [one["id"] for one in (await client.get("/v1/models")).json()["data"]]


async def test_a_model_is_found_by_each_of_its_names(broker: Broker) -> None:
    names = ("org/small", "tiny")
    async with answering(broker.url, answer, served_model_name=names, model_id="smollm2") as (_, _, client):
        assert await names_of(client) == ["org/small", "tiny"]
        hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
        for name in (*names, "small", "smollm2", hub_id, hub_id.split("/")[1], "http://host:3000", "tgi", ""):
            assert await complete(client, name) == " zero one two three"


async def test_any_name_may_mean_this_model_and_other_pools_keep_theirs(
    broker: Broker, worker: FakeWorker
) -> None:
    async with answering(broker.url, answer, any_model_name=True) as (own, _, client):
        await complete(client, "gpt-4o")
        assert (len(own.seen), len(worker.seen)) == (1, 0)
        await complete(client, "b")
        assert (len(own.seen), len(worker.seen)) == (1, 1)


async def is_shown(redis: Redis) -> bool:
    """Whether the gateway's heartbeat is among the processes of pool `b`."""
    return bool(await redis.exists(KEYS.process("gateway", "g0-test")))


async def test_a_foreign_pool_that_nobody_names_is_closed_and_opens_again(
    broker: Broker, redis: Redis, worker: FakeWorker
) -> None:
    async with gateway_of_default(broker.url) as (gateway, client):
        clock = Clock()
        gateway.pools.clock = clock.monotonic
        await complete(client, "b")
        first = gateway.pools.foreign["b"].pool
        await wait_until(lambda: not first.relay.streams)
        clock.now_s += IDLE_S - 1
        await complete(client, "b")
        await wait_until(lambda: not first.relay.streams)
        clock.now_s += IDLE_S - 1
        await gateway.pools.close_idle()
        assert gateway.pools.foreign["b"].pool is first and await is_shown(redis)
        num_connections = len(await redis.client_list())
        clock.now_s += 2
        await gateway.pools.close_idle()
        assert not gateway.pools.foreign and not await is_shown(redis)
        await wait_until(lambda: fewer_connections(redis, num_connections))
        assert await complete(client, "b") == " zero one two three"
        assert gateway.pools.foreign["b"].pool is not first


async def fewer_connections(redis: Redis, than: int) -> bool:
    return len(await redis.client_list()) < than


async def test_a_foreign_pool_with_a_live_stream_stays_open(broker: Broker, worker: FakeWorker) -> None:
    async with gateway_of_default(broker.url) as (gateway, client):
        clock = Clock()
        gateway.pools.clock = clock.monotonic
        await worker.pause()
        running = asyncio.create_task(complete(client, "b"))
        await wait_until(
            lambda: "b" in gateway.pools.foreign and gateway.pools.foreign["b"].pool.relay.streams
        )
        clock.now_s += 10 * IDLE_S
        await gateway.pools.close_idle()
        worker.going.set()
        assert await running == " zero one two three"
        await wait_until(lambda: not gateway.pools.foreign["b"].pool.relay.streams)
        await gateway.pools.close_idle()
        assert not gateway.pools.foreign


async def test_a_pool_without_a_live_worker_is_unavailable_and_one_that_nobody_knows_is_not_found(
    broker: Broker,
) -> None:
    async with (
        announced(broker.url, "empty", num_ready=0),
        gateway_of_default(broker.url) as (gateway, client),
    ):
        for model, status, code in (("empty", 503, "unavailable"), ("nobody", 404, "model_not_found")):
            response = await client.post("/v1/completions", json={"model": model, "prompt": "Count."})
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert not gateway.pools.foreign


async def test_a_pool_whose_worker_still_loads_is_asked_for_again_later(broker: Broker) -> None:
    body = {"model": "b", "prompt": "Count."}
    async with (
        announced(broker.url, "b", num_ready=0, num_loading=1),
        gateway_of_default(broker.url) as (_, client),
    ):
        response = await client.post("/v1/completions", json=body)
        named = await client.post("/v2/models/b/generate", json={"text_input": "Count."})
    assert response.status_code == named.status_code == 503
    assert response.headers["retry-after"] == named.headers["retry-after"] == str(LOADING_S)
    assert response.json()["error"]["code"] == "unavailable"
    assert "the worker of pool b still loads its model" in named.json()["error"]


async def test_fields_of_openai_and_vllm_count_and_headers_come_before_them(broker: Broker) -> None:
    cases: list[tuple[dict[str, object], dict[str, str], str]] = [
        ({"service_tier": "flex"}, {}, "batch"),
        ({"service_tier": "auto"}, {}, "standard"),
        ({"service_tier": "priority"}, {}, "interactive"),
        ({"priority": -3}, {}, "interactive"),
        ({"priority": 0, "service_tier": "flex"}, {}, "standard"),
        ({"priority": 2}, {}, "batch"),
        ({"priority": "batch"}, {"x-priority": "-1"}, "interactive"),
    ]
    bodies: dict[str, Any] = {"completions": {"prompt": "a"}, "responses": {"input": "a"}}
    bodies["chat/completions"] = CHAT
    async with answering(broker.url, answer) as (worker, _, client):
        for path, body in bodies.items():
            for fields, headers, expected in cases:
                sent = await client.post(f"/v1/{path}", json=body | fields, headers=headers)
                assert (sent.status_code, worker.seen[-1].class_name) == (200, expected), (path, fields)
        for tier, shown in (("auto", "default"), ("flex", "flex"), ("scale", "priority")):
            response = await client.post("/v1/responses", json={"input": "Hi", "service_tier": tier})
            assert response.json()["service_tier"] == shown
        for key in ("one", "one", "two"):
            await client.post("/generate", json=BODY, headers={"authorization": f"Bearer {key}"})
        first, again, other = (request.tenant for request in worker.seen[-3:])
        assert first == again != other and len(first) == len(other) == 16, "a tenant is known by its key"
