"""Prints how long streams pause when a batcher is killed: `python -m benchmarks.succession [--kills 10]`.

Streams run on two workers, beside two batchers; the active one is killed (SIGKILL) once each stream has
advanced. A pause is the longest gap of a stream from the kill until it has five tokens more than when the
successor had taken both workers over. Rows run on to the end of their grant: `--horizon 4` shows the pauses
of workers whose steps are faster than this machine's. `--size 64x256x63` has no model: 64 workers hold 256
rows each, with 63 flushes in their logs. Printed is how soon after the new lease they get their first plans.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from itertools import pairwise

import psutil
import redis.asyncio

from benchmarks.client import Stream
from common.broker.client import connect
from common.broker.keys import Keys
from tests.support import brokers
from tests.support.fleet.batchers import batcher
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.full_pool import FullPool
from tests.support.load import Load
from tests.support.waiting import wait_until

KEYS = Keys("default")
NUM_WORKERS = 2
MORE_TOKENS = 5


async def measure_pauses(kills: int, num_streams: int, out_tokens: int, horizon: int) -> None:
    pauses: list[float] = []
    with Fleet(num_workers=NUM_WORKERS, num_batchers=2, kv_cache_bytes="256MiB", horizon=horizon) as fleet:
        async with connect(fleet.redis_url) as broker:
            load = Load(fleet, out_tokens, num_streams)
            for _ in range(kills):
                if max(len(stream.frames) for stream in load.streams) > out_tokens // 2:
                    await load.whole()
                    load = Load(fleet, out_tokens, num_streams)
                await load.progress(20)
                await wait_until(lambda: {"b0", "b1"} <= fleet.pids().keys())
                pauses += await kill_batcher(fleet, broker, load)
            await load.whole()
    print(f"{kills} kills, {num_streams} streams, horizon {horizon}: {describe(pauses)}", flush=True)


async def kill_batcher(fleet: Fleet, broker: redis.asyncio.Redis, load: Load) -> list[float]:
    """Kills the active batcher → the longest gap of each stream after that, in seconds."""
    holder: bytes = await wait_until(lambda: broker.get(KEYS.batcher))
    epoch = await broker.get(KEYS.epoch)
    killed_s, counts = time.monotonic(), [len(stream.frames) for stream in load.streams]
    os.kill(fleet.pid(holder.decode().split("-")[0]), signal.SIGKILL)
    await broker.delete(KEYS.state)

    async def is_taken_over() -> bool:
        workers = await broker.hget(KEYS.state, "workers")  # type: ignore[misc]
        return await broker.get(KEYS.epoch) != epoch and int(workers or 0) == NUM_WORKERS

    await wait_until(is_taken_over)
    await load.progress(MORE_TOKENS, timeout_s=240)
    return [
        gap
        for stream, count in zip(load.streams, counts, strict=True)
        if (gap := longest_gap(stream, count, killed_s)) is not None
    ]


def longest_gap(stream: Stream, count: int, killed_s: float) -> float | None:
    """The longest gap of a stream that had `count` tokens when the batcher was killed."""
    times = [max(stream.times_s[count - 1], killed_s), *stream.times_s[count:]]
    return max((later - sooner for sooner, later in pairwise(times)), default=None)


def describe(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return f"{len(ordered)} pauses: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {ordered[-1]:.2f} s"


async def measure_takeover(workers: int, rows: int, flushes: int) -> None:
    with brokers.running() as broker:
        async with connect(broker.url) as client:
            pool = FullPool(client, workers, rows, flushes)
            await pool.fill()
            answering = asyncio.create_task(pool.answer(pool.names))
            await client.set(KEYS.batcher, "another")
            with batcher(broker.url, "b0") as process:
                await wait_until(lambda: client.exists(KEYS.processes))  # it stands by
                before_s = cpu_s(process.pid)
                await client.delete(KEYS.batcher)
                await wait_until(lambda: len(pool.first_plans) == workers)
                used_s = cpu_s(process.pid) - before_s
                lease_s = await pool.lease_s()
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
    after_s = sorted(plan_s - lease_s for plan_s in pool.first_plans.values())
    print(
        f"{workers} workers, {rows} rows, {flushes} flushes: first plans {after_s[0]:.2f} s "
        f"to {after_s[-1]:.2f} s after the lease, {used_s:.2f} s of the batcher's CPU; "
        f"{len(pool.starts)} requests resumed"
    )


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="new tokens of each stream")
    parser.add_argument("--horizon", type=int, default=32)
    parser.add_argument("--size", help="WORKERSxROWSxFLUSHES, as 64x256x63")
    args = parser.parse_args()
    if args.size:
        asyncio.run(measure_takeover(*map(int, args.size.split("x"))))
    else:
        asyncio.run(measure_pauses(args.kills, args.streams, args.tokens, args.horizon))
