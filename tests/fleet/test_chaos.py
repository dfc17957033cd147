"""Kills, one in three with another at once, under streams of every kind; a failover of Redis; and the death
of each kind of process where users have few rights: no token is lost or repeated.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chaos import run
from benchmarks.client import Stream, stream
from common.broker.client import connect
from common.broker.keys import Keys
from tests.support.broker.sentinels import secured
from tests.support.chaos.launcher import ChaosFleet
from tests.support.chaos.outcome import Plan, describe
from tests.support.fleet.fleet import Fleet
from tests.support.jobs import arq_client
from tests.support.keys.issued import add_key, bearer, status
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_until
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
    counts={"gateway": 2, "batcher": 1, "agent": 2, "engine": 2, "jobs": 1},
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


# --- rights -------------------------------------------------------------------------------------------------

KEYS = Keys("default")
NUM_TOKENS, NUM_LINES = 150, 4
PROMPT: dict[str, Any] = {
    "inputs": "The sea",
    "parameters": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "details": True},
}
LINE: dict[str, Any] = {"method": "POST", "url": "/v1/completions"}
LINE |= {"body": {"prompt": "The sea", "max_tokens": 8, "ignore_eos": True}}


@pytest.mark.slow
async def test_all_work_goes_on_through_the_death_of_each_kind_of_process(tmp_path: Path) -> None:
    async with receiving() as receiver, contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            ChaosFleet(
                step_ms=20.0,
                num_jobs=1,
                files_dir=tmp_path,
                webhook_allowed_hosts=receiver.host,
                worker_ttl_s=3,
                stopped_grace_s=0,
            )
        )
        redis = await stack.enter_async_context(connect(fleet.redis_url))
        key = await add_key(redis, tenant="acme", webhook=receiver.url, webhook_secret=SECRET)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=fleet.base_url, headers=bearer(key), timeout=PATIENCE_S)
        )
        await wait_until(lambda: is_refused(client))
        batch = await start_batch(client)
        await redis.xadd(KEYS.submit, {"job": json.dumps(PROMPT | {"id": "job"}), "api_key": key.text})
        arq = await stack.enter_async_context(arq_client(fleet.redis_url))
        arq_job = await arq.enqueue_job("generate", PROMPT["inputs"], PROMPT["parameters"], api_key=key.text)
        assert arq_job is not None
        answer = Stream()
        reading = asyncio.create_task(
            stream(f"{fleet.base_url}/generate_stream", PROMPT, answer, bearer(key))
        )
        for name in ("w0", "b0", "g0", "j0"):
            seen = len(answer.frames)
            await wait_until(lambda seen=seen: len(answer.frames) > seen or reading.done())  # type: ignore[misc]
            old = fleet.pid(name)
            os.kill(old, signal.SIGKILL)
            await asyncio.to_thread(fleet.restarted, name, old)
        await reading
        assert [frame["index"] for frame in answer.frames] == list(range(1, NUM_TOKENS + 1))
        assert (await arq_job.result(timeout=PATIENCE_S))["details"]["generated_tokens"] == NUM_TOKENS
        job = json.loads(await wait_until(lambda: redis.get(KEYS.result("job"))))
        assert job["details"]["generated_tokens"] == NUM_TOKENS
        await wait_until(lambda: is_completed(client, batch))
        await wait_until(lambda: receiver.told >= {"job", batch})
        used = (await client.get("/usage")).json()["total"]
        counted = used["requests"], used["completion_tokens"]
        assert counted == (3 + NUM_LINES, 3 * NUM_TOKENS + 8 * NUM_LINES), "each committed token counts once"


async def is_refused(client: httpx.AsyncClient) -> bool:
    """Whether the gateway knows that there are API keys: from then on it asks everybody for one."""
    return await status(client, "unknown") == 401


async def start_batch(client: httpx.AsyncClient) -> str:
    lines = "\n".join(json.dumps(LINE | {"custom_id": f"line-{number}"}) for number in range(NUM_LINES))
    file = (
        await client.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
    ).json()
    body = {"input_file_id": file["id"], "endpoint": LINE["url"], "completion_window": "24h"}
    return str((await client.post("/v1/batches", json=body)).json()["id"])


async def is_completed(client: httpx.AsyncClient, batch: str) -> bool:
    found = (await client.get(f"/v1/batches/{batch}")).json()
    return bool(found["status"] == "completed" and found["request_counts"]["completed"] == NUM_LINES)
