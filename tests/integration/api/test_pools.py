"""Models on several pools and brokers: requests go to either, a broker that is down concerns its pool alone,
and a request for a sleeping model waits until a worker wakes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.app import Gateway
from api.requests.registry import Grade
from benchmarks.client import HttpStatusError, Stream, stream
from common.broker.heartbeat import Heartbeat
from common.broker.keys import SLEEPER, Keys
from common.broker.pool_client import PoolClient
from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.broker.listening import Announced, announced
from tests.support.brokers import OneBroker
from tests.support.fleet.batchers import batcher
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.modeless_worker import modeless_worker
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.tokenizer import TOKENIZER
from tests.support.waiting import wait_until

STEP_S = 0.02
NUM_TOKENS = 40


def one_broker() -> Iterator[OneBroker]:
    with brokers.restorable() as one:
        yield one


own = pytest.fixture(one_broker, name="own")
"""The broker of the gateway's own pool, `a`, and of the directory. Tests kill it."""
other = pytest.fixture(one_broker, name="other")
"""The broker of pool `b`. Tests kill it."""


WORDS: list[int] = TOKENIZER.encode(
    " zero one two three four five six seven eight nine ten eleven twelve"
).ids


def number_of(request: Generate) -> int:
    """The number in a prompt."""
    return int(TOKENIZER.decode(unpack_ids(request.prompt_ids)).split()[-1])


def answer_ids(number: int, num_tokens: int) -> list[int]:
    """The answer to the prompt with this number."""
    return [WORDS[(number + i) % len(WORDS)] for i in range(num_tokens)]


def numbered_answer(request: Generate) -> Answer:
    return Answer(answer_ids(number_of(request), request.stopping.max_new_tokens))


async def begin(url: str, content: dict[str, Any], answer: Stream) -> asyncio.Task[Stream]:
    """Read a stream in a task; returns when it has begun. A request that is refused is sent again: a broker
    on a busy machine may not answer the gateway in time.
    """
    task = asyncio.create_task(stream(url, content, answer))
    await wait_until(lambda: answer.frames or task.done())
    error = None if answer.frames else task.exception()
    refused = isinstance(error, HttpStatusError) and error.status == 503
    return await begin(url, content, answer) if refused else task


@dataclass
class TwoPools:
    """Pool `a`, whose gateway serves, and pool `b`: a worker each.

    Attributes:
        entries: what the directory says of each pool.
    """

    workers: dict[str, FakeWorker]
    entries: dict[str, Announced]
    gateway: Gateway
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.client.base_url).rstrip("/")

    @property
    def num_taken(self) -> dict[str, int]:
        """How many requests each pool has got."""
        return {name: len(worker.seen) for name, worker in self.workers.items()}

    async def stream(self, number: int) -> tuple[asyncio.Task[Stream], Stream]:
        """A stream that has begun."""
        shown, parameters = Stream(), {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        content: dict[str, Any] = {"inputs": f"number {number}", "parameters": parameters}
        return await begin(f"{self.url}/generate_stream", content, shown), shown

    async def all_open(self) -> None:
        """Wait until the gateway may choose either pool."""
        grade = self.gateway.pools.grade
        await wait_until(lambda: {*map(grade, self.workers)} == {Grade.OPEN})


@contextlib.asynccontextmanager
async def two_pools(first: str, second: str, **settings: Any) -> AsyncIterator[TwoPools]:
    """Pools `a` and `b` on these brokers; the directory is at the first one by default."""
    settings = {"directory_url": first} | settings
    shared: dict[str, Any] = {"models": ["smollm2"], "directory_url": settings["directory_url"]}
    async with (
        working(first, TOKENIZER, numbered_answer, STEP_S, "a") as a,
        working(second, TOKENIZER, numbered_answer, STEP_S, "b") as b,
        announced(first, "a", **shared) as of_a,
        announced(second, "b", **shared) as of_b,
        serving(first, pool="a", **settings) as (gateway, client),
    ):
        await ready(gateway)
        pools = TwoPools({"a": a, "b": b}, {"a": of_a, "b": of_b}, gateway, client)
        await pools.all_open()
        yield pools


async def is_whole(number: int, task: asyncio.Task[Stream]) -> bool:
    return (await task).ids == answer_ids(number, NUM_TOKENS)


@pytest.mark.parametrize("killed", ["a", pytest.param("b", marks=pytest.mark.slow)])
async def test_a_killed_broker_is_its_pools_only(own: OneBroker, other: OneBroker, killed: str) -> None:
    """The broker of pool `a` has the directory, too, and is the one that the gateway is set to."""
    async with two_pools(own.broker.url, other.broker.url) as pools:
        streams = {number: await pools.stream(number) for number in range(12)}
        await wait_until(lambda: sum(pools.num_taken.values()) == len(streams))
        taken = {name: {*map(number_of, live_requests(worker))} for name, worker in pools.workers.items()}
        [living] = {"a", "b"} - {killed}
        assert taken["a"] and taken["b"]
        broker = own if killed == "a" else other
        broker.kill()
        assert await asyncio.gather(*(is_whole(number, streams[number][0]) for number in taken[living]))
        await wait_until(lambda: pools.gateway.pools.grade(killed) == Grade.AWAY)
        new = [(number, (await pools.stream(number))[0]) for number in range(100, 106)]
        assert all(await asyncio.gather(*(is_whole(*one) for one in new)))
        assert not any(streams[number][0].done() for number in taken[killed]), "they wait for their broker"
        broker.start()
        assert all(await asyncio.gather(*(is_whole(number, streams[number][0]) for number in taken[killed])))
        await pools.all_open()
        assert pools.num_taken == {living: len(taken[living]) + len(new), killed: len(taken[killed])}


def live_requests(worker: FakeWorker) -> list[Generate]:
    """Those that the worker holds."""
    return [live.request for live in worker.live.values()]


async def post(pools: TwoPools, number: int, model: str = "", **headers: str) -> dict[str, Any]:
    content = {"model": model, "prompt": f"number {number}", "max_tokens": 3, "ignore_eos": True}
    response = await pools.client.post("/v1/completions", json=content, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def is_known(pools: TwoPools, name: str, depth: float) -> bool:
    return pools.gateway.pools.depth(name) == depth


async def test_a_request_goes_to_the_shorter_queue(broker: Broker, other: OneBroker) -> None:
    async with two_pools(broker.url, other.broker.url) as pools:
        for name, busy in (("a", "b"), ("b", "a")):
            await pools.entries[busy].change(waiting=5, rows=4)
            await pools.entries[name].change(waiting=0, rows=1)
            await wait_until(partial(is_known, pools, name, 0.25))
            before = pools.num_taken
            for number in range(4):
                await post(pools, number)
            assert pools.num_taken == before | {name: before[name] + 4}
        metrics = (await pools.client.get("/metrics")).text
        assert 'tokenfleet_pool_waiting_requests{pool="a",to="a"} 5.0' in metrics
        assert 'tokenfleet_pool_up{pool="a",to="b"} 1.0' in metrics


async def test_a_pool_without_room_leaves_a_request_to_the_other_one(
    broker: Broker, other: OneBroker
) -> None:
    async with two_pools(broker.url, other.broker.url, max_concurrent_requests=1) as pools:
        await pools.entries["b"].change(waiting=5)
        await wait_until(lambda: pools.gateway.pools.depth("b") > 1)
        first = (await pools.stream(1))[0]
        assert pools.num_taken == {"a": 1, "b": 0}
        assert (await post(pools, 2))["model"] == "smollm2"
        assert pools.num_taken == {"a": 1, "b": 1}
        assert await is_whole(1, first)


async def test_a_request_is_found_in_the_pool_that_has_it(own: OneBroker, other: OneBroker) -> None:
    """By its id alone, and while another broker is down."""
    url, directory_url = own.broker.url, other.broker.url
    content = {"model": "b", "prompt": "Hi", "max_tokens": 900, "stream": True}
    async with (
        working(other.broker.url, TOKENIZER, lambda _: Answer(WORDS * 50), STEP_S, pool="b") as worker,
        announced(other.broker.url, "b"),
        serving(url, pool="a", directory_url=directory_url) as (gateway, client),
    ):
        async with client.stream("POST", "/v1/completions", json=content) as response:
            lines = response.aiter_lines()
            await anext(lines)
            path = f"/requests/{response.headers['content-location'].split('/')[2]}"
            assert (await client.get(path)).json()["state"] == "running"
            unknown = f"/requests/{'0' * 32}"
            assert (await client.get(unknown)).status_code == 404
            own.kill()
            await wait_until(lambda: gateway.pool.relay.last_error)
            assert (await client.get(path)).json()["state"] == "running"
            assert (await client.get(unknown)).status_code == 503, "the broker that is down may know it"
            assert (await client.delete(path)).json()["state"] == "cancelled"
            await wait_until(lambda: not worker.live)
        stored = {"model": "b", "input": "Hi", "max_output_tokens": 3, "store": True}
        created = (await client.post("/v1/responses", json=stored)).json()
        assert (await client.get(f"/v1/responses/{created['id']}")).json() == created


BODY = {"model": "b", "prompt": "a", "max_tokens": 3}
FIELDS: dict[str, str | int] = {
    "state": "asleep",
    "kept_in": "memory",
    "swap_ms": 250,
    "model_id": "smollm2",
    "tokenizer_name": "",
}


async def test_a_request_for_a_sleeping_model_waits_for_its_worker(broker: Broker, redis: Redis) -> None:
    """The gateway finds it by the worker's record, and lists it."""
    pool = PoolClient(redis, Keys("b"))
    sleeping = Heartbeat(pool, SLEEPER, "w9-1", 60.0).sending(0.1, lambda: FIELDS)
    with batcher(broker.url, POOL="b", WORKER_GRACE_S="0.1"):
        async with serving(broker.url) as (_, client):
            assert (await client.post("/v1/completions", json=BODY)).status_code in (404, 503)
            async with sleeping:
                await wait_until(partial(is_listed, client, "b"))
                waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
                await wait_until(lambda: has_waited(pool))
                async with modeless_worker(broker.url, "w0", pool="b"):
                    answer = await waiting
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["usage"]["completion_tokens"] == 3


async def is_listed(client: httpx.AsyncClient, model: str) -> bool:
    return model in [one["id"] for one in (await client.get("/v1/models")).json()["data"]]


async def has_waited(pool: PoolClient) -> bool:
    """Whether a request waits, for longer than WORKER_GRACE_S: what a sleeping worker decides by."""
    found = await pool.redis.hmget(pool.keys.state, ["waiting", "oldest_ms"])  # type: ignore[misc]
    waiting, oldest_ms = (int(value or 0) for value in found)
    return waiting == 1 and oldest_ms > 300


async def test_a_fleet_s_own_models_are_known_without_any_worker(broker: Broker) -> None:
    """MODELS names them: they are listed, asked by short names, too, and shown with what they do."""
    async with serving(broker.url, models=("x/b=smollm2",), scale_to_zero=True) as (gateway, client):
        names = [one["id"] for one in (await client.get("/v1/models")).json()["data"]]
        assert names[-1] == "x/b"
        assert (await gateway.pools.find("b")).settings.pool == "x/b"
        own = PoolClient(gateway.pool.client.redis, Keys("x/b"))
        await Heartbeat(own, SLEEPER, "w0-1", 60.0).send(**FIELDS)
        models = (await client.get("/fleet")).json()["models"]
        assert [one["pool"] for one in models] == ["default", "x/b"]
        assert models[1]["workers"] == [{"state": "asleep", "kept_in": "memory", "swap_s": 0.25}]
