"""Prints what attacks on a gateway cost its other clients:
`python -m benchmarks.attacks.cost [--seconds 10] [NAME …]`.

A fleet with one gateway and the bundled model keeps 32 streams going, and is asked for its health every 50
ms. Each attack of `benchmarks/attacks/attackers.py` runs alone, then all at once; the first line is without
an attack. Printed for each: the 99th percentile and the longest gap between two tokens of a stream, the
longest answer to `/health`, the gateway's memory before, at most and 5 s after, and how many requests failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil
import uvloop

from benchmarks.attacks.attackers import ATTACKS
from tests.support.fleet.fleet import Fleet

NUM_STREAMS = 32
REST_S = 5.0
PROBE_S = 0.05


@dataclass
class Seen:
    """What the other clients saw during an attack."""

    gaps_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    num_failed: int = 0


async def stream(client: httpx.AsyncClient, seed: int, seen: Seen) -> None:
    """Read streams one after another. A gap is the time between two tokens, not the wait for the first."""
    while True:
        parameters = {"max_new_tokens": 200, "ignore_eos": True, "do_sample": True, "seed": seed}
        body = {"inputs": f"Tell me story number {seed}.", "parameters": parameters}
        try:
            async with client.stream("POST", "/generate_stream", json=body) as response:
                if response.status_code != 200:
                    seen.num_failed += 1
                    await asyncio.sleep(0.1)
                    continue
                last_s = 0.0
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    if "error" in json.loads(line[5:]):
                        seen.num_failed += 1
                    if last_s:
                        seen.gaps_s.append(time.monotonic() - last_s)
                    last_s = time.monotonic()
        except httpx.HTTPError:
            seen.num_failed += 1


async def ask_health(client: httpx.AsyncClient, gateway: psutil.Process, seen: Seen) -> None:
    while True:
        seen.rss.append(gateway.memory_info().rss)
        began_s = time.monotonic()
        try:
            async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as fresh:
                seen.num_failed += (await fresh.get("/health")).status_code != 200
        except httpx.HTTPError:
            seen.num_failed += 1
        finally:
            seen.health_s.append(time.monotonic() - began_s)
        await asyncio.sleep(PROBE_S)


async def measure(fleet: Fleet, names: Sequence[str], seconds: float) -> str:
    """Measure one attack, and return its line of the table."""
    gateway = psutil.Process(fleet.pid("g0"))
    before, seen = gateway.memory_info().rss, Seen()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=fleet.base_url, timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(stream(client, seed, seen)) for seed in range(NUM_STREAMS)]
        tasks.append(asyncio.create_task(ask_health(client, gateway, seen)))
        await asyncio.sleep(2)
        seen.gaps_s.clear()
        place = ("127.0.0.1", str(fleet.settings["port"]))
        module = [sys.executable, "-m", "benchmarks.attacks.attackers"]
        attackers = [
            await asyncio.create_subprocess_exec(*module, name, *place, str(seconds), stderr=DEVNULL)
            for name in names
        ]
        await asyncio.sleep(seconds + 1)
        for attacker in attackers:
            with contextlib.suppress(ProcessLookupError):
                attacker.kill()
            await attacker.wait()
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(done, asyncio.CancelledError):
                raise RuntimeError("a client has ended") from done
    await asyncio.sleep(REST_S)
    gaps_ms = sorted(1000 * gap for gap in seen.gaps_s)
    memory = [size / 2**20 for size in (before, max(seen.rss), gateway.memory_info().rss)]
    return (
        f"gaps p99 {gaps_ms[int(0.99 * len(gaps_ms))]:6.0f}, max {gaps_ms[-1]:6.0f} ms; "
        f"health max {1000 * max(seen.health_s):6.0f} ms; "
        f"memory {memory[0]:4.0f}, {memory[1]:4.0f}, {memory[2]:4.0f} MiB; failed {seen.num_failed}"
    )


def main(names: Sequence[str], seconds: float) -> None:
    runs = {"none": (), **{name: (name,) for name in names}, "all at once": tuple(names)}
    with Fleet(num_gateways=1) as fleet:
        for name, attacks in runs.items():
            print(f"{name:16}", uvloop.run(measure(fleet, attacks, seconds)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("names", nargs="*", default=[*ATTACKS])
    given = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    main(given.names, given.seconds)
