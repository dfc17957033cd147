"""Prints how long streams pause when a worker is killed: `python -m benchmarks.pauses [--kills 20]`.

16 streams run; a random worker is killed (SIGKILL) once each stream has advanced and all workers are ready. A
pause is the longest gap of a stream between the kill and the moment when it has five more tokens. Streams on
other workers count too, as their users do.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from itertools import pairwise

from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import wait_until


async def main(num_workers: int, kills: int, out_tokens: int) -> None:
    draw = random.Random(kills)
    pauses: list[float] = []
    with Fleet(num_workers=num_workers, kv_cache_bytes="256MiB") as fleet:
        load = Load(fleet, out_tokens)
        for _ in range(kills):
            if max(len(stream.frames) for stream in load.streams) > out_tokens // 2:
                await load.whole()
                load = Load(fleet, out_tokens)
            await load.progress(draw.randint(5, 20))
            await wait_until(lambda: fleet.workers_ready() == num_workers, 60)
            pauses += await kill(fleet, load, f"w{draw.randrange(num_workers)}")
        await load.whole()
    pauses.sort()
    print(
        f"{num_workers} workers, {kills} kills, {len(pauses)} pauses: p50 {pauses[len(pauses) // 2]:.2f} s, "
        f"p99 {pauses[int(len(pauses) * 0.99)]:.2f} s, longest {pauses[-1]:.2f} s",
        flush=True,
    )


async def kill(fleet: Fleet, load: Load, name: str) -> list[float]:
    """Kills a worker → the longest gap of each stream after the kill, in seconds."""
    killed_s, counts = time.monotonic(), [len(stream.frames) for stream in load.streams]
    os.kill(fleet.pid(name), signal.SIGKILL)
    await load.progress(5)
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
