"""Prints what a batch of jobs costs interactive callers: `python -m benchmarks.batcher.jobs [--jobs 10000]`.

A fleet has two gateways, two workers of 16 rows, and no model: each step takes 8 ms by the clock. Callers of
the class `interactive` come at random, 5 a second, and get 16 tokens each; jobs have 64. Printed is the
callers' time to first token:

- alone;
- beside rows: beside NUM_OTHERS running jobs, which leave places for callers, while no other job waits. A
  caller shares steps, cores and gateways with them, but has nothing to wait for;
- beside the batch, from its arrival on. The difference to "beside rows" is what its queue costs.

Exit status 1 if a caller is refused, if the batch is over too soon, or if that difference is more than
MOST_LATER_MS.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
from collections.abc import AsyncIterator, Iterable
from itertools import count, islice

from redis.asyncio import Redis

from benchmarks.client import stream
from common.broker.client import connect
from common.broker.committed import in_slices
from common.broker.keys import Keys
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.waiting import wait_until

KEYS = Keys("default")
STEP_MS, NUM_WORKERS, NUM_ROWS, RATE = 8.0, 2, 16, 5.0
NUM_OTHERS = NUM_WORKERS * (NUM_ROWS - 2)
CALLER_TOKENS, JOB_TOKENS = 16, 64
MOST_LATER_MS = {"p50": STEP_MS / 2, "p99": 2 * STEP_MS}
NUMBERS = count()


async def call(url: str) -> float:
    """One caller's time to first token, in ms. Raises HttpStatusError if it is refused."""
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
    """Return the sorted times to first token of callers that come within `seconds`."""
    callers = []
    end_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        callers.append(asyncio.create_task(call(url)))
        await asyncio.sleep(draw.expovariate(RATE))
    return sorted(await asyncio.gather(*callers))


async def submit(redis: Redis, names: Iterable[str]) -> None:
    for some in in_slices(list(names), 500):
        async with redis.pipeline(transaction=False) as pipe:
            for name in some:
                parameters = {"max_new_tokens": JOB_TOKENS, "ignore_eos": True}
                job = {"id": name, "inputs": f"job {name}", "parameters": parameters}
                pipe.xadd(KEYS.submit, {"job": json.dumps(job)})
            await pipe.execute()


@contextlib.asynccontextmanager
async def others(redis: Redis) -> AsyncIterator[None]:
    """Keep NUM_OTHERS jobs running while the context is open; none is left afterwards."""
    names = (f"other{number}" for number in count())

    async def keep_on() -> None:
        while True:
            await submit(redis, islice(names, NUM_OTHERS - await redis.xlen(KEYS.submit)))
            await asyncio.sleep(STEP_MS / 1e3)

    async def have_ended() -> bool:
        return not await redis.xlen(KEYS.submit)

    task = asyncio.create_task(keep_on())
    await wait_until(lambda: redis.exists(KEYS.result("other0")))
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await wait_until(have_ended)


def describe(name: str, times_ms: list[float]) -> dict[str, float]:
    """Prints the times of some callers → their p50 and p99."""
    figures = {"p50": statistics.median(times_ms), "p99": times_ms[int(len(times_ms) * 0.99)]}
    shown = ", ".join(f"{percentile} {ms:.0f} ms" for percentile, ms in figures.items())
    print(f"{name}: {len(times_ms)} callers, first token {shown}", flush=True)
    return figures


async def measure(fleet: ChaosFleet, num_jobs: int, seconds: float) -> int:
    draw = random.Random(1)

    async def callers(name: str) -> dict[str, float]:
        return describe(name, await call_for(fleet.base_url, seconds, draw))

    async with connect(fleet.redis_url) as redis:
        await call_for(fleet.base_url, 3, draw)
        await callers("alone")
        async with others(redis):
            beside_rows = await callers(f"beside {NUM_OTHERS} rows")
        await submit(redis, (f"j{number}" for number in range(num_jobs)))
        beside_batch = await callers(f"beside a batch of {num_jobs}")
        left = await redis.xlen(KEYS.submit)
        print(f"{num_jobs - left} of {num_jobs} jobs were answered meanwhile")
    later_ms = {percentile: beside_batch[percentile] - ms for percentile, ms in beside_rows.items()}
    return int(not left or any(later_ms[percentile] > most for percentile, most in MOST_LATER_MS.items()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the three loads")
    args = parser.parse_args()
    with ChaosFleet(
        STEP_MS, has_proxy=False, num_workers=NUM_WORKERS, num_gateways=2, max_batch_size=NUM_ROWS
    ) as fleet:
        return asyncio.run(measure(fleet, args.jobs, args.seconds))


if __name__ == "__main__":
    sys.exit(main())
