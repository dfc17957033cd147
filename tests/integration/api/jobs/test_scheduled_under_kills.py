"""Gateways, batchers and workers are killed all the while: each scheduled job runs once, and not before its
time.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from common.broker.client import connect
from deploy.launcher.embedded_broker import Broker
from tests.support.jobs import KEYS
from tests.support.machine.killed_gateways import KilledGateways
from tests.support.machine.killed_pool import KilledPool
from tests.support.waiting import wait_until

NUM_JOBS, NUM_TOKENS = 300, 20
SPREAD_S = 45.0
NUM_KILLS = 20


@pytest.mark.slow
async def test_each_scheduled_job_runs_once(broker: Broker) -> None:
    draw = random.Random(1)
    begun_s: dict[str, float] = {}
    async with connect(broker.url) as redis:
        gateways = KilledGateways(broker, 0, lambda: 0, LOG_LEVEL="error", WORKER_TTL_S="2")
        pool = KilledPool(broker.url, redis, num_workers=2, step_s=0.02, num_blocks=2000)
        try:
            async with pool.running(), httpx.AsyncClient(timeout=30) as client:
                await gateways.until_healthy()
                begin_s = time.time()
                due_s = {f"j{i}": begin_s + draw.uniform(0, SPREAD_S) for i in range(NUM_JOBS)}
                for job_id, at_s in due_s.items():
                    await redis.xadd(KEYS.submit, {"job": describe(job_id, at_s)})

                async def kill() -> None:
                    for _ in range(NUM_KILLS):
                        await gateways.until_healthy()
                        await asyncio.sleep(draw.uniform(0, 1))
                        drawn = draw.random()
                        if drawn < 0.7:
                            await asyncio.to_thread(gateways.kill, draw.randrange(2))
                        elif drawn < 0.8:
                            await pool.kill_batcher(draw.choice(list(pool.batchers)))
                        else:
                            await pool.kill_worker(draw.choice(list(pool.workers)))

                async def all_ended() -> bool:
                    return await redis.exists(*map(KEYS.result, due_s)) == NUM_JOBS  # type: ignore[no-any-return]

                watching = asyncio.create_task(watch(redis, due_s, begun_s))
                await kill()
                await wait_until(all_ended)
                await wait_until(lambda: len(begun_s) == NUM_JOBS)
                watching.cancel()

                async def no_entry_is_left() -> bool:
                    return await redis.xlen(KEYS.submit) == 0  # type: ignore[no-any-return]

                await wait_until(no_entry_is_left)
                await gateways.until_healthy()
                used = (await client.get(f"{gateways.urls[0]}/usage")).json()["total"]
                listed = (await client.get(f"{gateways.urls[0]}/admin/jobs")).json()["counts"]
            frames = [await redis.xlen(KEYS.reply(job_id)) for job_id in due_s]
        finally:
            gateways.stop()
    assert [job_id for job_id in due_s if begun_s[job_id] < due_s[job_id]] == []
    assert Counter(frames) == {NUM_TOKENS: NUM_JOBS}
    assert (used["requests"], used["completion_tokens"]) == (NUM_JOBS, NUM_JOBS * NUM_TOKENS)
    assert listed == {"live": 0, "scheduled": 0, "dead": 0, "ended": NUM_JOBS}
    late = sorted(begun_s[job_id] - due_s[job_id] for job_id in due_s)
    kills = dict(pool.kills + Counter(gateway=gateways.num_kills))
    print(
        f"{kills} kills; a job begins {late[NUM_JOBS // 2]:.2f} s late in the median, {late[-1]:.2f} at most"
    )


def describe(job_id: str, at_s: float) -> str:
    parameters = {"max_new_tokens": NUM_TOKENS}
    job = {"id": job_id, "inputs": f"Number {job_id}", "parameters": parameters, "not_before": at_s}
    return json.dumps(job | {"reply": "stream"})


async def watch(redis: Any, job_ids: Iterable[str], begun_s: dict[str, float]) -> None:
    """Note when each job's first frame is seen; never returns."""
    while True:
        for job_id in [one for one in job_ids if one not in begun_s]:
            if await redis.exists(KEYS.reply(job_id)):
                begun_s[job_id] = time.time()
        await asyncio.sleep(0.05)
