"""Prints how long tasks hold a gateway's event loop: `python -m benchmarks.many_streams [--streams 3000]`.

A real gateway process runs on a broker of its own and loses 5% of its messages; scripted workers without a
model send a token of each stream every step; the client checks every token. A hold is what a timer of the
gateway was late by; `cpu` is the part of it in which the gateway worked, whatever else runs on the machine.
"""

import argparse
import asyncio
import os
import time
from contextlib import ExitStack

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gateway import GENERATE_STREAM, Gateway, gateway
from common.metrics.catalogue import LOOP_HOLD
from tests.support import brokers
from tests.support.fleet.scripted_fleet import count_wrong, scripted_fleet
from tests.support.waiting import wait_until

LIMIT_MS = 20
"""The longest time that a task should hold an event loop."""


async def measure(
    server: Gateway, url: str, num_streams: int, num_workers: int, num_tokens: int, step_s: float
) -> None:
    async with scripted_fleet(url, num_workers, step_s):
        await wait_until(server.is_ready, 60)
        before = await read_holds(server.url)
        cpu_us, began_s = sum(server.cpu_us()), time.monotonic()
        wrong = await count_wrong(server.url, num_streams, num_tokens)
        wall_s, cpu_s = time.monotonic() - began_s, (sum(server.cpu_us()) - cpu_us) / 1e6
        print(
            f"{num_streams} streams of {num_tokens} tokens from {num_workers} workers: {wrong} wrong; "
            f"{wall_s:.0f} s, gateway {cpu_s / wall_s:.0%} of a core, "
            f"{cpu_s * 1e6 / num_streams / num_tokens:.0f} µs a token; holds:"
        )
        longest = {}
        for clock, counts in (await read_holds(server.url)).items():
            during = {bound: count - before[clock][bound] for bound, count in counts.items()}
            longest[clock] = longest_ms(during)
            print(f"  {clock}: longest up to {longest[clock]:g} ms; " + described(during))
        cpu_ms, wall_ms = longest["cpu"], longest["wall"]
        print(
            f"{time.strftime('%F %X')}, {num_streams} streams, {num_workers} workers: {wrong} wrong; "
            f"the event loop was held for {cpu_ms:g} ms of CPU at most ({wall_ms:g} ms by the clock); "
            f"never longer than {LIMIT_MS} ms: {cpu_ms <= LIMIT_MS} (by the clock {wall_ms <= LIMIT_MS})"
        )


async def read_holds(url: str) -> dict[str, dict[float, int]]:
    await asyncio.sleep(2)  # counts are published every second
    async with httpx.AsyncClient() as client:
        return hold_counts((await client.get(f"{url}/metrics")).text)


def hold_counts(text: str) -> dict[str, dict[float, int]]:
    """Clock → upper bound of a bucket (s) → holds up to it."""
    counts: dict[str, dict[float, int]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{LOOP_HOLD.name}_bucket":
                of_clock = counts.setdefault(sample.labels["clock"], {})
                of_clock[float(sample.labels["le"])] = int(sample.value)
    return counts


def longest_ms(counts: dict[float, int]) -> float:
    return 1e3 * min(bound for bound, count in counts.items() if count == max(counts.values()))


def described(counts: dict[float, int]) -> str:
    total, last, parts = max(counts.values()), 0, []
    for bound, count in sorted(counts.items()):
        if count > last:
            parts.append(f"{count - last} up to {1e3 * bound:g}")
        last = count
    return f"{total} in all: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--lose", type=float, default=0.05)
    args = parser.parse_args()
    os.environ |= {
        "MAX_CONCURRENT_REQUESTS": str(args.streams),
        "TOKENFLEET_TEST_LOSE": f"{args.lose}:7",
        "WORKER_GRACE_S": "3600",
    }
    with ExitStack() as stack:
        broker = stack.enter_context(brokers.running())
        server = stack.enter_context(gateway(broker, GENERATE_STREAM))
        uvloop.run(measure(server, broker.url, args.streams, args.workers, args.tokens, args.step_s))


if __name__ == "__main__":
    main()
