"""Prints how long streams pause when a worker is killed: `python -m benchmarks.pauses [--kills 20]`.

16 streams run; a random worker is killed (SIGKILL) once each stream has advanced and all workers are ready. A
pause is the longest gap of a stream between the kill and the moment when it has five more tokens. Streams on
other workers count too, as their users do.

With `--workers 1` it also prints what a pause is made of: until the launcher has started the successor, until
that is ready, and until it has computed again what every stream had.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass
from itertools import pairwise

from common.broker.client import connect
from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load, body
from tests.support.tokenizer import ids as ids_of
from tests.support.waiting import wait_until

KEYS = Keys("default")


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from a worker's death until its successor was started, and from there until it was ready; and
    the tokens that it computed again.
    """

    detection_s: float
    start_s: float
    num_tokens: int

    def describe(self, pause_s: float) -> str:
        rest_s = max(pause_s - self.detection_s - self.start_s, 0.001)
        return (
            f"{pause_s:.2f} s = {self.detection_s:.2f} s detection + {self.start_s:.2f} s start + "
            f"{rest_s:.2f} s for {self.num_tokens} recomputed tokens ({self.num_tokens / rest_s:.0f}/s)"
        )


async def main(num_workers: int, kills: int, out_tokens: int) -> None:
    draw = random.Random(kills)
    pauses: list[float] = []
    restarts: list[tuple[float, Restart]] = []
    with Fleet(num_workers=num_workers, kv_cache_bytes="256MiB") as fleet:
        load = Load(fleet, out_tokens)
        for _ in range(kills):
            if max(len(stream.frames) for stream in load.streams) > out_tokens // 2:
                await load.whole()
                load = Load(fleet, out_tokens)
            await load.progress(draw.randint(5, 20))
            await wait_until(lambda: fleet.workers_ready() == num_workers, 60)
            name = f"w{draw.randrange(num_workers)}"
            restart, gaps = await asyncio.gather(watch_restart(fleet, load, name), kill(fleet, load, name))
            pauses += gaps
            restarts.append((max(gaps, default=0.0), restart))
        await load.whole()
    pauses.sort()
    print(
        f"{num_workers} workers, {kills} kills, {len(pauses)} pauses: p50 {pauses[len(pauses) // 2]:.2f} s, "
        f"p99 {pauses[int(len(pauses) * 0.99)]:.2f} s, longest {pauses[-1]:.2f} s",
        flush=True,
    )
    if num_workers == 1:
        for pause_s, restart in restarts:
            print(restart.describe(pause_s), flush=True)


async def watch_restart(fleet: Fleet, load: Load, name: str) -> Restart:
    """Watches a worker that is killed now, until its successor is ready."""
    began_s, old_pid = time.monotonic(), fleet.pid(name)
    num_tokens = sum(
        len(ids_of(body(i, 1)["inputs"])) + len(stream.frames) for i, stream in enumerate(load.streams)
    )
    async with connect(fleet.redis_url) as redis:
        old = set(await redis.zrange(KEYS.workers, 0, -1))
        await wait_until(lambda: fleet.pids().get(name, old_pid) != old_pid)
        started_s = time.monotonic()

        async def is_ready() -> bool:
            return bool(set(await redis.zrange(KEYS.workers, 0, -1)) - old)

        await wait_until(is_ready)
    return Restart(started_s - began_s, time.monotonic() - started_s, num_tokens)


async def kill(fleet: Fleet, load: Load, name: str) -> list[float]:
    """Kills a worker → the longest gap of each stream after the kill, in seconds."""
    killed_s, counts = time.monotonic(), [len(stream.frames) for stream in load.streams]
    os.kill(fleet.pid(name), signal.SIGKILL)
    await load.progress(5, 180)
    gaps = []
    for stream, count in zip(load.streams, counts, strict=True):
        times = [max(stream.times_s[count - 1], killed_s), *stream.times_s[count : count + 6]]
        gaps += [max(later - sooner for sooner, later in pairwise(times))] if len(times) > 1 else []
    return gaps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100, help="new tokens of each stream")
    args = parser.parse_args()
    asyncio.run(main(args.workers, args.kills, args.tokens))
