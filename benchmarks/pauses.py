"""Prints how long streams pause when processes are killed: `python -m benchmarks.pauses [--kills 20]`.

Streams run; processes are killed (SIGKILL) once each stream has advanced and all workers are ready: with
`--kill worker` (the default) a random worker, with `engine` the engine of one; `batcher`; `worker+batcher`
both at once; `workers` all of them. A pause is the longest gap of a stream between the kill and the moment
when it has five more tokens. Streams on other workers count too, as their users do.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from itertools import pairwise

import psutil
import redis

from common.broker.keys import Keys
from deploy.launcher.process import SHORT_LIFE_S
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import wait_until

KEYS = Keys("default")
KINDS = ("worker", "engine", "batcher", "worker+batcher", "workers")
MORE_TOKENS = 5
MOST_S = 180.0


async def main(args: argparse.Namespace) -> None:
    draw = random.Random(args.kills)
    pauses_s: list[float] = []
    settings = {"kv_cache_bytes": "256MiB", "preload": True}
    with Fleet(num_workers=args.workers, num_batchers=args.batchers, **settings) as fleet:
        load = Load(fleet, args.tokens, args.streams)
        for _ in range(args.kills):
            await wait_until(lambda: is_whole(fleet, args), MOST_S)
            if max(len(stream.frames) for stream in load.streams) > args.tokens // 2:
                await load.whole()
                load = Load(fleet, args.tokens, args.streams)
            await load.progress(draw.randint(5, 20), MOST_S)
            pauses_s += await kill(load, victims(fleet, args.kill, draw))
        await load.whole()
    print(describe(pauses_s, args), flush=True)


def is_whole(fleet: Fleet, args: argparse.Namespace) -> bool:
    """Whether every process runs, workers for so long that they start again at once, and the template of
    workers has loaded the model.
    """
    names = {f"w{number}" for number in range(args.workers)} | {
        f"b{number}" for number in range(args.batchers)
    }
    if not names <= fleet.pids().keys() or fleet.workers_ready() < args.workers or not fleet.preloaded():
        return False
    return time.time() - max(psutil.Process(fleet.pid(name)).create_time() for name in names) > SHORT_LIFE_S


def victims(fleet: Fleet, kind: str, draw: random.Random) -> list[int]:
    """The processes that are killed."""
    names = sorted(name for name in fleet.pids() if name.startswith("w"))
    worker = draw.choice(names)
    match kind:
        case "engine":
            return [process.pid for process in fleet.engines(worker)]
        case "batcher":
            return [active_batcher(fleet)]
        case "worker+batcher":
            return [fleet.pid(worker), active_batcher(fleet)]
        case "workers":
            return [fleet.pid(name) for name in names]
    return [fleet.pid(worker)]


def active_batcher(fleet: Fleet) -> int:
    with redis.Redis.from_url(fleet.redis_url) as client:
        holder = client.get(KEYS.batcher)
    return fleet.pid(holder.decode().split("-")[0])


async def kill(load: Load, pids: list[int]) -> list[float]:
    """Kill processes → the longest pause of each stream after that."""
    killed_s, counts = time.monotonic(), [len(stream.frames) for stream in load.streams]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await load.progress(MORE_TOKENS, MOST_S)
    found = []
    for stream, count in zip(load.streams, counts, strict=True):
        times = [max(stream.times_s[count - 1], killed_s), *stream.times_s[count : count + MORE_TOKENS + 1]]
        if len(times) > 1:
            found.append(max(later - sooner for sooner, later in pairwise(times)))
    return found


def describe(seconds: list[float], args: argparse.Namespace) -> str:
    ordered = sorted(seconds)
    p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
    return (
        f"{args.kill} killed {args.kills} times, {args.workers} workers, {args.streams} streams, load "
        f"{os.getloadavg()[0]:.0f}: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {ordered[-1]:.2f} s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kill", choices=KINDS, default="worker")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batchers", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of each stream")
    asyncio.run(main(parser.parse_args()))
