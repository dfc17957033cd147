"""Prints how long streams pause when processes are killed: `python -m benchmarks.pauses [--kills 20]`.

Streams run; processes are killed (SIGKILL) once each stream has advanced and all workers are ready: with
`--kill worker` (the default) a random worker, with `engine` the engine of one; `batcher`; `worker+batcher`
both at once; `workers` all of them. A pause is the longest gap of a stream between the kill and the moment
when it has five more tokens. Streams on other workers count too, as their users do.

`--why` prints what the longest pause of each kill is made of, by the timeline of its request.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import redis

from benchmarks.client import Stream
from common.broker.keys import Keys
from tests.support.fleet.fleet import Fleet
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_until

KEYS = Keys("default")
KINDS = ("worker", "engine", "batcher", "worker+batcher", "workers")
MORE_TOKENS = 5
MOST_S = 180.0
ENDS = {
    "died": "until it is known and what its logs say is saved",
    "interrupted": "until its row is given up",
    "taken_over": "until the next batcher has read it",
    "placed": "until a worker has room for it",
    "prefilled": "until its tokens are computed again, others first",
}
"""Event → the part of a pause that ends with it."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest gap of a stream after a kill; times are the system's, in s."""

    stream: Stream
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A pause in parts: what each ends with, and the seconds that it took."""

    pause: Pause
    parts: list[tuple[str, float]]

    @classmethod
    def of(cls, pause: Pause, killed_s: float, events: list[dict[str, Any]]) -> "Waterfall":
        """By the events of the stream's request."""
        marks = [("since the token before the kill", max(killed_s, pause.begin_s))]
        for event in events:
            at_s = event["at_ms"] / 1000
            if killed_s < at_s < pause.end_s and event["what"] in ENDS:
                marks.append((f"{ENDS[event['what']]} ({event['what']})", at_s))
        is_resumed = len(marks) > 1
        last = (
            "until its next token is here"
            if is_resumed
            else "on a worker that goes on: steps beside prefills"
        )
        marks.append((last, pause.end_s))
        begins = [pause.begin_s, *(at_s for _, at_s in marks)]
        parts = [(name, end_s - begin_s) for (name, end_s), begin_s in zip(marks, begins, strict=False)]
        return cls(pause, [part for part in parts if part[1] > 0])

    def __str__(self) -> str:
        lines = [
            f"{self.pause.duration_s:6.2f} s, a stream of {len(self.pause.stream.frames)} tokens by then"
        ]
        return "\n".join(lines + [f"  {seconds:6.2f} s {name}" for name, seconds in self.parts])


async def main(args: argparse.Namespace) -> None:
    draw = random.Random(args.kills)
    pauses: list[Pause] = []
    settings = {"kv_cache_bytes": "256MiB", "preload": None}
    with Fleet(num_workers=args.workers, num_batchers=args.batchers, **settings) as fleet:
        load = Load(fleet, args.tokens, args.streams)
        for _ in range(args.kills):
            await wait_until(lambda: is_whole(fleet, args), MOST_S)
            if max(len(stream.frames) for stream in load.streams) > args.tokens // 2:
                await load.whole()
                load = Load(fleet, args.tokens, args.streams)
            await load.progress(draw.randint(5, 20), MOST_S)
            killed_s, found = await kill(fleet, load, victims(fleet, args.kill, draw))
            pauses += found
            if args.why and found:
                longest = max(found, key=lambda pause: pause.duration_s)
                print(Waterfall.of(longest, killed_s, await timeline(fleet, longest.stream)), flush=True)
        await load.whole()
    print(describe([pause.duration_s for pause in pauses], args), flush=True)


def is_whole(fleet: Fleet, args: argparse.Namespace) -> bool:
    """Whether every process runs, and a preloaded worker waits if there should be one."""
    names = {f"w{number}" for number in range(args.workers)} | {
        f"b{number}" for number in range(args.batchers)
    }
    is_preloaded = fleet.preloaded() or "preloaded" not in fleet.errors()
    return bool(names <= fleet.pids().keys() and fleet.workers_ready() == args.workers and is_preloaded)


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


async def kill(fleet: Fleet, load: Load, pids: list[int]) -> tuple[float, list[Pause]]:
    """Kill processes → when, and the longest pause of each stream after that."""
    offset_s = time.time() - time.monotonic()
    killed_s, counts = time.monotonic(), [len(stream.frames) for stream in load.streams]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    await load.progress(MORE_TOKENS, MOST_S)
    found = []
    for stream, count in zip(load.streams, counts, strict=True):
        times = [max(stream.times_s[count - 1], killed_s), *stream.times_s[count : count + MORE_TOKENS + 1]]
        if len(times) > 1:
            begin_s, end_s = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
            found.append(Pause(stream, begin_s + offset_s, end_s + offset_s))
    return killed_s + offset_s, found


async def timeline(fleet: Fleet, stream: Stream) -> list[dict[str, Any]]:
    """The events of the stream's request, once that of its resumption is written."""
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=PATIENCE_S) as http:
        await asyncio.sleep(1.0)
        answer = (await http.get(f"/fleet/requests/{stream.place.split('/')[2]}")).json()
    [events] = answer["timelines"].values()
    return list(events)


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
    parser.add_argument("--why", action="store_true")
    asyncio.run(main(parser.parse_args()))
