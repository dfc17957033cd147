"""Prints what a batch of jobs costs interactive callers: `python -m benchmarks.batcher.jobs [--jobs 10000]`.

A fleet of two gateways and two workers of 16 rows, whose engines have no model: each step takes 8 ms by the
clock. Callers of the class `interactive` come at random, 5 a second, and get 16 tokens each; first alone,
then beside the batch, whose answers have 64 tokens. Printed is their time to first token. Exit status 1 if a
caller is refused, or if the p99 beside the batch is MOST_LATER_MS longer than that alone.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from itertools import count

from redis.asyncio import Redis

from benchmarks.client import stream
from common.broker.client import connect
from common.broker.committed import in_slices
from common.broker.keys import Keys
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.waiting import wait_until

KEYS = Keys("default")
STEP_MS, NUM_ROWS, RATE = 8.0, 16, 5.0
CALLER_TOKENS, JOB_TOKENS = 16, 64
MOST_LATER_MS = 100.0
NUMBERS = count()


async def call(url: str) -> float:
    """One caller's time to first token, in ms. Raises HttpStatusError where it is refused."""
    body = {
        "model": "default",
        "prompt": f"caller {next(NUMBERS)}",
        "max_tokens": CALLER_TOKENS,
        "stream": True,
        "priority": -1,
    }
    answer = await stream(f"{url}/v1/completions", body)
    return (answer.times_s[0] - answer.sent_s) * 1e3


async def call_for(url: str, seconds: float, draw: random.Random) -> list[float]:
    """Sorted times to first token of those who come within so many seconds."""
    callers = []
    end_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        callers.append(asyncio.create_task(call(url)))
        await asyncio.sleep(draw.expovariate(RATE))
    return sorted(await asyncio.gather(*callers))


async def submit(redis: Redis, num_jobs: int) -> None:
    for numbers in in_slices(list(range(num_jobs)), 500):
        async with redis.pipeline(transaction=False) as pipe:
            for number in numbers:
                parameters = {"max_new_tokens": JOB_TOKENS, "ignore_eos": True}
                job = {"id": f"j{number}", "inputs": f"job {number}", "parameters": parameters}
                pipe.xadd(KEYS.submit, {"job": json.dumps(job)})
            await pipe.execute()


def describe(name: str, times_ms: list[float]) -> float:
    """Prints the times of some callers → their p99."""
    p99_ms = times_ms[int(len(times_ms) * 0.99)]
    p50_ms = statistics.median(times_ms)
    print(
        f"{name}: {len(times_ms)} callers, first token p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms", flush=True
    )
    return p99_ms


async def measure(fleet: ChaosFleet, num_jobs: int, seconds: float) -> int:
    draw = random.Random(1)
    async with connect(fleet.redis_url) as redis:
        await call_for(fleet.base_url, 3, draw)
        alone_ms = describe("alone", await call_for(fleet.base_url, seconds, draw))
        await submit(redis, num_jobs)
        await wait_until(lambda: redis.exists(KEYS.result("j0")))
        beside_ms = describe("beside the batch", await call_for(fleet.base_url, seconds, draw))
        left = await redis.xlen(KEYS.submit)
        print(f"{num_jobs - left} of {num_jobs} jobs were answered meanwhile")
        return int(not left or beside_ms > alone_ms + MOST_LATER_MS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the two loads")
    args = parser.parse_args()
    with ChaosFleet(
        STEP_MS, has_proxy=False, num_workers=2, num_gateways=2, max_batch_size=NUM_ROWS
    ) as fleet:
        return asyncio.run(measure(fleet, args.jobs, args.seconds))


if __name__ == "__main__":
    sys.exit(main())
