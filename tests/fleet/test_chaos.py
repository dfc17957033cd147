"""Kills, one in three with another at once, under streams of every kind, and under all kinds of work where
users have few rights; and a failover of Redis: no token is lost or repeated.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from benchmarks.chaos.__main__ import run
from benchmarks.chaos.attack import Attack, draw_strikes, targets_of
from benchmarks.chaos.outcome import Plan, describe
from common.api_keys import IssuedKey
from common.broker.client import connect
from tests.support.broker.sentinels import secured
from tests.support.broker_state import KEYS
from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.jobs import Service, arq_client
from tests.support.keys.issued import add_key, bearer
from tests.support.load import Load
from tests.support.waiting import wait_for, wait_until
from tests.support.webhooks.receiver import SECRET, receiving

WITHOUT_MODEL = Plan(
    seed=30,
    kills=30,
    num_streams=32,
    every_s=1.0,
    num_tokens=100,
    num_cases=4,
    step_ms=25.0,
    stopped_grace_s=0.0,
)
WITH_MODEL = Plan(
    seed=6,
    kills=6,
    num_streams=12,
    num_tokens=60,
    num_cases=2,
    step_ms=None,
    counts={"gateway": 2, "batcher": 1, "agent": 2, "engine": 2},
    spared=("stop",),
)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [WITHOUT_MODEL, WITH_MODEL], ids=["without a model", "with the model"])
async def test_kills_cost_no_token(plan: Plan) -> None:
    outcome = await run(plan)
    assert not outcome.wrong, describe(plan, outcome)


# --- sentinel -----------------------------------------------------------------------------------------------

MAX_NEW_TOKENS = 60
SETTINGS = {"dtype": "float32", "debug_kv": True, "kv_cache_bytes": "64MiB"}


@pytest.mark.slow
async def test_streams_outlive_a_failover() -> None:
    """With TLS, certificates of clients and users of few rights."""
    with secured() as service, Fleet(redis_url=service.url, **SETTINGS) as fleet:
        ids = await Load(fleet, MAX_NEW_TOKENS, 4).whole()
        load = Load(fleet, MAX_NEW_TOKENS, 4)
        await load.progress(10)
        service.fail_over()
        assert load.running
        assert await load.whole() == ids


# --- all kinds of work --------------------------------------------------------------------------------------

COUNTS = {"gateway": 2, "batcher": 2, "agent": 2, "engine": 2}
NUM_STRIKES, EVERY_S, NUM_CLIENTS = 24, 0.8, 4
NUM_LINES, NUM_CHATS, NUM_RESPONSES, NUM_JOBS = 1500, 240, 120, 60
NUM_TOKENS = 20
ADMIN = "sesame"
BATCHES, CALLERS = "batches", "callers"
RUNNING = ("queued", "validating", "in_progress", "finalizing")
ENDING_S = 600
"""A busy machine answers ten of the lines in a second."""


def line_of(number: int) -> dict[str, Any]:
    """One of 40 chats."""
    chat = {
        "messages": [{"role": "user", "content": "Count. " * (number % 40 + 1)}],
        "max_tokens": 4 + number % 7,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": chat}


LINES = [line_of(number) for number in range(NUM_LINES)]


@dataclass
class Asked:
    """What two tenants asked for and got.

    Attributes:
        told: ids that a webhook must tell of.
        tokens: that answers have, by tenant.
    """

    keys: dict[str, IssuedKey]
    client: httpx.AsyncClient
    redis: Redis
    arq: ArqRedis
    told: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)

    async def ask(self, method: str, path: str, key: IssuedKey | str, **arguments: Any) -> httpx.Response:
        """Ask until a gateway serves it."""
        headers = bearer(key) | arguments.pop("headers", {})
        while True:
            with contextlib.suppress(httpx.TransportError):
                sent = await self.client.request(method, path, headers=headers, **arguments)
                if sent.status_code == 200:
                    return sent
                assert sent.status_code == 503, sent.text
            await asyncio.sleep(0.05)

    async def post(self, path: str, tenant: str, key: str, body: dict[str, Any]) -> Any:
        """An answer to a request that is sent twice, and computed once."""
        first, second = [
            (
                await self.ask("POST", path, self.keys[tenant], json=body, headers={"idempotency-key": key})
            ).json()
            for _ in range(2)
        ]
        assert first["id"] == second["id"]
        return first

    async def ended(self, path: str, tenant: str) -> Any:
        """The object at `path`, when it has ended. Its webhook tells of it."""
        found: dict[str, Any] = {}

        async def has_ended() -> bool:
            found.update((await self.ask("GET", path, self.keys[tenant])).json())
            return found["status"] not in RUNNING

        await wait_until(has_ended, ENDING_S)
        self.told.append(found["id"])
        return found

    async def chat(self, number: int) -> None:
        body = LINES[number]["body"] | {"max_tokens": NUM_TOKENS}
        answer = await self.post("/v1/chat/completions", CALLERS, f"chat-{number}", body)
        self.told.append(answer["id"].removeprefix("chatcmpl-"))
        self.tokens[CALLERS] += answer["usage"]["completion_tokens"]

    async def respond(self, number: int) -> None:
        body = {"input": f"Number {number}", "background": True, "max_output_tokens": NUM_TOKENS}
        answer = await self.post("/v1/responses", CALLERS, f"response-{number}", body)
        found = await self.ended(f"/v1/responses/{answer['id']}", CALLERS)
        self.tokens[CALLERS] += found["usage"]["output_tokens"]

    async def job(self, number: int) -> None:
        """One job through Redis, or through arq."""
        name, key = f"job-{number}", self.keys[CALLERS].text
        parameters = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "details": True}
        if number % 2:
            job = await self.arq.enqueue_job("generate", name, parameters, api_key=key, _job_id=name)
            assert job is not None
            answer = await job.result(timeout=ENDING_S)
        else:
            service = Service(self.redis)
            await service.submit(key, id=name, inputs=name, parameters=parameters)
            answer = await service.result(name, ENDING_S)
        assert answer["details"]["generated_tokens"] == NUM_TOKENS
        self.told.append(name)
        self.tokens[CALLERS] += NUM_TOKENS

    async def batch(self) -> None:
        content = "\n".join(map(json.dumps, LINES))
        key = self.keys[BATCHES]
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        file = (await self.ask("POST", "/v1/files", key, **form)).json()
        body = {"input_file_id": file["id"], "endpoint": LINES[0]["url"], "completion_window": "24h"}
        asked = await self.post("/v1/batches", BATCHES, "batch-1", body)
        batch = await self.ended(f"/v1/batches/{asked['id']}", BATCHES)
        output = (await self.ask("GET", f"/v1/files/{batch['output_file_id']}/content", key)).text
        answers = [json.loads(line) for line in output.splitlines()]
        assert [one["custom_id"] for one in answers] == [line["custom_id"] for line in LINES], batch
        self.tokens[BATCHES] += sum(one["response"]["body"]["usage"]["completion_tokens"] for one in answers)

    async def counted(self) -> dict[str, int]:
        groups = (await self.ask("GET", "/usage?group_by=tenant", ADMIN)).json()["data"]
        return {group["tenant"]: group["completion_tokens"] for group in groups}


def is_known(url: str, key: IssuedKey) -> bool:
    """Whether all gateways know a key."""
    tried = [httpx.get(f"{url}/usage", headers=bearer(key)) for _ in range(20)]
    return {answer.status_code for answer in tried} == {200}


async def count(redis: Redis, pattern: str) -> int:
    return len(await redis.keys(pattern))


async def each(numbers: Iterator[int], act: Callable[[int], Awaitable[None]]) -> None:
    for number in numbers:
        await act(number)


async def strike(fleet: ChaosFleet) -> None:
    attack = Attack(fleet, fleet.directory, Path(fleet.broker["files"]))
    for one in islice(draw_strikes(2, targets_of(COUNTS), EVERY_S, ("stop", "broker")), NUM_STRIKES):
        await asyncio.sleep(one.pause_s)
        await attack.strike(one)
    assert not attack.lost
    print(f"kills {dict(attack.hits)}")


@pytest.mark.slow
@pytest.mark.timeout(1000)
async def test_all_kinds_of_work_go_on_under_kills(tmp_path: Path) -> None:
    async with receiving(*[500] * 5) as receiver, contextlib.AsyncExitStack() as stack:
        settings: dict[str, Any] = {
            "num_gateways": 2,
            "num_batchers": 2,
            "num_workers": 2,
            "api_key": ADMIN,
            "files_dir": tmp_path,
            "webhook_allowed_hosts": receiver.host,
            "worker_ttl_s": 3,
            "stopped_grace_s": 0,
        }
        fleet = await stack.enter_async_context(ChaosFleet(step_ms=10.0, **settings))
        redis = await stack.enter_async_context(connect(fleet.redis_url))
        arq = await stack.enter_async_context(arq_client(fleet.redis_url))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=fleet.base_url, timeout=60))
        await wait_for(lambda: count(redis, KEYS.gateway("*")), COUNTS["gateway"])
        hook = {"webhook": receiver.url, "webhook_secret": SECRET}
        keys = {
            BATCHES: await add_key(redis, tenant=BATCHES, service_class="batch", **hook),
            CALLERS: await add_key(redis, tenant=CALLERS, **hook),
        }
        await wait_until(lambda: is_known(fleet.base_url, keys[CALLERS]))
        asked = Asked(keys, client, redis, arq)
        clients = [
            each(numbers, act)
            for count, act in ((NUM_CHATS, asked.chat), (NUM_RESPONSES, asked.respond), (NUM_JOBS, asked.job))
            for numbers in [iter(range(count))] * NUM_CLIENTS
        ]
        await asyncio.gather(asked.batch(), strike(fleet), *clients)
        await wait_until(lambda: receiver.told >= {*asked.told})
        assert await asked.counted() == dict(asked.tokens), "each committed token counts once"
    events = {one.id: one.event["data"]["id"] for one in receiver.deliveries}
    assert sorted(events.values()) == sorted(asked.told)
