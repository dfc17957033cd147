"""Prints how soon a worker leaves, and its successor joins: `python -m benchmarks.batcher.drain [--runs 5]`.

A fleet has two workers of 16 rows and no model: each step takes 8 ms by the clock. Streams of 100 tokens
follow each other. In each run a worker is drained as by `tokenfleet drain`, and its launcher starts it again.
First the other worker has places for all streams, then it has too few, and some wait for the worker that
joins. Printed are medians, and the longest:

- leaves: from the request to drain until the worker is gone;
- pause: the longest gap between two tokens of any stream until then;
- joins: from the first heartbeat of the one that joins until it has logged a token.

Exit status 1 if a worker left with rows, if one had no work for LIMIT_S after it joined, or if a stream that
had a place paused for LIMIT_S.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from redis.asyncio import Redis

from benchmarks.client import Stream, stream
from benchmarks.restarts import LONG_LIFE_S
from common.broker import worker_scripts
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.lua import run_script
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.chaos.figures import count_resumes
from tests.support.waiting import wait_until

KEYS = Keys("default")
STEP_MS, NUM_ROWS, NUM_TOKENS = 8.0, 16, 100
LIMIT_S = 1.0


class Run(NamedTuple):
    """Times of one run, in seconds."""

    leaves: float
    pause: float
    joins: float


async def ask_on(url: str, answers: list[Stream]) -> None:
    """Read one stream after the other, and check that each has all its tokens."""
    body = {"inputs": "Tell me.", "parameters": {"max_new_tokens": NUM_TOKENS}}
    while True:
        answer = Stream()
        answers.append(answer)
        await stream(f"{url}/generate_stream", body, answer)
        assert len(answer.frames) == NUM_TOKENS, answer.frames[-1]


async def ready_workers(redis: Redis) -> set[str]:
    names = [name.decode() for name in await redis.zrange(KEYS.workers, 0, -1)]
    return {name for name in names if await redis.hget(KEYS.worker(name), "state") == b"ready"}  # type: ignore[misc]


async def drain(redis: Redis) -> tuple[float, float, float, float]:
    """Drain `w0`. Returns when that began, when it had left, when its successor joined and first had work."""
    before = await ready_workers(redis)
    [worker] = [name for name in before if name.startswith("w0-")]

    async def is_gone() -> bool:
        return not await redis.exists(KEYS.worker(worker))

    async def find_successor() -> set[str]:
        return await ready_workers(redis) - before

    asked_s = time.monotonic()
    await run_script(redis, worker_scripts.drain(KEYS, worker))
    await wait_until(is_gone)
    left_s = time.monotonic()
    [successor] = await wait_until(find_successor)
    joined_s = time.monotonic()

    async def has_work() -> bool:
        return bool(await redis.xlen(KEYS.log(successor)) > 1)  # the first entry opens it

    await wait_until(has_work)
    return asked_s, left_s, joined_s, time.monotonic()


async def measure(fleet: ChaosFleet, redis: Redis, num_streams: int) -> Run:
    answers: list[Stream] = []
    clients = [asyncio.create_task(ask_on(fleet.base_url, answers)) for _ in range(num_streams)]
    await asyncio.wait(clients, timeout=LONG_LIFE_S)
    asked_s, left_s, joined_s, worked_s = await drain(redis)
    for client in clients:
        client.cancel()
    for client in clients:
        with contextlib.suppress(asyncio.CancelledError):
            await client
    gaps_s = [
        later - sooner
        for answer in answers
        for sooner, later in pairwise(answer.times_s)
        if later > asked_s and sooner < left_s
    ]
    return Run(left_s - asked_s, max(gaps_s), worked_s - joined_s)


def describe(name: str, runs: Sequence[Run]) -> None:
    figures = [
        f"{field} {statistics.median(values):.2f} s ({max(values):.2f} at most)"
        for field, values in zip(Run._fields, zip(*runs, strict=True), strict=True)
    ]
    print(f"{name}: {', '.join(figures)}", flush=True)


async def main(num_runs: int) -> int:
    with ChaosFleet(STEP_MS, has_proxy=False, num_workers=2, max_batch_size=NUM_ROWS) as fleet:
        async with connect(fleet.redis_url) as redis:
            with_room = [await measure(fleet, redis, NUM_ROWS * 3 // 4) for _ in range(num_runs)]
            describe("the other worker has room", with_room)
            full = [await measure(fleet, redis, NUM_ROWS * 3 // 2) for _ in range(num_runs)]
            describe("some wait", full)
        resumes = await count_resumes(fleet.base_url)
    print(f"requests that went on elsewhere: {dict(resumes)}")
    joins, pause = max(run.joins for run in with_room + full), max(run.pause for run in with_room)
    return int(resumes["died"] > 0 or joins > LIMIT_S or pause > LIMIT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    sys.exit(asyncio.run(main(parser.parse_args().runs)))
